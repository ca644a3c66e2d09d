"""Launches the gated delta rule's backward pass; operator.py is how it is called.

Shapes: B batch, T tokens, H query heads, G heads of k and v, n selected heads, D head_dim, N sequences, C tokens in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from archsearch_kernels.gdn import backward_kernels as kernels
from archsearch_kernels.gdn import gradient_kernels
from archsearch_kernels.gdn.kernel import (
    COLUMNS,
    LINK_COLUMNS,
    PRECISION,
    WIDE_COLUMNS,
    Call,
    Links,
)
from archsearch_kernels.gdn.schedule import CHUNK, MOST_CHUNKS

LAUNCH: dict[str, dict[str, int]] = {
    "replay": {"num_stages": 3},
    "retreat": {"num_stages": 3},
    "retreat_alone": {"num_stages": 2},
    "link_back": {"num_warps": 4, "num_stages": 2},
    "query_gradients": {"num_warps": 4, "num_stages": 3},
    "key_gradients": {"num_warps": 4, "num_stages": 3},
    "gather": {"num_warps": 4, "num_stages": 1},
    "gates": {"num_warps": 4, "num_stages": 1},
}
"""How bf16 kernels are compiled."""
LAUNCH_FP32 = {"num_warps": 4, "num_stages": 1}

WIDEST_ROW_BYTES = 256
"""Rows of q up to which 4 warps have the registers for `gradients`."""

GRADIENT_COLUMNS = {16: 16, 32: 32, 64: 32, 128: 32, 256: 32}
"""Columns of the states that `gradients` has on chip at once, by head_dim; half of them in fp32."""

GATHERED_TOKENS = 16
"""Tokens of one program of `gather`."""

GATE_HEADS = 16
"""Heads of one program of `gates`."""


class Gates(NamedTuple):
    """The raw gates and their parameters."""

    a_BTH: Tensor
    b_BTH: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor


class Gradients(NamedTuple):
    dq_BTHD: Tensor
    dk_BTGD: Tensor
    dv_BTGD: Tensor
    da_BTH: Tensor
    db_BTH: Tensor
    dA_log_H: Tensor
    ddt_bias_H: Tensor
    d_initial_NnDD: Tensor | None


class Readers(NamedTuple):
    """Which selected heads read each KV head: order[first_of[g] : first_of[g + 1]], int32; idle: query heads not selected."""

    order_n: Tensor
    first_of: Tensor
    idle: Tensor


@dataclass(frozen=True)
class _States:
    """By chunk: S and dS' transposed [chunks, n, D, D], U and dP [chunks, n, C, D]."""

    states: Tensor
    written: Tensor
    d_states: Tensor
    d_rest: Tensor


def gdn_backward(
    call: Call, links: Links | None, gates: Gates, do_BTnD: Tensor, d_final_NnDD: Tensor | None
) -> Gradients:
    """Gradients of what gdn_forward took, from those of its outputs and, unless None, of its last states.

    Heads of q, a, b, A_log and dt_bias that do not run and heads of k and v that none reads get zeros. Entries of q_index
    must differ, or their gradients overwrite each other.
    """
    plan, device = call.plan, call.q_BTHD.device
    do = _aligned(do_BTnD)
    if d_final_NnDD is not None:
        d_final_NnDD = d_final_NnDD.contiguous()
    d_initial = None if call.initial_NnDD is None else torch.empty_like(call.initial_NnDD)
    rows_shape = (plan.num_chunks, call.heads, CHUNK, call.dim)
    square_shape = (plan.num_chunks, call.heads, call.dim, call.dim)
    states = _States(
        states=call.q_BTHD.new_empty(square_shape),
        written=call.q_BTHD.new_empty(rows_shape),
        d_states=call.q_BTHD.new_empty(square_shape),
        d_rest=call.q_BTHD.new_empty(rows_shape),
    )
    with torch.cuda.device_of(call.q_BTHD):
        _replay(call, links, states)
        # As in the forward, the first call compiles what cut sequences need.
        d_starts = None
        if plan.is_cut or _is_new(call, d_final_NnDD):
            d_starts = torch.empty(plan.num_segments, call.heads, call.dim, call.dim, device=device)
            _retreat(call, do, d_final_NnDD, d_starts, None, None)
            _link_back(call, links, d_starts)
        _retreat(call, do, d_final_NnDD, d_starts, d_initial, states)
        return _gradients(call, gates, do, states, d_initial)


