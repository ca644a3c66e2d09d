"""The gated delta rule of chosen heads on a GPU, forward, by Triton; reference.py in all but chunks_per_segment.

Shapes: B batch, T tokens, H query heads, G heads of k and v, n selected heads, D head_dim, N sequences, C tokens in a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from archsearch_kernels.gdn import forward_kernels as kernels
from archsearch_kernels.gdn import transform_kernels
from archsearch_kernels.gdn.inputs import (
    check_inputs,
    check_no_gradient,
    check_options,
    check_state,
)
from archsearch_kernels.gdn.schedule import CHUNK, MOST_CHUNKS, Schedule, schedule_of

COLUMNS = {16: 16, 32: 32, 64: 64, 128: 64, 256: 32}
"""Columns of the state in one program, by head_dim: a tile of the state takes at most 64 registers a thread."""
WIDE_COLUMNS = COLUMNS | {128: 128}
"""The same for the backward pass's ways over all chunks, whose stores are worth loading each tile once."""
NEWER_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7)
ATTEND_COLUMNS = COLUMNS | ({128: 128} if NEWER_TRITON else {})
"""Columns in one program of `attend` in bf16: what Triton 3.7.1 makes of 64 is 18% slower than what 3.6 makes of them."""
LINK_COLUMNS = 16
"""Fewer columns a program for `link`, which has few programs and waits for each product."""
LINK_WHOLE, LINK_PART = 128, 32
"""head_dim up to which a map fits into shared memory, in fp32, and how many columns of a wider one are read at once."""
FEW_SEGMENTS = 64
"""Segments of a sequence up to which one load tells whether any hands its state on."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs of the state pass that a multiprocessor runs at once, by their registers and shared memory."""

LAUNCH: dict[str, dict[str, int]] = {
    "transform": {"num_stages": 1, "maxnreg": 128},
    "summarize": {"num_stages": 2},
    "link": {"num_warps": 8, "num_stages": 2},
    "attend": {"num_stages": 2},
}
"""How bf16 kernels are compiled. maxnreg: four programs a multiprocessor are worth a few spilled registers."""
SHARED_BYTES_OF_STAGES = {3: 220 * 1024, 2: 150 * 1024, 1: 0}
"""Shared memory a program, from which on so many tiles in flight fit; of fp32 tiles only one does."""

INNER = {torch.bfloat16: tl.float16, torch.float32: tl.float32}
PRECISION = {torch.bfloat16: "tf32", torch.float32: "tf32x3"}
"""By dtype of q: type inside the inversion of a chunk's matrix, and how fp32 operands are multiplied (bf16 has none)."""


@dataclass(frozen=True)
class Call:
    """What the kernels share. Of the first stage: x and local [chunks, n, C, C], factors [chunks, n, 3, C], g and c
    [chunks, n, C], totals [n, chunks]."""

    q_BTHD: Tensor
    k_BTGD: Tensor
    v_BTGD: Tensor
    q_index_n: Tensor
    kv_index_n: Tensor
    initial_NnDD: Tensor | None
    plan: Schedule
    x: Tensor
    local: Tensor
    factors: Tensor
    g: Tensor
    c: Tensor
    totals: Tensor

    @property
    def heads(self) -> int:
        return self.q_index_n.numel()

    @property
    def dim(self) -> int:
        return self.q_BTHD.shape[3]

    @property
    def blocks(self) -> int:
        """Programs that share the state of one head."""
        return self.dim // COLUMNS[self.dim]

    def options(self, launch: Mapping[str, int], columns: int) -> dict[str, Any]:
        """What is fixed when a kernel is compiled; no head count is among it. columns: the width of its tiles."""
        dtype = self.q_BTHD.dtype
        options: dict[str, Any] = {"D": self.dim, "C": CHUNK, "PRECISION": PRECISION[dtype]}
        options |= {"num_warps": 8 if columns > 64 else 4, **launch}
        # With few columns two programs share a multiprocessor.
        most = 1 if dtype != torch.bfloat16 else (3 if columns > 64 else 2)
        if "num_stages" in launch:
            options["num_stages"] = min(
                launch["num_stages"], most, _most_stages(self.q_BTHD.device)
            )
        if dtype != torch.bfloat16:
            options.pop("maxnreg", None)
        return options


class Links(NamedTuple):
    """Of each segment, fp32: its last state and its map, both [segments, n, D, D], and log2 of the map's bound [segments, n].

    A sequence's first segment has no map and its last one neither; maps of what is forgotten are not computed.
    """

    ends: Tensor
    maps: Tensor
    reach: Tensor


