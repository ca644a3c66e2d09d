"""Launches the gated delta rule's backward pass; operator.py is how it is called.

Shapes: B batch, T tokens, H query heads, G heads of k and v, n selected heads, D head_dim, N sequences, C tokens in a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from archsearch_kernels.gdn import backward_kernels as kernels
from archsearch_kernels.gdn.gradients import (
    Gates,
    Gradients,
    States,
    differentiate,
    gather_gradients,
    make_room,
)
from archsearch_kernels.gdn.kernel import (
    COLUMNS,
    WIDE_COLUMNS,
    Call,
    Links,
    is_new,
    link,
    variant,
)
from archsearch_kernels.gdn.schedule import CHUNK, MOST_CHUNKS, Rows

LAUNCH: dict[str, dict[str, int]] = {
    "replay": {"num_stages": 3},
    "retreat": {"num_stages": 3},
    "retreat_alone": {"num_stages": 2},
}
"""How bf16 kernels are compiled."""


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
    states = _states(call)
    with torch.cuda.device_of(call.q_BTHD):
        # As in the forward, the first call compiles what cut sequences need.
        d_starts = None
        if plan.is_cut or is_new("back", *variant(call), d_final_NnDD is None):
            d_starts = torch.empty(plan.num_segments, call.heads, call.dim, call.dim, device=device)
            every = Rows(0, plan.num_segments, 0, plan.num_chunks)
            _retreat(call, do, d_final_NnDD, d_starts, None, None, every)
            # Where nothing is cut, no map is read.
            maps, reach = (
                (links.maps, links.reach) if links is not None else (call.totals, call.totals)
            )
            link(call, d_starts, maps, reach, back=True)
        made = make_room(call, gates)
        for part in plan.parts:
            _replay(call, links, states, part)
            _retreat(call, do, d_final_NnDD, d_starts, d_initial, states, part)
            differentiate(call, gates, do, states, made, part)
        return gather_gradients(gates, made, d_initial)


def _states(call: Call) -> States:
    num_chunks = call.plan.most_chunks
    rows_shape = (num_chunks, call.heads, CHUNK, call.dim)
    square_shape = (num_chunks, call.heads, call.dim, call.dim)
    new = call.q_BTHD.new_empty
    return States(new(square_shape), new(rows_shape), new(square_shape), new(rows_shape))


def _replay(call: Call, links: Links | None, states: States, part: Rows) -> None:
    plan = call.plan
    columns = WIDE_COLUMNS[call.dim]
    kernels.replay[(part.num_rows * call.heads * (call.dim // columns),)](
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
        part.first,
        part.first_chunk,
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
    states: States | None,
    part: Rows,
) -> None:
    """Without states: the first pass, over each segment by itself."""
    plan = call.plan
    columns = (COLUMNS if states is None else WIDE_COLUMNS)[call.dim]
    launch = LAUNCH["retreat_alone" if states is None else "retreat"]
    kernels.retreat[(part.num_rows * call.heads * (call.dim // columns),)](
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
        part.first,
        part.first_chunk,
        *call.q_BTHD.stride()[:3],
        *call.k_BTGD.stride()[:3],
        *do.stride()[:3],
        MOST_CHUNKS=MOST_CHUNKS,
        SUMMARIZE=states is None,
        V=columns,
        **call.options(launch, columns),
    )


def _aligned(x: Tensor) -> Tensor:
    """x, copied unless it can be read 16 bytes at a time, so that the layout of a gradient never compiles a kernel anew."""
    strides = x.stride()
    if strides[-1] == 1 and not any(s % 16 for s in strides[:-1]) and x.data_ptr() % 16 == 0:
        return x
    # Not contiguous(), which leaves the strides of dimensions of one entry as they are.
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
