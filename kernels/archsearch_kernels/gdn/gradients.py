"""Launches the kernels that turn states and their gradients into those of q, k, v and the gates; backward.py calls it.

Shapes: B batch, T tokens, H query heads, G heads of k and v, n selected heads, D head_dim, C tokens in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from archsearch_kernels.gdn import gradient_kernels as kernels
from archsearch_kernels.gdn.kernel import PRECISION, Call
from archsearch_kernels.gdn.schedule import CHUNK, Rows

LAUNCH: dict[str, dict[str, int]] = {
    "query_gradients": {"num_warps": 4, "num_stages": 3},
    "key_gradients": {"num_warps": 4, "num_stages": 3},
    "gather": {"num_warps": 4, "num_stages": 1},
    "gates": {"num_warps": 4, "num_stages": 1},
}
"""How bf16 kernels are compiled."""
LAUNCH_FP32 = {"num_warps": 4, "num_stages": 1}

WIDEST_ROW_BYTES = 256
"""Rows of q up to which 4 warps have the registers for `query_gradients` and `key_gradients`."""

GRADIENT_COLUMNS = {16: 16, 32: 32, 64: 32, 128: 32, 256: 32}
"""Columns of the states that they have on chip at once, by head_dim; half of them in fp32."""

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
class States:
    """By chunk of a part: S and dS' transposed [chunks, n, D, D], U and dP [chunks, n, C, D].

    Of heads that share a KV head, written holds the part of dk once `key_gradients` has run.
    """

    states: Tensor
    written: Tensor
    d_states: Tensor
    d_rest: Tensor


@dataclass(frozen=True)
class Made:
    """What the kernels write. For each other, of a part's chunks: d_local [chunks, n, C, C], d_rows [chunks, n, 5, C], d_totals
    [chunks, n]."""

    readers: Readers
    dq: Tensor
    dk: Tensor
    dv: Tensor
    da: Tensor
    db: Tensor
    d_decay: Tensor
    d_local: Tensor
    d_rows: Tensor
    d_totals: Tensor

    @property
    def tokens(self) -> int:
        return self.dq.shape[1]

    @property
    def q_heads(self) -> int:
        return self.dq.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.dk.shape[2]


def make_room(call: Call, gates: Gates) -> Made:
    plan, q, device = call.plan, call.q_BTHD, call.q_BTHD.device
    q_heads, kv_heads = q.shape[2], call.k_BTGD.shape[2]
    num_chunks = plan.most_chunks
    return Made(
        readers=readers_of(call.q_index_n, call.kv_index_n, q_heads, kv_heads),
        dq=q.new_empty(q.shape),
        dk=q.new_empty(call.k_BTGD.shape),
        dv=q.new_empty(call.v_BTGD.shape),
        da=gates.a_BTH.new_empty(gates.a_BTH.shape),
        db=gates.b_BTH.new_empty(gates.b_BTH.shape),
        d_decay=torch.empty(2, q_heads, plan.num_chunks, device=device),
        d_local=q.new_empty(num_chunks, call.heads, CHUNK, CHUNK),
        d_rows=torch.empty(num_chunks, call.heads, 5, CHUNK, device=device),
        d_totals=torch.empty(num_chunks, call.heads, device=device),
    )


def differentiate(
    call: Call, gates: Gates, do: Tensor, states: States, made: Made, part: Rows
) -> None:
    """All gradients of a part's tokens, from its states and what the passes over its chunks made."""
    _query_gradients(call, do, states, made, part)
    _key_gradients(call, states, made, part)
    _gather(call, states, made, part)
    _gates(call, gates, made, part)


def gather_gradients(gates: Gates, made: Made, d_initial: Tensor | None) -> Gradients:
    """What has been made of all parts; d_initial is handed through."""
    sums = made.d_decay.sum(2)
    dA_log, ddt_bias = sums[0].to(gates.A_log_H.dtype), sums[1].to(gates.dt_bias_H.dtype)
    return Gradients(made.dq, made.dk, made.dv, made.da, made.db, dA_log, ddt_bias, d_initial)


def _programs(call: Call, part: Rows) -> int:
    """Chunks, with those that shorter segments leave empty."""
    return part.num_rows * call.plan.chunks_per_segment


