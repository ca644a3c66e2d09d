"""Head outputs between operator and o_proj on a GPU, by Triton, forward and backward; same signature as reference.py.

Shapes: B batch, T tokens, H query heads, F heads of the full branch, n heads of the linear branch, R rows of gamma and bias,
E heads of the gate, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from archsearch_kernels.fusion import passes
from archsearch_kernels.fusion.heads import FusionPlan
from archsearch_kernels.interpreter import check_device, check_tensors

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

NUMBERS_A_TILE = {"fuse": 4096, "part_gradients": 2048}
"""Numbers that a program holds of each tensor at once."""
TILES = 4
"""Tiles of one backward program: its partial sums are then 2% of what it moves."""
LAUNCH: dict[str, dict[str, int]] = {
    "fuse": {"num_warps": 4, "num_stages": 1},
    "part_gradients": {"num_warps": 4, "num_stages": 1},
}


def fusion(
    full_BTFD: Tensor | None,
    linear_BTnD: Tensor | None,
    plan: FusionPlan,
    *,
    gamma_RD: Tensor | None = None,
    bias_RD: Tensor | None = None,
    gate_BTED: Tensor | None = None,
    gate_factor: float = 2.0,
    norm_eps: float = 1e-6,
) -> Tensor:
    """o_proj's input [B, T, H D] without gaps, in the branches' dtype; differentiable in all tensors.

    Per head: RMSNorm without weight, times its row of gamma, plus its row of bias, times gate_factor sigmoid(its head of the
    gate's raw projection); each of them only where the plan gives it to the head and the tensor is there. Statistics in fp32.
    Branches: bf16, fp16 or fp32; a branch without heads may be None. Branches and gate: any strides with the last one 1.
    gamma may also be [R] or [R, 1], one number a row. D: 16, 32, 64, 128 or 256. Raises ValueError for other inputs.
    """
    some = _check(full_BTFD, linear_BTnD, gate_BTED, plan)
    gamma_RD = _rows("gamma", gamma_RD, plan, some)
    bias_RD = _rows("bias", bias_RD, plan, some)
    if gamma_RD is not None and bias_RD is not None and gamma_RD.shape != bias_RD.shape:
        raise ValueError(f"gamma has {len(gamma_RD)} rows, bias {len(bias_RD)}")
    out: Tensor = _Fusion.apply(  # type: ignore[no-untyped-call]
        full_BTFD, linear_BTnD, gamma_RD, bias_RD, gate_BTED, plan, gate_factor, norm_eps
    )
    return out


class _Fusion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        full: Tensor | None,
        linear: Tensor | None,
        gamma: Tensor | None,
        bias: Tensor | None,
        gate: Tensor | None,
        plan: FusionPlan,
        gate_factor: float,
        norm_eps: float,
    ) -> Tensor:
        ctx.save_for_backward(full, linear, gamma, bias, gate)
        ctx.plan, ctx.numbers = plan, (norm_eps, gate_factor)
        some = linear if full is None else full
        assert some is not None
        (batch, tokens, _, dim), heads = some.shape, len(plan.heads)
        out = some.new_empty(batch, tokens, heads * dim)
        tile = NUMBERS_A_TILE["fuse"] // dim
        if out.numel():
            # A kernel takes all pointers: those of a branch that is not there are never followed.
            full, linear = some if full is None else full, some if linear is None else linear
            with torch.cuda.device_of(some):
                passes.fuse[(-(-batch * tokens // tile) * heads,)](
                    full,
                    linear,
                    gamma,
                    bias,
                    gate,
                    out,
                    plan.table,
                    heads,
                    batch * tokens,
                    tokens,
                    *_strides(full),
                    *_strides(linear),
                    *_strides(gate),
                    *ctx.numbers,
                    D=dim,
                    BT=tile,
                    **LAUNCH["fuse"],
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        full, linear, gamma, bias, gate = ctx.saved_tensors
        plan: FusionPlan = ctx.plan
        some = linear if full is None else full
        (batch, tokens, _, dim), heads = some.shape, len(plan.heads)
        if dy.stride(2) != 1 or dy.data_ptr() % 16:
            dy = dy.contiguous()
        d_full = None if full is None else _like(full, True)
        d_linear = None if linear is None else _like(linear, True)
        d_gate = None if gate is None else _like(gate, len(plan.gates) == gate.shape[2])
        tile = NUMBERS_A_TILE["part_gradients"] // dim
        groups = -(-batch * tokens // (tile * TILES))
        partial = _partial_sums([x for x in (gamma, bias) if x is not None], groups, plan)
        d_gamma = None if gamma is None else partial[0]
        d_bias = None if bias is None else partial[-1]
        if dy.numel():
            full, linear = some if full is None else full, some if linear is None else linear
            to_full = d_linear if d_full is None else d_full
            to_linear = d_full if d_linear is None else d_linear
            with torch.cuda.device_of(some):
                passes.part_gradients[(groups * heads,)](
                    full,
                    linear,
                    gamma,
                    bias,
                    gate,
                    dy,
                    to_full,
                    to_linear,
                    d_gamma,
                    d_bias,
                    d_gate,
                    plan.table,
                    heads,
                    partial.shape[2],
                    batch * tokens,
                    tokens,
                    *_strides(full),
                    *_strides(linear),
                    *_strides(gate),
                    *_strides(dy)[:2],
                    *_strides(to_full),
                    *_strides(to_linear),
                    *_strides(d_gate),
                    *ctx.numbers,
                    D=dim,
                    BT=tile,
                    TILES=TILES,
                    **LAUNCH["part_gradients"],
                )
        if len(partial):
            sums = partial.sum(1)
            d_gamma = None if gamma is None else sums[0].to(gamma.dtype)
            d_bias = None if bias is None else sums[-1].to(bias.dtype)
        return d_full, d_linear, d_gamma, d_bias, d_gate, None, None, None


def _like(x: Tensor, is_written: bool) -> Tensor:
    """A tensor for the gradient of x, with x's order of axes; zeros where the kernel leaves out some heads."""
    gradient = torch.empty_like(x) if is_written else torch.zeros_like(x)
    return gradient if gradient.stride(3) == 1 else gradient.contiguous()


def _partial_sums(rows: list[Tensor], groups: int, plan: FusionPlan) -> Tensor:
    """Partial sums of gamma's and bias's gradients, where they are there, in one tensor: one reduction sums them all."""
    count, dim = rows[0].shape if rows else (0, 0)
    create = torch.empty if len(plan.rows) == count else torch.zeros
    return create(len(rows), groups, count, dim, device=plan.table.device)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """The first three strides; 0 for an axis of one entry, whose stride is arbitrary and could make Triton compile again."""
    if x is None:
        return (0, 0, 0)
    shape, strides = x.shape[:3], x.stride()[:3]
    if 1 not in shape:
        return strides
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def _rows(name: str, x: Tensor | None, plan: FusionPlan, some: Tensor) -> Tensor | None:
    """gamma or bias as [R, D] without gaps."""
    if x is None:
        return None
    check_tensors(name, (x,))
    dim, least = some.shape[3], plan.least_rows
    if name == "gamma" and (x.ndim == 1 or (x.ndim == 2 and x.shape[1] == 1)):
        x = x.reshape(-1, 1).expand(-1, dim)
    if x.ndim != 2 or x.shape[1] != dim or len(x) < least or x.device != some.device:
        raise ValueError(
            f"{name} must be [{least} or more, {dim}] on {some.device}; "
            f"got {tuple(x.shape)} on {x.device}"
        )
    return x.contiguous()


def _check(
    full: Tensor | None, linear: Tensor | None, gate: Tensor | None, plan: FusionPlan
) -> Tensor:
    """Shapes, types, devices and strides of the branches and the gate; returns a branch that is there."""
    check_tensors("full branch, linear branch, gate", (full, linear, gate), optional=True)
    if not isinstance(plan, FusionPlan):
        raise ValueError(f"plan must be plan_fusion's result; got {type(plan).__name__}")
    some = linear if full is None else full
    if some is None:
        raise ValueError("one branch must be there")
    if some.ndim != 4 or some.shape[3] not in HEAD_DIMS:
        raise ValueError(f"branch {tuple(some.shape)}: [B, T, n, D] with D of {HEAD_DIMS}")
    if some.dtype not in DTYPES:
        raise ValueError(f"branches are {some.dtype}; possible: {', '.join(map(str, DTYPES))}")
    (batch, tokens, _, dim), device = some.shape, some.device
    for name, x, heads in (
        ("full branch", full, plan.num_full),
        ("linear branch", linear, plan.num_linear),
        ("gate", gate, plan.least_gates),
    ):
        if x is None:
            if heads and name != "gate":
                raise ValueError(f"the plan has {heads} heads of the {name}, which is missing")
            continue
        more = name == "gate" and x.ndim == 4 and x.shape[2] > heads
        expected = (batch, tokens, x.shape[2] if more else heads, dim)
        dtypes = DTYPES if name == "gate" else (some.dtype,)
        if x.shape != expected or x.dtype not in dtypes or x.device != device:
            raise ValueError(
                f"{name} must be {expected} of {some.dtype} on {device}; "
                f"got {tuple(x.shape)} of {x.dtype} on {x.device}"
            )
        if x.stride(3) != 1:
            raise ValueError(f"the last stride of the {name} must be 1")
    if plan.table.device != device:
        raise ValueError(f"the plan is on {plan.table.device}, the branches on {device}")
    check_device(device)
    return some
