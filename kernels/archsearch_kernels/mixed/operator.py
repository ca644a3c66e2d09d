"""A layer's mixed heads between projections and o_proj on a GPU: prologue, full attention beside Gated DeltaNet, fusion.

Shapes: B batch, T tokens, H query heads, G KV heads, n Gated DeltaNet heads, D head_dim; m KV heads of full attention.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from archsearch_kernels.fusion.kernel import fusion
from archsearch_kernels.gdn.operator import gated_delta_net
from archsearch_kernels.interpreter import check_tensors
from archsearch_kernels.mixed.attention import attend
from archsearch_kernels.mixed.heads import MixedPlan
from archsearch_kernels.mixed.remade import Remade
from archsearch_kernels.prologue.heads import HeadPlan
from archsearch_kernels.prologue.kernel import prologue

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q [B, T, n, D] over k and v [B, T, m, D], to [B, T, n, D]."""


def mixed_heads(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    a_BTn: Tensor,
    b_BTn: Tensor,
    A_log_n: Tensor,
    dt_bias_n: Tensor,
    plan: MixedPlan,
    *,
    q_weight_D: Tensor | None = None,
    k_weight_D: Tensor | None = None,
    cos_BTD: Tensor | None = None,
    sin_BTD: Tensor | None = None,
    factor_BT: Tensor | None = None,
    gamma_nD: Tensor | None = None,
    bias_nD: Tensor | None = None,
    gate_BTnD: Tensor | None = None,
    norm_eps: float = 1e-6,
    full_attention: Attend = attend,
    remake: bool = False,
    backward_parts: int = 1,
    side_stream: torch.cuda.Stream | None = None,
) -> Tensor:
    """o_proj's input [B, T, H D] without gaps, heads in their own order; differentiable in all tensors but tables.

    q, k, v: raw projections, all bf16 or all fp32, any strides with the last one 1; a, b: raw gates of the linear heads
    alone, in plan.linear's order, as are A_log, dt_bias, gamma, bias and gate (raw too: the factor is 2 sigmoid(gate)).
    Weights of the q and k norm (both or neither), cos, sin and factor are the prologue's, and needed where the plan's
    switches ask for them. Causal from the first token on; no state, no packed sequences.

    remake: q and k of the branches are made again for the backward pass, which saves 2 to 4% of its peak memory and costs up
    to 1 ms. backward_parts: gated_delta_net's, which saves up to 20%. side_stream: where full attention runs beside the linear
    heads. Raises ValueError where the plan is of other heads or another device, and for what its operators refuse.
    """
    _check(plan, q_BTHD, k_BTGD, v_BTGD, a_BTn)
    options: dict[str, Any] = {
        "q_weight_D": q_weight_D,
        "k_weight_D": k_weight_D,
        "norm_eps": norm_eps,
        "cos_BTD": cos_BTD,
        "sin_BTD": sin_BTD,
        "factor_BT": factor_BT,
    }
    full, linear = _branches(
        list(prologue(q_BTHD, k_BTGD, plan.prologue, **options)),
        v_BTGD,
        (a_BTn, b_BTn, A_log_n, dt_bias_n),
        plan,
        partial(_kept, q_BTHD, k_BTGD, options, remake and torch.is_grad_enabled()),
        full_attention,
        side_stream,
        backward_parts,
    )
    # Without linear heads gamma, bias and gate are empty, but there: their absence would be another compilation.
    return fusion(
        full,
        linear,
        plan.fusion,
        gamma_RD=gamma_nD,
        bias_RD=bias_nD,
        gate_BTED=gate_BTnD,
        norm_eps=norm_eps,
    )