def _query_gradients(call: Call, do: Tensor, states: States, made: Made, part: Rows) -> None:
    idle_heads = made.readers.idle.numel()
    kernels.query_gradients[(_programs(call, part) * (call.heads + idle_heads),)](
        call.q_BTHD,
        call.k_BTGD,
        do,
        call.q_index_n,
        call.kv_index_n,
        made.readers.idle,
        call.plan.segments,
        call.factors,
        call.g,
        call.c,
        states.states,
        states.written,
        made.dq,
        made.da,
        made.db,
        made.d_decay,
        made.d_local,
        made.d_rows,
        call.heads,
        idle_heads,
        made.q_heads,
        made.tokens,
        call.plan.chunks_per_segment,
        part.first,
        part.first_chunk,
        call.plan.num_chunks,
        *call.q_BTHD.stride()[:3],
        *call.k_BTGD.stride()[:3],
        *do.stride()[:3],
        call.dim**-0.5,
        V=_columns(call),
        **_options(call, "query_gradients"),
    )


def _key_gradients(call: Call, states: States, made: Made, part: Rows) -> None:
    kernels.key_gradients[(_programs(call, part) * call.heads,)](
        call.q_BTHD,
        call.k_BTGD,
        call.q_index_n,
        call.kv_index_n,
        made.readers.first_of,
        call.plan.segments,
        call.factors,
        call.g,
        call.c,
        states.states,
        states.written,
        states.d_states,
        states.d_rest,
        made.d_local,
        made.dk,
        made.dv,
        made.d_rows,
        made.d_totals,
        call.heads,
        made.kv_heads,
        made.tokens,
        call.plan.chunks_per_segment,
        part.first,
        part.first_chunk,
        *call.q_BTHD.stride()[:3],
        *call.k_BTGD.stride()[:3],
        V=_columns(call),
        **_options(call, "key_gradients"),
    )


def _gather(call: Call, states: States, made: Made, part: Rows) -> None:
    kernels.gather[(_programs(call, part) * made.kv_heads * (CHUNK // GATHERED_TOKENS),)](
        made.readers.order_n,
        made.readers.first_of,
        call.plan.segments,
        states.written,
        states.d_rest,
        made.dk,
        made.dv,
        call.heads,
        made.kv_heads,
        made.tokens,
        call.plan.chunks_per_segment,
        part.first,
        part.first_chunk,
        D=call.dim,
        C=CHUNK,
        R=GATHERED_TOKENS,
        **LAUNCH["gather"],
    )


def _gates(call: Call, gates: Gates, made: Made, part: Rows) -> None:
    kernels.gates[(_programs(call, part) * -(-call.heads // GATE_HEADS),)](
        *gates,
        call.q_index_n,
        call.plan.segments,
        made.d_rows,
        made.d_totals,
        made.da,
        made.db,
        made.d_decay,
        call.heads,
        made.q_heads,
        made.tokens,
        call.plan.chunks_per_segment,
        part.first,
        part.first_chunk,
        call.plan.num_chunks,
        *gates.a_BTH.stride()[:2],
        *gates.b_BTH.stride()[:2],
        C=CHUNK,
        H=GATE_HEADS,
        **LAUNCH["gates"],
    )


def _options(call: Call, kernel: str) -> dict[str, Any]:
    dtype = call.q_BTHD.dtype
    launch = LAUNCH[kernel] if dtype == torch.bfloat16 else LAUNCH_FP32
    if call.dim * dtype.itemsize > WIDEST_ROW_BYTES:
        launch = {**launch, "num_warps": 8}
    return {"D": call.dim, "C": CHUNK, "PRECISION": PRECISION[dtype], **launch}


def _columns(call: Call) -> int:
    columns = GRADIENT_COLUMNS[call.dim]
    return columns if call.q_BTHD.dtype == torch.bfloat16 else max(16, columns // 2)


def readers_of(q_index_n: Tensor, kv_index_n: Tensor, q_heads: int, kv_heads: int) -> Readers:
    """Made on the device, without waiting for it, and kept for the next call of the same tensors.

    They must be used on one stream, and not have been made under inference_mode, which keeps no count of their versions.
    """
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
