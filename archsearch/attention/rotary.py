"""Rotary position embedding (RoFormer, arXiv 2104.09864) with the scalings that transformers knows.

Shapes: B batch, T tokens, H heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_hydrahead import HydraHeadConfig

PositionEmbeddings = tuple[Tensor, Tensor]
"""(cos_BTD, sin_BTD), the scaling of the variant already multiplied in."""


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
        self, positions_BT: Tensor, dtype: torch.dtype, share: float = 1.0
    ) -> PositionEmbeddings:
        """cos and sin at integer positions, computed in fp32 and returned as dtype; share: how much of RoPE is left."""
        frequencies, scaling = self._on(positions_BT.device)
        if share != 1:
            frequencies, scaling = frequencies * share, scaling**share
        half = positions_BT[..., None].float() * frequencies
        angles_BTD = torch.cat((half, half), dim=-1)
        return (angles_BTD.cos() * scaling).to(dtype), (angles_BTD.sin() * scaling).to(dtype)


def rotate(x_BTHD: Tensor, embeddings: PositionEmbeddings) -> Tensor:
    """Rotates each head's vector by the angle of its token's position."""
    # The tables follow x: under autocast the hidden state is fp32 while the heads are bf16.
    cos, sin = (table.unsqueeze(2).to(x_BTHD.dtype) for table in embeddings)
    first, second = x_BTHD.chunk(2, dim=-1)
    return x_BTHD * cos + torch.cat((-second, first), dim=-1) * sin
