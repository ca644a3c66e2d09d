"""Who makes o_proj's input of the branches' outputs: our Triton kernel, torch ops.

Shapes: B batch, T tokens, F full-attention heads, n linear heads, H = F + n, D head_dim.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import Situation, dense, purpose_of
from .fusion import HeadIndex, fuse, scatter_heads
from .requirements import imported, reason_of, triton_lacks

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FusionCall(NamedTuple):
    """The arguments of dispatch.fuse_and_scatter, which says what they are."""

    full_BTFD: Tensor | None
    linear_BTnD: Tensor
    gamma_nD: Tensor
    bias_nD: Tensor | None
    gate_BTnD: Tensor | None
    norm_eps: float | None
    order: HeadIndex

    @property
    def dtype(self) -> torch.dtype:
        """The result's."""
        dtype = self.linear_BTnD.dtype
        return dtype if self.full_BTFD is None else torch.promote_types(dtype, self.full_BTFD.dtype)

    def situation(self) -> Situation:
        """What the choice depends on."""
        _, tokens, _, dim = self.linear_BTnD.shape
        device = self.linear_BTnD.device
        return Situation(device, self.dtype, dim, purpose_of(self[:5], tokens))


def run_triton(call: FusionCall) -> Tensor:
    """One launch from both branches to o_proj's input, and one for the gradients."""
    full, linear, gate = (
        None if x is None else dense(x) for x in (call.full_BTFD, call.linear_BTnD, call.gate_BTnD)
    )
    assert linear is not None
    batch, tokens, _, dim = linear.shape
    heads, num_full = call.order.heads, 0 if full is None else full.shape[2]
    output: Tensor = _kernels().fusion(
        None if full is None else full.to(call.dtype),
        linear.to(call.dtype),
        _plan(heads, num_full, call.norm_eps is not None, linear.device),
        gamma_RD=call.gamma_nD,
        bias_RD=call.bias_nD,
        gate_BTED=gate,
        gate_factor=2.0,
        # Taken even where no head is normed: rows of zeros must not make infinities.
        norm_eps=1e-6 if call.norm_eps is None else call.norm_eps,
    )
    return output.view(batch, tokens, len(heads), dim)


def run_torch(call: FusionCall) -> Tensor:
    """An op after another on the linear heads, then one that gathers all."""
    gate = call.gate_BTnD
    linear = fuse(
        call.linear_BTnD,
        gamma_nD=call.gamma_nD,
        bias_nD=call.bias_nD,
        gate_BTnD=None if gate is None else 2 * torch.sigmoid(gate),
        norm_eps=call.norm_eps,
    )
    return scatter_heads(
        [linear] if call.full_BTFD is None else [call.full_BTFD, linear], call.order
    )


def triton_cannot(situation: Situation) -> str | None:
    """Why our kernel can't serve."""
    return triton_lacks(situation, TRITON_DTYPES) or reason_of(_kernels())


@cache
def _plan(order: tuple[int, ...], num_full: int, norm: bool, device: torch.device) -> Any:
    """The kernel's table for heads of which the first num_full places are full attention's."""
    tables = importlib.import_module("archsearch_kernels.fusion.heads")
    heads = []
    for place in order:
        if place < num_full:
            heads.append(tables.Head(True, place, norm=False))
        else:
            row = place - num_full
            heads.append(tables.Head(False, row, norm=norm, row=row, gate=row))
    return tables.plan_fusion(heads, device)


@cache
def _kernels() -> Any:
    return imported("archsearch_kernels.fusion.kernel", "archsearch_kernels")
