"""What happens to head outputs between an operator and o_proj, and the norms that operators share.

Shapes: B batch, T tokens, H query heads, n heads of one operator, D head_dim.
Source: HydraHead (arXiv 2606.20097), the fusion step: O~_h = gamma_h * RMSNorm(O_h), heads back to their index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """RMSNorm with a weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension; statistics in fp32, result in x's dtype."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """What RMSNorm computes."""
    # The weight follows x: with mixed dtypes (autocast) torch falls back to a slow path and warns.
    return F.rms_norm(x, (x.shape[-1],), weight_D.to(x.dtype), eps)


class HeadIndex:
    """A list of head numbers that is turned into an index tensor once a device."""

    def __init__(self, heads: Sequence[int]) -> None:
        self.heads = tuple(heads)
        self._tensors: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The heads as an int64 tensor on device."""
        if device not in self._tensors:
            # Made under inference_mode, the index could not serve a later backward pass.
            with torch.inference_mode(False):
                self._tensors[device] = torch.tensor(self.heads, dtype=torch.long, device=device)
        return self._tensors[device]


def head_rows(
    parameters: Mapping[str, Tensor], places: Mapping[str, Sequence[int]], rows_per_head: int
) -> dict[str, Tensor]:
    """Copies of parameters with, of each module named in places, only those heads' rows on the first axis."""
    chosen = {}
    for name, tensor in parameters.items():
        heads = places.get(name.split(".")[0])
        if heads is None:
            chosen[name] = tensor.clone()
        else:
            by_head = tensor.view(-1, rows_per_head, *tensor.shape[1:])
            index = torch.tensor(heads, device=tensor.device)
            chosen[name] = by_head.index_select(0, index).flatten(0, 1)
    return chosen


class LinearHeads(NamedTuple):
    """Outputs of linear heads before fusion, and what fusion takes; the gate is raw: its factor is 2 sigmoid(gate)."""

    o_BTnD: Tensor
    gamma_nD: Tensor
    bias_nD: Tensor | None
    gate_BTnD: Tensor | None
    norm_eps: float | None


def fuse(
    o_BTnD: Tensor,
    *,
    gamma_nD: Tensor,
    bias_nD: Tensor | None,
    gate_BTnD: Tensor | None,
    norm_eps: float | None,
) -> Tensor:
    """Per head: RMSNorm without weight (norm_eps None skips it), times gamma, plus bias, times gate."""
    if norm_eps is not None:
        o_BTnD = F.rms_norm(o_BTnD, (o_BTnD.shape[-1],), None, norm_eps)
    o_BTnD = o_BTnD * gamma_nD.to(o_BTnD.dtype)
    if bias_nD is not None:
        o_BTnD = o_BTnD + bias_nD.to(o_BTnD.dtype)
    return o_BTnD if gate_BTnD is None else o_BTnD * gate_BTnD


def scatter_heads(branches: Sequence[Tensor], order: HeadIndex) -> Tensor:
    """Puts branch outputs [B, T, n, D] back at their own head index: [B, T, H, D].

    order.heads[h] is the place of head h in the concatenation of the branches.
    """
    if len(branches) == 1:
        return branches[0]
    dtype = torch.promote_types(branches[0].dtype, branches[-1].dtype)
    joined = torch.cat([branch.to(dtype) for branch in branches], dim=2)
    return joined.index_select(2, order.on(joined.device))
