"""q and k between projection and operator on a GPU, by Triton, forward and backward; same signature as reference.py.

Shapes: B batch, T tokens, H query heads, G KV heads, n heads of a part, D head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from archsearch_kernels.interpreter import check_device, check_tensors
from archsearch_kernels.prologue import passes
from archsearch_kernels.prologue.heads import HEADS_A_PROGRAM, MOST_PARTS, HeadPlan

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

NUMBERS_A_TILE = {"write_parts": 4096, "gather_gradients": 2048}
"""Numbers that a program holds of each tensor at once."""
LAUNCH: dict[str, dict[str, int]] = {
    "write_parts": {"num_warps": 4, "num_stages": 1},
    "gather_gradients": {"num_warps": 4, "num_stages": 1, "maxnreg": 96},
}
"""How kernels are compiled. maxnreg: left alone, the compiler takes 128 registers and a processor holds fewer loads in flight."""


class _Options(NamedTuple):
    """What has no gradient. strides: over batch and tokens, of the tables, then of the factor."""

    plan: HeadPlan
    eps: float
    cos: Tensor | None
    sin: Tensor | None
    factor: Tensor | None
    strides: tuple[int, int, int, int]


def prologue(
    q_BTHD: Tensor,
    k_BTGD: Tensor | None,
    plan: HeadPlan,
    *,
    q_weight_D: Tensor | None = None,
    k_weight_D: Tensor | None = None,
    norm_eps: float = 1e-6,
    cos_BTD: Tensor | None = None,
    sin_BTD: Tensor | None = None,
    factor_BT: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The parts of the plan, [B, T, n, D] each without gaps, in q's dtype; differentiable in q, k and the weights.

    Per head: RMSNorm with q's or k's weight (with both weights or, where there is no k, q's; else no norm), rotation by the
    token's angle where the part wants it, times the token's factor where the part wants it. Statistics in fp32.
    q, k: bf16, fp16 or fp32, any strides with the last one 1. cos, sin: [T, D], [1, T, D] or [B, T, D], whose halves along D
    are equal, so that only the first is read. factor: [T], [1, T] or [B, T] (reference.log_scale makes one).
    D: 16, 32, 64, 128 or 256. Raises ValueError for other inputs.
    """
    _check(q_BTHD, k_BTGD, plan, q_weight_D, k_weight_D)
    options = _options(q_BTHD, plan, norm_eps, cos_BTD, sin_BTD, factor_BT)
    outputs: tuple[Tensor, ...] = _Prologue.apply(  # type: ignore[no-untyped-call]
        q_BTHD, k_BTGD, q_weight_D, k_weight_D, options
    )
    return outputs


class _Prologue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Without norm the gradients do not depend on the inputs.
        ctx.save_for_backward(*((None, None) if q_weight is None else (q, k)), q_weight, k_weight)
        ctx.options, ctx.like, ctx.has_k = options, q.new_empty(0), k is not None
        ctx.places = q.shape[:2]
        return _write_parts(q, k, q_weight, k_weight, options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy: Tensor | None) -> tuple[Tensor | None, ...]:
        plan = ctx.options.plan
        dim = next(x.shape[3] for x in dy if x is not None)
        parts = []
        for part, x in zip(plan.parts, dy, strict=True):
            if x is None:
                shape = (*ctx.places, len(part.heads), dim)
                x = ctx.like.new_zeros(dim).expand(shape)  # noqa: PLW2901
            parts.append(x if x.stride(3) == 1 and x.data_ptr() % 16 == 0 else x.contiguous())
        return *_gather_gradients(ctx, parts), None