class Outcome(NamedTuple):
    """o and the final state, and what the backward pass needs of the forward; call is None where there is nothing to do."""

    o_BTnD: Tensor
    final_NnDD: Tensor | None
    call: Call | None
    links: Links | None


def gdn_forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    q_index_n: Tensor,
    kv_index_n: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    chunks_per_segment: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, T, n, D] in q's dtype and, where asked for, the last states [N, n, D, D] in fp32.

    Head j reads q, a, b, A_log and dt_bias of head q_index[j], k and v of head kv_index[j] (int32). q and k are divided by
    their L2 norm; log decay g = -exp(A_log) softplus(a + dt_bias); writing rate sigmoid(b); outputs are scaled by D^-1/2. A
    token with a = b = -inf leaves the state alone. q, k, v: all bf16 or all fp32 (in Triton's interpreter fp32 alone), D 16, 32,
    64, 128 or 256, any strides with the last one 1; gates: bf16, fp16 or fp32. With cu_seqlens (int32 or int64 [N + 1], B = 1)
    the row holds N sequences, else N = B. initial_state: fp32 [N, n, D, D]. chunks_per_segment (1 to 1024) cuts sequences
    (schedule.py); by default the shape decides.

    Raises ValueError for other inputs, but the values of q_index and kv_index are not looked at on a GPU, which would have to be
    waited for: a head that is not there is read, and its gradient written, outside of the tensors.
    """
    outcome = run_forward(
        q_BTHD,
        k_BTGD,
        v_BTGD,
        a_BTH,
        b_BTH,
        A_log_H,
        dt_bias_H,
        q_index_n,
        kv_index_n,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
        chunks_per_segment=chunks_per_segment,
    )
    return outcome.o_BTnD, outcome.final_NnDD


def run_forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    q_index_n: Tensor,
    kv_index_n: Tensor,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    chunks_per_segment: int | None,
    backward_parts: int = 1,
) -> Outcome:
    """gdn_forward, which also hands over what the backward pass needs; backward_parts is operator.gated_delta_net's."""
    check_inputs(q_BTHD, k_BTGD, v_BTGD, a_BTH, b_BTH, A_log_H, dt_bias_H, q_index_n, kv_index_n)
    check_options(initial_state, cu_seqlens, chunks_per_segment)
    tensors = (q_BTHD, k_BTGD, v_BTGD, a_BTH, b_BTH, A_log_H, dt_bias_H, initial_state)
    check_no_gradient(*tensors)
    batch, tokens, _, dim = q_BTHD.shape
    heads, device = q_index_n.numel(), q_BTHD.device
    o_BTnD = q_BTHD.new_empty(batch, tokens, heads, dim)
    programs = PROGRAMS_PER_PROCESSOR * _num_processors(device) * COLUMNS[dim] // dim
    places = programs // max(heads, 1)
    plan = schedule_of(
        batch, tokens, cu_seqlens, places, chunks_per_segment, backward_parts, device
    )
    states_shape = (plan.num_sequences, heads, dim, dim)
    check_state(initial_state, states_shape, device)
    final = torch.empty(states_shape, device=device) if output_final_state else None
    if heads == 0 or batch == 0:
        return Outcome(o_BTnD, final, None, None)
    chunk_shape = (plan.num_chunks, heads, CHUNK)
    call = Call(
        q_BTHD,
        k_BTGD,
        v_BTGD,
        q_index_n,
        kv_index_n,
        initial_state,
        plan,
        x=q_BTHD.new_empty(*chunk_shape, CHUNK),
        local=q_BTHD.new_empty(*chunk_shape, CHUNK),
        factors=torch.empty(plan.num_chunks, heads, 3, CHUNK, device=device),
        g=torch.empty(chunk_shape, device=device),
        c=torch.empty(chunk_shape, device=device),
        totals=torch.empty(heads, plan.num_chunks, device=device),
    )
    with torch.cuda.device_of(q_BTHD):
        _transform(call, a_BTH, b_BTH, A_log_H, dt_bias_H)
        # The first call compiles what cut sequences need, cut or not: another number of heads may cut them.
        links = _link_segments(call) if plan.is_cut or is_new(*variant(call)) else None
        _attend(call, None if links is None else links.ends, o_BTnD, final)
    return Outcome(o_BTnD, final, call, links)


def _transform(
    call: Call, a_BTH: Tensor, b_BTH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor
) -> None:
    plan = call.plan
    transform_kernels.transform[(plan.num_segments * plan.chunks_per_segment * call.heads,)](
        call.q_BTHD,
        call.k_BTGD,
        a_BTH,
        b_BTH,
        A_log_H,
        dt_bias_H,
        call.q_index_n,
        call.kv_index_n,
        plan.segments,
        call.x,
        call.local,
        call.factors,
        call.g,
        call.c,
        call.totals,
        call.heads,
        plan.chunks_per_segment,
        plan.num_chunks,
        *call.q_BTHD.stride()[:3],
        *call.k_BTGD.stride()[:3],
        *a_BTH.stride()[:2],
        *b_BTH.stride()[:2],
        call.dim**-0.5,
        LEVELS=CHUNK.bit_length() - 1,
        INNER=INNER[call.q_BTHD.dtype],
        **call.options(LAUNCH["transform"], CHUNK),
    )


def _link_segments(call: Call) -> Links:
    """States after each segment but the last ones, and how segments hand states on."""
    plan, device = call.plan, call.q_BTHD.device
    ends = torch.empty(plan.num_segments, call.heads, call.dim, call.dim, device=device)
    maps = torch.empty_like(ends)
    reach = torch.empty(plan.num_segments, call.heads, device=device)
    kernels.summarize[(plan.num_segments * call.heads * 2 * call.blocks,)](
        call.k_BTGD,
        call.v_BTGD,
        call.kv_index_n,
        plan.segments,
        call.x,
        call.factors,
        call.totals,
        call.initial_NnDD,
        ends,
        maps,
        reach,
        call.heads,
        plan.num_chunks,
        *call.k_BTGD.stride()[:3],
        *call.v_BTGD.stride()[:3],
        V=COLUMNS[call.dim],
        MOST_CHUNKS=MOST_CHUNKS,
        **call.options(LAUNCH["summarize"], COLUMNS[call.dim]),
    )
    link(call, ends, maps, reach, back=False)
    return Links(ends, maps, reach)


def link(call: Call, states: Tensor, maps: Tensor, reach: Tensor, *, back: bool) -> None:
    """Hands states from segment to segment, in place, or with back their gradients the other way."""
    columns = min(call.dim, LINK_COLUMNS)
    kernels.link[(call.plan.num_sequences * call.heads * (call.dim // columns),)](
        call.plan.first_rows,
        states,
        maps,
        reach,
        call.heads,
        D=call.dim,
        V=columns,
        K=call.dim if call.dim <= LINK_WHOLE else LINK_PART,
        FEW=FEW_SEGMENTS,
        BACK=back,
        **_link_options(call),
    )


def _link_options(call: Call) -> dict[str, Any]:
    launch = LAUNCH["link"]
    stages = min(launch["num_stages"], _most_stages(call.q_BTHD.device))
    return {**launch, "num_stages": stages, "PRECISION": PRECISION[call.q_BTHD.dtype]}


_seen: set[tuple[object, ...]] = set()


def is_new(*key: object) -> bool:
    """Whether this process asks for the first time."""
    known = key in _seen
    _seen.add(key)
    return not known


def variant(call: Call) -> tuple[object, ...]:
    """What the kernels are compiled for."""
    return call.dim, call.q_BTHD.dtype, call.q_BTHD.device, call.initial_NnDD is None


def _attend(call: Call, ends: Tensor | None, o_BTnD: Tensor, final: Tensor | None) -> None:
    is_bf16 = call.q_BTHD.dtype == torch.bfloat16
    plan, columns = call.plan, (ATTEND_COLUMNS if is_bf16 else COLUMNS)[call.dim]
    kernels.attend[(plan.num_segments * call.heads * (call.dim // columns),)](
        call.q_BTHD,
        call.k_BTGD,
        call.v_BTGD,
        o_BTnD,
        call.q_index_n,
        call.kv_index_n,
        plan.segments,
        call.x,
        call.local,
        call.factors,
        call.totals,
        call.initial_NnDD,
        call.totals if ends is None else ends,  # not read where nothing is cut
        final,
        call.heads,
        plan.num_chunks,
        *call.q_BTHD.stride()[:3],
        *call.k_BTGD.stride()[:3],
        *call.v_BTGD.stride()[:3],
        o_BTnD.stride(0),
        V=columns,
        **call.options(LAUNCH["attend"], columns),
    )


@cache
def _most_stages(device: torch.device) -> int:
    """Tiles in flight that the shared memory of this device has room for."""
    if device.type != "cuda":  # Triton's interpreter
        return 1
    properties = torch.cuda.get_device_properties(device)
    shared = int(getattr(properties, "shared_memory_per_block_optin", 0))
    return next(stages for stages, least in SHARED_BYTES_OF_STAGES.items() if shared >= least)


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
