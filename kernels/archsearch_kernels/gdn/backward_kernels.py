"""Triton kernels of the gated delta rule's backward pass; backward.py launches them.

Notation of forward_kernels.py, per head and chunk: start state S, U = X P with P = V - 2^g K S. d marks gradients, and dS' is
that of the state after the chunk. With s = D^-1/2, Gam_ij = 2^(g_i - g_j) and L = s Gam (Q K^T) on and below the diagonal,
    dU = L^T dO + 2^(G - g) K dS',   dP = X^T dU = dV,   dS = 2^G dS' + s (2^g Q)^T dO - (2^g K)^T dP,
    dL = dO U^T,   dA = -dP U^T strictly below the diagonal,   d log-odds of b_i = (1 - b_i) / b_i dP_i.U_i,
    dQ = s (dL Gam) K + s 2^g dO S^T,
    dK = s (dL Gam)^T Q + (dA Gam + its transpose) K + 2^(G - g) U dS'^T - 2^g dP S^T,
    dg = row sums minus column sums of dL L + dA A, + s 2^g dO.(Q S) - 2^g dP.(K S) - 2^(G - g) U.(K dS'),
    dG = 2^G <dS', S> + the sum of 2^(G - g) U.(K dS').
The last products are dot products of rows of q or k with their gradients' parts. A token's log decay takes part in g_i of
every later token of its chunk and in G.

`replay` runs forward again and writes each chunk's S and U, `retreat` runs backward and writes each chunk's dS' and dP (first
for each segment by itself, where a sequence is cut: its map is the transposed map of the forward, which `link` chains from the last on),
and gradient_kernels.py does the rest for all chunks at the same time.
"""

# Triton's decorator has no types, and a kernel is one function.
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0915

from __future__ import annotations

import triton
import triton.language as tl

from archsearch_kernels.gdn.forward_kernels import FORGOTTEN, read_state, write_state
from archsearch_kernels.gdn.transform_kernels import FIELDS, RUN_TIME_COUNTS, UNALIGNED