def _write_parts(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, options: _Options
) -> tuple[Tensor, ...]:
    (batch, tokens, _, dim), plan = q.shape, options.plan
    outputs = tuple(q.new_empty(batch, tokens, len(part.heads), dim) for part in plan.parts)
    # A kernel takes all pointers: those of what is not there are never followed.
    k = q if k is None else k
    tile = NUMBERS_A_TILE["write_parts"] // dim // HEADS_A_PROGRAM
    programs = -(-batch * tokens // tile) * plan.blocks.shape[0]
    if programs == 0:
        return outputs
    with torch.cuda.device_of(q):
        passes.write_parts[(programs,)](
            q,
            k,
            options.cos,
            options.sin,
            options.factor,
            q_weight,
            q_weight if k_weight is None else k_weight,
            *outputs,
            *outputs[:1] * (MOST_PARTS - len(outputs)),
            plan.blocks,
            plan.sources,
            plan.blocks.shape[0],
            batch * tokens,
            tokens,
            *_strides(q, 3),
            *_strides(k, 3),
            *options.strides,
            options.eps,
            D=dim,
            BT=tile,
            BH=HEADS_A_PROGRAM,
            **LAUNCH["write_parts"],
        )
    return outputs


def _gather_gradients(ctx: Any, dy: list[Tensor]) -> tuple[Tensor | None, ...]:
    q, k, q_weight, k_weight = ctx.saved_tensors
    options: _Options = ctx.options
    plan, (batch, tokens), dim = options.plan, ctx.places, dy[0].shape[3]
    dq = ctx.like.new_empty(batch, tokens, plan.num_q_heads, dim)
    dk = ctx.like.new_empty(batch, tokens, plan.num_k_heads, dim)
    q = dq if q is None else q
    k = q if k is None else k
    tile = NUMBERS_A_TILE["gather_gradients"] // dim
    tiles, (q_groups, k_groups) = -(-batch * tokens // tile), plan.num_groups
    groups = q_groups + k_groups
    dw = torch.empty(tiles, groups, dim if q_weight is not None else 0, device=dq.device)
    dy = dy + dy[:1] * (MOST_PARTS - len(dy))
    if tiles * groups:
        with torch.cuda.device_of(dq):
            passes.gather_gradients[(tiles * groups,)](
                q,
                k,
                options.cos,
                options.sin,
                options.factor,
                q_weight,
                q_weight if k_weight is None else k_weight,
                *dy,
                dq,
                dk,
                dw,
                plan.source_starts,
                plan.readers,
                plan.num_q_heads,
                plan.num_k_heads,
                batch * tokens,
                tokens,
                *_strides(q, 3),
                *_strides(k, 3),
                *_strides(dy[0], 3),
                *_strides(dy[1], 3),
                *_strides(dy[2], 3),
                *_strides(dy[3], 3),
                *options.strides,
                options.eps,
                D=dim,
                BT=tile,
                BH=HEADS_A_PROGRAM,
                **LAUNCH["gather_gradients"],
            )
    return (
        dq,
        dk if ctx.has_k else None,
        None if q_weight is None else dw[:, :q_groups].sum((0, 1)).to(q_weight.dtype),
        None if k_weight is None else dw[:, q_groups:].sum((0, 1)).to(k_weight.dtype),
    )


def _strides(x: Tensor, count: int) -> tuple[int, ...]:
    """The first strides; 0 for an axis of one entry, whose stride is arbitrary and could make Triton compile again."""
    shape, strides = x.shape[:count], x.stride()[:count]
    if 1 not in shape:
        return strides
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def _options(
    q: Tensor,
    plan: HeadPlan,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    factor: Tensor | None,
) -> _Options:
    """What of tables and factor the plan asks for."""
    batch, tokens, _, dim = q.shape
    of_tables, of_factor = (0, 0), (0, 0)
    if plan.needs_tables:
        cos, of_tables = _of_batch("cos", cos, (batch, tokens, dim), q.device)
        sin, of_sin = _of_batch("sin", sin, (batch, tokens, dim), q.device)
        if (
            of_tables != of_sin
            or cos.dtype != sin.dtype
            or (cos.stride(-1), sin.stride(-1)) != (1, 1)
        ):
            raise ValueError("cos and sin must be alike in type and strides, the last one 1")
    else:
        cos, sin = None, None
    if plan.needs_factor:
        factor, of_factor = _of_batch("factor", factor, (batch, tokens), q.device)
    else:
        factor = None
    return _Options(plan, eps, cos, sin, factor, (*of_tables, *of_factor))


def _of_batch(
    name: str, x: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> tuple[Tensor, tuple[int, int]]:
    """x with its strides over batch and tokens: 0 for what the whole batch shares and for an axis of one entry."""
    if x is None:
        raise ValueError(f"the plan needs {name}")
    check_tensors(name, (x,))
    given = x.shape
    fits = given in (shape, shape[1:]) or given == (1, *shape[1:])
    if not fits or not x.is_floating_point() or x.device != device:
        raise ValueError(
            f"{name} must be floating {shape[1:]} or {shape} on {device}; "
            f"got {x.dtype} {tuple(given)} on {x.device}"
        )
    strides = _strides(x, x.ndim - len(shape) + 2)
    return x, (0 if len(strides) < 2 else strides[0], strides[-1])


def _check(
    q: Tensor, k: Tensor | None, plan: HeadPlan, q_weight: Tensor | None, k_weight: Tensor | None
) -> None:
    """Shapes, types, devices and strides."""
    check_tensors("q", (q,))
    check_tensors("k, q_weight, k_weight", (k, q_weight, k_weight), optional=True)
    if not isinstance(plan, HeadPlan):
        raise ValueError(f"plan must be plan_heads' result; got {type(plan).__name__}")
    if q.ndim != 4 or q.shape[3] not in HEAD_DIMS:
        raise ValueError(f"q {tuple(q.shape)}: [B, T, H, D] with D of {HEAD_DIMS} is possible")
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}; possible: {', '.join(map(str, DTYPES))}")
    batch, tokens, _, dim = q.shape
    for name, x, heads in (("q", q, plan.num_q_heads), ("k", k, plan.num_k_heads)):
        if x is None:
            if heads:
                raise ValueError(f"the plan has {heads} heads of {name}, which is missing")
        elif x.shape != (batch, tokens, heads, dim) or x.dtype != q.dtype:
            raise ValueError(
                f"{name} must be {(batch, tokens, heads, dim)} of {q.dtype}; "
                f"got {tuple(x.shape)} of {x.dtype}"
            )
        elif x.stride(3) != 1:
            raise ValueError(f"the last stride of {name} must be 1")
    if (k_weight is not None) != (q_weight is not None and k is not None):
        raise ValueError("q and k are normed both or neither: a weight for each that is there")
    _check_weights([x for x in (q_weight, k_weight) if x is not None], dim)
    for x in (k, plan.blocks, q_weight, k_weight):
        if x is not None and x.device != q.device:
            raise ValueError(f"q is on {q.device}, another input on {x.device}")
    check_device(q.device)


def _check_weights(weights: list[Tensor], dim: int) -> None:
    for x in weights:
        if x.shape != (dim,) or x.stride() != (1,):
            raise ValueError(f"weights must be vectors of {dim} numbers")
        if x.dtype != weights[0].dtype:
            raise ValueError(f"weights differ in type: {[x.dtype for x in weights]}")
