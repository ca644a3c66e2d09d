"""Rotary position embedding (RoFormer, arXiv 2104.09864) with the scalings that transformers knows.

Shapes: B batch, T tokens, H heads, D head_dim, R = D / 2 pairs of channels, the fastest first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_hydrahead import HydraHeadConfig

PositionEmbeddings = tuple[Tensor, Tensor]
"""(cos_BTD, sin_BTD), the scaling of the variant already multiplied in."""


def smaller_angles(angles_BTR: Tensor, share: float) -> PositionEmbeddings:
    """All angles times the cube of the share, as if tokens moved together. Of the share itself, most of the change would
    lie in its last tenth."""
    angles_BTR = angles_BTR * share**3
    return angles_BTR.cos(), angles_BTR.sin()


def slow_first(angles_BTR: Tensor, share: float) -> PositionEmbeddings:
    """Pair after pair stands still, those that turn slowest first, since they tell positions apart least."""
    pairs = angles_BTR.shape[-1]
    left_R = share * pairs - torch.arange(pairs, device=angles_BTR.device)
    angles_BTR = angles_BTR * left_R.clamp(0, 1)
    return angles_BTR.cos(), angles_BTR.sin()


def mixed(angles_BTR: Tensor, share: float) -> PositionEmbeddings:
    """The rotation times share plus the identity times the rest: amid the way a key's place counts, not its distance alone."""
    return share * angles_BTR.cos() + (1 - share), share * angles_BTR.sin()


FADES: dict[str, Callable[[Tensor, float], PositionEmbeddings]] = {
    "slow_first": slow_first,
    "angles": smaller_angles,
    "mixed": mixed,
}
"""Ways from RoPE (share 1) to none (share 0): cos and sin [B, T, R] at a share, without steps and the same at both ends."""


class Rotary:
    """Makes cos and sin tables.

    No module and no buffers: frequencies are computed at first use on each device, so that a model built on the
    meta device needs no special treatment.
    """

    def __init__(self, config: HydraHeadConfig) -> None:
        self.config = config
        self._frequencies: dict[torch.device, tuple[Tensor, float]] = {}

    def _on(self, device: torch.device) -> tuple[Tensor, float]:
        if device not in self._frequencies:
            rope = self.config.rope_parameters
            if rope["rope_type"] == "default":
                powers = torch.arange(0, self.config.head_dim, 2, dtype=torch.float, device=device)
                # The form that Hugging Face uses, so that both round alike.
                found = (1.0 / rope["rope_theta"] ** (powers / self.config.head_dim), 1.0)
            else:
                found = ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config, device)
            self._frequencies[device] = found
        return self._frequencies[device]

    def scaling(self, device: torch.device) -> float:
        """The factor that the variant (yarn) puts on cos and sin."""
        return self._on(device)[1]

    def tables(
        self,
        positions_BT: Tensor,
        dtype: torch.dtype,
        share: float = 1.0,
        fade: str = "slow_first",
    ) -> PositionEmbeddings:
        """cos and sin at integer positions, computed in fp32 and returned as dtype.

        share: how much of RoPE is left; fade: what that means between 1 and 0, a name of FADES.
        """
        frequencies, scaling = self._on(positions_BT.device)
        angles_BTR = positions_BT[..., None].float() * frequencies
        if share == 1:
            halves = angles_BTR.cos(), angles_BTR.sin()
        else:
            halves, scaling = FADES[fade](angles_BTR, share), scaling**share
        cos, sin = (torch.cat((half, half), dim=-1) * scaling for half in halves)
        return cos.to(dtype), sin.to(dtype)


def rotate(x_BTHD: Tensor, embeddings: PositionEmbeddings) -> Tensor:
    """Rotates each head's vector by the angle of its token's position."""
    # The tables follow x: under autocast the hidden state is fp32 while the heads are bf16.
    cos, sin = (table.unsqueeze(2).to(x_BTHD.dtype) for table in embeddings)
    first, second = x_BTHD.chunk(2, dim=-1)
    return x_BTHD * cos + torch.cat((-second, first), dim=-1) * sin