@triton.jit(do_not_specialize=RUN_TIME_COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def replay(
    k: tl.tensor,
    v: tl.tensor,
    kv_index: tl.tensor,
    segments: tl.tensor,
    x_in: tl.tensor,
    factors_in: tl.tensor,
    total_in: tl.tensor,
    initial: tl.tensor,
    ends: tl.tensor,
    states: tl.tensor,
    written_out: tl.tensor,
    heads: tl.tensor,
    num_chunks: tl.tensor,
    first_row: tl.tensor,
    base: tl.tensor,
    k_sb: tl.tensor,
    k_st: tl.tensor,
    k_sh: tl.tensor,
    v_sb: tl.tensor,
    v_st: tl.tensor,
    v_sh: tl.tensor,
    D: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The forward's state pass again: S transposed [chunks, n, D, D] and U [chunks, n, C, D], V columns of S a program."""
    blocks: tl.constexpr = D // V
    column = tl.program_id(0) % blocks * V
    head = tl.program_id(0) // blocks % heads
    row = first_row + tl.program_id(0) // blocks // heads
    segment = segments + row * FIELDS
    batch = tl.load(segment + 1).to(tl.int64)
    token = tl.load(segment + 2)
    length = tl.load(segment + 3) - token
    first_chunk = tl.load(segment + 4).to(tl.int64)
    position = tl.load(segment + 5)
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    e = tl.arange(0, V)
    kv_head = tl.load(kv_index + head).to(tl.int64)
    k += batch * k_sb + kv_head * k_sh
    v += batch * v_sb + kv_head * v_sh + column
    state = tl.zeros([V, D], dtype=tl.float32)
    if initial is not None:  # noqa: SIM102 - decided when compiled
        if position == 0:
            first = tl.load(segment) * heads + head
            state = tl.trans(read_state(initial, first, column, D, V))
    if position > 0:
        state = tl.trans(read_state(ends, (row - 1) * heads + head, column, D, V))
    count = tl.cdiv(length, C)
    # Values added by a product stay out of registers until then.
    identity = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(v.dtype.element_ty)
    totals = total_in + head * num_chunks + first_chunk
    total = tl.load(totals, mask=count > 0, other=0.0)
    for number in tl.range(0, count):
        next_total = tl.load(totals + number + 1, mask=number + 1 < count, other=0.0)
        rows = (i < length - number * C)[:, None]
        place = (first_chunk + number) * heads + head
        made = place - base * heads
        at = token.to(tl.int64) + number * C
        keys = tl.load(k + at * k_st + i[:, None] * k_st + d[None, :], mask=rows, other=0.0)
        values = tl.load(v + at * v_st + i[:, None] * v_st + e[None, :], mask=rows, other=0.0)
        x = tl.load(x_in + place * (C * C) + i[:, None] * C + i[None, :])
        read_key = tl.load(factors_in + place * (3 * C) + i)
        write_key = tl.load(factors_in + place * (3 * C) + C + i)

        state_inner = state.to(keys.dtype)
        state_at = states + made * (D * D) + column * D + e[:, None] * D + d[None, :]
        tl.store(state_at, state_inner)
        read = tl.dot(state_inner, tl.trans(keys), input_precision=PRECISION)
        read *= -read_key[None, :]
        rest = tl.dot(tl.trans(values), identity, acc=read, input_precision=PRECISION)
        written = tl.dot(rest.to(x.dtype), tl.trans(x), input_precision=PRECISION)
        kept = (written * write_key[None, :]).to(keys.dtype)
        state = tl.dot(kept, keys, acc=state * tl.exp2(total), input_precision=PRECISION)
        u_at = written_out + made * (C * D) + column + i[:, None] * D + e[None, :]
        tl.store(u_at, tl.trans(written.to(keys.dtype)))
        total = next_total


@triton.jit(do_not_specialize=RUN_TIME_COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def retreat(
    q: tl.tensor,
    k: tl.tensor,
    do: tl.tensor,
    q_index: tl.tensor,
    kv_index: tl.tensor,
    segments: tl.tensor,
    x_in: tl.tensor,
    local_in: tl.tensor,
    factors_in: tl.tensor,
    total_in: tl.tensor,
    d_final: tl.tensor,
    d_starts: tl.tensor,
    d_initial: tl.tensor,
    d_states: tl.tensor,
    d_rest: tl.tensor,
    heads: tl.tensor,
    num_chunks: tl.tensor,
    first_row: tl.tensor,
    base: tl.tensor,
    q_sb: tl.tensor,
    q_st: tl.tensor,
    q_sh: tl.tensor,
    k_sb: tl.tensor,
    k_st: tl.tensor,
    k_sh: tl.tensor,
    do_sb: tl.tensor,
    do_st: tl.tensor,
    do_sh: tl.tensor,
    D: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    SUMMARIZE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The state pass backwards, V columns of a segment and head a program.

    With SUMMARIZE each segment starts without a gradient from later ones and leaves d_starts [segments, n, D, D], that of its
    first state; what is forgotten is left out. Without, d_starts are linked and the outputs are dS' transposed [chunks, n, D,
    D], dP [chunks, n, C, D] and d_initial.
    """
    blocks: tl.constexpr = D // V
    column = tl.program_id(0) % blocks * V
    head = tl.program_id(0) // blocks % heads
    row = first_row + tl.program_id(0) // blocks // heads
    segment = segments + row * FIELDS
    sequence = tl.load(segment)
    batch = tl.load(segment + 1).to(tl.int64)
    token = tl.load(segment + 2)
    length = tl.load(segment + 3) - token
    first_chunk = tl.load(segment + 4).to(tl.int64)
    position = tl.load(segment + 5)
    is_last = tl.load(segment + 6)
    count = tl.cdiv(length, C)
    stop = count
    if SUMMARIZE:
        if position == 0:
            return
        chunks = tl.arange(0, MOST_CHUNKS)
        here = chunks < count
        totals = tl.load(total_in + head * num_chunks + first_chunk + chunks, mask=here, other=0.0)
        before = tl.cumsum(totals, axis=0) - totals
        stop = tl.sum((here & (before >= -FORGOTTEN)).to(tl.int32))
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    e = tl.arange(0, V)
    q += batch * q_sb + tl.load(q_index + head).to(tl.int64) * q_sh
    k += batch * k_sb + tl.load(kv_index + head).to(tl.int64) * k_sh
    do += batch * do_sb + head.to(tl.int64) * do_sh + column

    d_state = tl.zeros([V, D], dtype=tl.float32)
    if d_final is not None:  # noqa: SIM102 - decided when compiled
        if (is_last != 0) & (stop == count):
            d_state = tl.trans(read_state(d_final, sequence * heads + head, column, D, V))
    if not SUMMARIZE:  # noqa: SIM102
        if is_last == 0:
            d_state = tl.trans(read_state(d_starts, (row + 1) * heads + head, column, D, V))
    totals_at = total_in + head * num_chunks + first_chunk
    total = tl.load(totals_at + stop - 1, mask=stop > 0, other=0.0)
    for step in tl.range(0, stop):
        number = stop - 1 - step
        next_total = tl.load(totals_at + number - 1, mask=number > 0, other=0.0)
        rows = (i < length - number * C)[:, None]
        place = (first_chunk + number) * heads + head
        made = place - base * heads
        at = token.to(tl.int64) + number * C
        keys = tl.load(k + at * k_st + i[:, None] * k_st + d[None, :], mask=rows, other=0.0)
        dout = tl.load(do + at * do_st + i[:, None] * do_st + e[None, :], mask=rows, other=0.0)
        queries = tl.load(q + at * q_st + i[:, None] * q_st + d[None, :], mask=rows, other=0.0)
        x = tl.load(x_in + place * (C * C) + i[:, None] * C + i[None, :])
        local = tl.load(local_in + place * (C * C) + i[:, None] * C + i[None, :])
        read_key = tl.load(factors_in + place * (3 * C) + i)
        write_key = tl.load(factors_in + place * (3 * C) + C + i)
        read_query = tl.load(factors_in + place * (3 * C) + 2 * C + i)

        d_inner = d_state.to(keys.dtype)
        if not SUMMARIZE:
            state_at = d_states + made * (D * D) + column * D + e[:, None] * D + d[None, :]
            tl.store(state_at, d_inner)
        d_written = tl.dot(d_inner, tl.trans(keys), input_precision=PRECISION)
        d_written *= write_key[None, :]
        dout = tl.trans(dout)
        d_state *= tl.exp2(total)
        asked = (dout.to(tl.float32) * read_query[None, :]).to(keys.dtype)
        d_state = tl.dot(asked, queries, acc=d_state, input_precision=PRECISION)
        d_written = tl.dot(dout, local, acc=d_written, input_precision=PRECISION)
        rest = tl.dot(d_written.to(x.dtype), x, input_precision=PRECISION)
        if not SUMMARIZE:
            rest_at = d_rest + made * (C * D) + column + i[:, None] * D + e[None, :]
            tl.store(rest_at, tl.trans(rest.to(keys.dtype)))
        rest = (rest * -read_key[None, :]).to(keys.dtype)
        d_state = tl.dot(rest, keys, acc=d_state, input_precision=PRECISION)
        total = next_total
    if SUMMARIZE:
        write_state(d_starts, tl.trans(d_state), row * heads + head, column, D, V)
    elif d_initial is not None:  # noqa: SIM102
        if position == 0:
            write_state(d_initial, tl.trans(d_state), sequence * heads + head, column, D, V)