def _branches(
    parts: list[Tensor],
    v_BTGD: Tensor,
    gates: tuple[Tensor, Tensor, Tensor, Tensor],
    plan: MixedPlan,
    keep: Callable[[HeadPlan, list[Tensor]], AbstractContextManager[Any]],
    full_attention: Attend,
    side: torch.cuda.Stream | None,
    backward_parts: int,
) -> tuple[Tensor | None, Tensor | None]:
    """What both branches make of q and k, which are in parts by branch, and let go of as soon as they are used."""
    v_linear, v_full = _values(v_BTGD, plan)
    full, linear = None, None
    main = torch.cuda.current_stream() if side is not None else None
    if plan.prologue_full is not None:
        q, k = parts[:2]
        with _beside(side, main, [q, k, v_full]), keep(plan.prologue_full, [q, k]):
            full = full_attention(q, k, v_full)
        del q, k, parts[:2]
    if plan.prologue_linear is not None:
        q, k = parts
        with keep(plan.prologue_linear, parts):
            index = (plan.q_index, plan.kv_index)
            linear, _ = gated_delta_net(
                q, k, v_linear, *gates, *index, backward_parts=backward_parts
            )
    if full is not None and side is not None and main is not None:
        main.wait_stream(side)
        full.record_stream(main)
    return full, linear


def _beside(
    side: torch.cuda.Stream | None, main: torch.cuda.Stream | None, read: list[Tensor]
) -> AbstractContextManager[Any]:
    """Work on `side` after what main has been given; `read` is not given back to main before side has read it."""
    if side is None or main is None:
        return nullcontext()
    side.wait_stream(main)
    for x in read:
        x.record_stream(side)
    return torch.cuda.stream(side)


def _kept(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    options: dict[str, Any],
    remake: bool,
    own: HeadPlan,
    made: list[Tensor],
) -> AbstractContextManager[Any]:
    """Operators inside keep `made`, the branch's q and k, or with remake how to make them again."""
    if not remake:
        return nullcontext()
    raw_q, raw_k = q_BTHD.detach(), k_BTGD.detach()
    return Remade(made, lambda: prologue(raw_q, raw_k, own, **options)).hooks()


def _values(v_BTGD: Tensor, plan: MixedPlan) -> tuple[Tensor, Tensor]:
    """v as the linear heads and as full attention read it."""
    if not plan.full:
        return v_BTGD, v_BTGD
    if not plan.linear and plan.full_kv == tuple(range(plan.num_kv_heads)):
        return v_BTGD, v_BTGD
    v_linear, v_full = _SharedValues.apply(v_BTGD, plan)  # type: ignore[no-untyped-call]
    return v_linear, v_full


class _SharedValues(torch.autograd.Function):
    """v twice, whole and the heads that full attention reads, whose gradient is added where that of the whole lies."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, plan: MixedPlan) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.runs, ctx.like = plan.kv_runs, v.new_empty(0)
        ctx.shape = v.shape
        if len(plan.kv_runs) == 1:
            return v.view_as(v), v[:, :, plan.kv_runs[0][1]]
        return v.view_as(v), v.index_select(2, plan.full_kv_index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dv: Tensor | None, dv_full: Tensor | None) -> tuple[Tensor | None, None]:
        if dv_full is None:
            return dv, None
        # dv is gated_delta_net's own result, which nobody else holds.
        total = ctx.like.new_zeros(ctx.shape) if dv is None else dv
        for places, heads in ctx.runs:
            total[:, :, heads] += dv_full[:, :, places]
        return total, None


def _check(plan: MixedPlan, q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> None:
    """What the operators would blame on their own inputs, and v, which SDPA does not look at as they do."""
    check_tensors("q, k, v, a", (q, k, v, a))
    if not isinstance(plan, MixedPlan):
        raise ValueError(f"plan must be plan_mixed's result; got {type(plan).__name__}")
    if (q.ndim, k.ndim, a.ndim) != (4, 4, 3):
        shapes = [tuple(x.shape) for x in (q, k, a)]
        raise ValueError(f"q, k and a are {shapes}; they need 4, 4 and 3 dimensions")
    if (v.shape, v.dtype, v.device) != (k.shape, k.dtype, k.device):
        raise ValueError(f"v must be {tuple(k.shape)} of {k.dtype} on {k.device}, as k is")
    heads = (q.shape[2], k.shape[2], a.shape[2])
    expected = (plan.num_heads, plan.num_kv_heads, len(plan.linear))
    if heads != expected:
        raise ValueError(f"heads of q, k and a are {heads}; the plan has {expected}")
    if q.device != plan.device:
        raise ValueError(f"the plan is on {plan.device}, q on {q.device}")