def _options(call: Call, kernel: str) -> dict[str, Any]:
    dtype = call.q_BTHD.dtype
    launch = LAUNCH[kernel] if dtype == torch.bfloat16 else LAUNCH_FP32
    if call.dim * dtype.itemsize > WIDEST_ROW_BYTES:
        launch = {**launch, "num_warps": 8}
    return {"D": call.dim, "C": CHUNK, "PRECISION": PRECISION[dtype], **launch}


def _gradient_columns(call: Call) -> int:
    columns = GRADIENT_COLUMNS[call.dim]
    return columns if call.q_BTHD.dtype == torch.bfloat16 else max(16, columns // 2)


def _replay(call: Call, links: Links | None, states: _States) -> None:
    plan = call.plan
    columns = WIDE_COLUMNS[call.dim]
    kernels.replay[(plan.num_segments * call.heads * (call.dim // columns),)](
        call.k_BTGD,
        call.v_BTGD,
        call.kv_index_n,
        plan.segments,
        call.x,
        call.factors,
        call.totals,
        call.initial_NnDD,
        call.totals if links is None else links.ends,  # not read where nothing is cut
        states.states,
        states.written,
        call.heads,
        plan.num_chunks,
        *call.k_BTGD.stride()[:3],
        *call.v_BTGD.stride()[:3],
        V=columns,
        **call.options(LAUNCH["replay"], columns),
    )


def _retreat(
    call: Call,
    do: Tensor,
    d_final: Tensor | None,
    d_starts: Tensor | None,
    d_initial: Tensor | None,
    states: _States | None,
) -> None:
    """Without states: the first pass, over each segment by itself."""
    plan = call.plan
    columns = (COLUMNS if states is None else WIDE_COLUMNS)[call.dim]
    launch = LAUNCH["retreat_alone" if states is None else "retreat"]
    kernels.retreat[(plan.num_segments * call.heads * (call.dim // columns),)](
        call.q_BTHD,
        call.k_BTGD,
        do,
        call.q_index_n,
        call.kv_index_n,
        plan.segments,
        call.x,
        call.local,
        call.factors,
        call.totals,
        d_final,
        call.totals if d_starts is None else d_starts,  # not read where nothing is cut
        d_initial,
        None if states is None else states.d_states,
        None if states is None else states.d_rest,
        call.heads,
        plan.num_chunks,
        *call.q_BTHD.stride()[:3],
        *call.k_BTGD.stride()[:3],
        *do.stride()[:3],
        MOST_CHUNKS=MOST_CHUNKS,
        SUMMARIZE=states is None,
        V=columns,
        **call.options(launch, columns),
    )


def _link_back(call: Call, links: Links | None, d_starts: Tensor) -> None:
    columns = min(call.dim, LINK_COLUMNS)
    kernels.link_back[(call.plan.num_sequences * call.heads * (call.dim // columns),)](
        call.plan.first_rows,
        d_starts,
        call.totals if links is None else links.maps,  # not read where nothing is cut
        call.totals if links is None else links.reach,
        call.heads,
        D=call.dim,
        V=columns,
        K=min(call.dim, 32),
        PRECISION="tf32x3",
        **LAUNCH["link_back"],
    )


def _gradients(
    call: Call, gates: Gates, do: Tensor, states: _States, d_initial: Tensor | None
) -> Gradients:
    plan, q = call.plan, call.q_BTHD
    _, tokens, q_heads, _ = q.shape
    kv_heads = call.k_BTGD.shape[2]
    readers = readers_of(call.q_index_n, call.kv_index_n, q_heads, kv_heads)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, call.k_BTGD, call.v_BTGD))
    da, db = (x.new_empty(x.shape) for x in (gates.a_BTH, gates.b_BTH))
    d_rows = torch.empty(plan.num_chunks, call.heads, 5, CHUNK, device=q.device)
    d_totals = torch.empty(plan.num_chunks, call.heads, device=q.device)
    d_decay = torch.empty(2, q_heads, plan.num_chunks, device=q.device)
    d_local = torch.empty_like(call.local)
    chunks = plan.num_segments * plan.chunks_per_segment
    columns = _gradient_columns(call)
    idle_heads = readers.idle.numel()
    gradient_kernels.query_gradients[(chunks * (call.heads + idle_heads),)](
        q,
        call.k_BTGD,
        do,
        call.q_index_n,
        call.kv_index_n,
        readers.idle,
        plan.segments,
        call.factors,
        call.g,
        call.c,
        states.states,
        states.written,
        dq,
        da,
        db,
        d_decay,
        d_local,
        d_rows,
        call.heads,
        idle_heads,
        q_heads,
        tokens,
        plan.chunks_per_segment,
        plan.num_chunks,
        *q.stride()[:3],
        *call.k_BTGD.stride()[:3],
        *do.stride()[:3],
        call.dim**-0.5,
        V=columns,
        **_options(call, "query_gradients"),
    )
    gradient_kernels.key_gradients[(chunks * call.heads,)](
        q,
        call.k_BTGD,
        call.q_index_n,
        call.kv_index_n,
        readers.first_of,
        plan.segments,
        call.factors,
        call.g,
        call.c,
        states.states,
        states.written,
        states.d_states,
        states.d_rest,
        d_local,
        dk,
        dv,
        d_rows,
        d_totals,
        call.heads,
        kv_heads,
        tokens,
        plan.chunks_per_segment,
        *q.stride()[:3],
        *call.k_BTGD.stride()[:3],
        V=columns,
        **_options(call, "key_gradients"),
    )
    gradient_kernels.gather[(chunks * kv_heads * (CHUNK // GATHERED_TOKENS),)](
        readers.order_n,
        readers.first_of,
        plan.segments,
        states.written,
        states.d_rest,
        dk,
        dv,
        call.heads,
        kv_heads,
        tokens,
        plan.chunks_per_segment,
        D=call.dim,
        C=CHUNK,
        R=GATHERED_TOKENS,
        **LAUNCH["gather"],
    )
    gradient_kernels.gates[(chunks * -(-call.heads // GATE_HEADS),)](
        *gates,
        call.q_index_n,
        plan.segments,
        d_rows,
        d_totals,
        da,
        db,
        d_decay,
        call.heads,
        q_heads,
        tokens,
        plan.chunks_per_segment,
        plan.num_chunks,
        *gates.a_BTH.stride()[:2],
        *gates.b_BTH.stride()[:2],
        C=CHUNK,
        H=GATE_HEADS,
        **LAUNCH["gates"],
    )
    sums = d_decay.sum(2)
    dA_log, ddt_bias = sums[0].to(gates.A_log_H.dtype), sums[1].to(gates.dt_bias_H.dtype)
    return Gradients(dq, dk, dv, da, db, dA_log, ddt_bias, d_initial)


def readers_of(q_index_n: Tensor, kv_index_n: Tensor, q_heads: int, kv_heads: int) -> Readers:
    """Made on the device, without waiting for it, and kept for the next call."""
    versions = (q_index_n._version, kv_index_n._version)
    return _readers(q_index_n, kv_index_n, versions, q_heads, kv_heads)


@lru_cache(maxsize=256)
def _readers(
    q_index_n: Tensor, kv_index_n: Tensor, versions: tuple[int, int], q_heads: int, kv_heads: int
) -> Readers:
    read, order = torch.sort(kv_index_n, stable=True)
    bounds = torch.arange(kv_heads + 1, dtype=torch.int32, device=kv_index_n.device)
    selected = torch.zeros(q_heads, dtype=torch.uint8, device=q_index_n.device)
    selected.index_fill_(0, q_index_n.long(), 1)
    return Readers(
        order.int(),
        torch.searchsorted(read, bounds, out_int32=True),
        torch.sort(selected, stable=True)[1][: q_heads - q_index_n.numel()].int(),
    )


def _aligned(x: Tensor) -> Tensor:
    """x, copied unless it can be read 16 bytes at a time, so that the layout of a gradient never compiles a kernel anew."""
    strides = x.stride()
    if strides[-1] == 1 and not any(s % 16 for s in strides[:-1]) and x.data_ptr() % 16 == 0:
        return x
    # Not contiguous(), which leaves the strides of dimensions of one entry as they are.
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


_seen: set[tuple[object, ...]] = set()


def _is_new(call: Call, d_final: Tensor | None) -> bool:
    q, is_initial = call.q_BTHD, call.initial_NnDD is None
    key = (call.dim, q.dtype, q.device, is_initial, d_final is None)
    is_new = key not in _seen
    _seen.add(key)
    return is_new
