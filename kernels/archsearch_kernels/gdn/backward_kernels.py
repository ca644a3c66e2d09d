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
every later token of its chunk and in G. All this was differentiated by hand; tests hold it against autograd in fp64.

`replay` runs forward again and writes each chunk's S and U, `retreat` runs backward and writes each chunk's dS' and dP (first
for each segment by itself, where a sequence is cut: its map is the transposed map of the forward, which `link_back` chains),
and `gradients` does the rest for all chunks at the same time.
"""

# Triton's decorator has no types, and a kernel is one function.
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0915

from __future__ import annotations

import triton
import triton.language as tl

from archsearch_kernels.gdn.forward_kernels import (
    FIELDS,
    FORGOTTEN,
    RUN_TIME_COUNTS,
    UNALIGNED,
    inverse_norm,
    read_state,
    softplus,
    write_state,
)

COUNTS = [*RUN_TIME_COUNTS, "q_heads", "kv_heads", "tokens"]
SCATTERED = [*UNALIGNED, "order", "first_of", "da", "db"]
SMALLEST_RATE = tl.constexpr(1e-37)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SCATTERED)
def replay(
    k: tl.tensor,
    v: tl.tensor,
    kv_index: tl.tensor,
    segments: tl.tensor,
    x_in: tl.tensor,
    g_in: tl.tensor,
    c_in: tl.tensor,
    initial: tl.tensor,
    ends: tl.tensor,
    states: tl.tensor,
    written_out: tl.tensor,
    heads: tl.tensor,
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
    """The forward's state pass again: S [chunks, n, D, D] and U [chunks, n, C, D], V columns of a segment a program."""
    blocks: tl.constexpr = D // V
    column = tl.program_id(0) % blocks * V
    head = tl.program_id(0) // blocks % heads
    row = tl.program_id(0) // blocks // heads
    segment = segments + row * FIELDS
    batch = tl.load(segment + 1).to(tl.int64)
    token = tl.load(segment + 2)
    length = tl.load(segment + 3) - token
    first_chunk = tl.load(segment + 4).to(tl.int64)
    position = tl.load(segment + 5)
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    e = tl.arange(0, V)
    kv_head = tl.load(kv_index + head)
    k += batch * k_sb + kv_head * k_sh
    v += batch * v_sb + kv_head * v_sh + column
    state = tl.zeros([D, V], dtype=tl.float32)
    if initial is not None:  # noqa: SIM102 - decided when compiled
        if position == 0:
            state = read_state(initial, tl.load(segment) * heads + head, column, D, V)
    if position > 0:
        state = read_state(ends, (row - 1) * heads + head, column, D, V)
    for number in tl.range(0, tl.cdiv(length, C)):
        rows = (i < length - number * C)[:, None]
        place = (first_chunk + number) * heads + head
        at = token.to(tl.int64) + number * C
        keys = tl.load(k + at * k_st + i[:, None] * k_st + d[None, :], mask=rows, other=0.0)
        values = tl.load(v + at * v_st + i[:, None] * v_st + e[None, :], mask=rows, other=0.0)
        x = tl.load(x_in + place * (C * C) + i[:, None] * C + i[None, :])
        g = tl.load(g_in + place * C + i)
        c = tl.load(c_in + place * C + i)
        total = tl.load(g_in + place * C + C - 1)
        state_inner = state.to(keys.dtype)
        write_state(states, state_inner, place, column, D, V)
        read = tl.dot(keys, state_inner, input_precision=PRECISION)
        rest = values.to(tl.float32) - read * tl.exp2(2 * g + c)[:, None]
        written = tl.dot(x, rest.to(x.dtype), input_precision=PRECISION)
        u = written_out + place * (C * D) + column + i[:, None] * D + e[None, :]
        tl.store(u, written.to(keys.dtype))
        kept = (written * tl.exp2(total + c)[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(keys), kept, acc=state * tl.exp2(total), input_precision=PRECISION)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SCATTERED)
def retreat(
    q: tl.tensor,
    k: tl.tensor,
    do: tl.tensor,
    q_index: tl.tensor,
    kv_index: tl.tensor,
    segments: tl.tensor,
    x_in: tl.tensor,
    g_in: tl.tensor,
    c_in: tl.tensor,
    total_in: tl.tensor,
    d_final: tl.tensor,
    d_starts: tl.tensor,
    d_initial: tl.tensor,
    d_states: tl.tensor,
    d_rest: tl.tensor,
    heads: tl.tensor,
    num_chunks: tl.tensor,
    q_sb: tl.tensor,
    q_st: tl.tensor,
    q_sh: tl.tensor,
    k_sb: tl.tensor,
    k_st: tl.tensor,
    k_sh: tl.tensor,
    do_sb: tl.tensor,
    do_st: tl.tensor,
    do_sh: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    SUMMARIZE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The state pass backwards, V columns of a segment and head a program.

    With SUMMARIZE each segment starts without a gradient from later ones and leaves d_starts [segments, n, D, D], that of its
    first state; what is forgotten is left out. Without, d_starts are linked and the outputs are dS' [chunks, n, D, D], dP
    [chunks, n, C, D] and d_initial.
    """
    blocks: tl.constexpr = D // V
    column = tl.program_id(0) % blocks * V
    head = tl.program_id(0) // blocks % heads
    row = tl.program_id(0) // blocks // heads
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
    q += batch * q_sb + tl.load(q_index + head) * q_sh
    k += batch * k_sb + tl.load(kv_index + head) * k_sh
    do += batch * do_sb + head * do_sh + column

    d_state = tl.zeros([D, V], dtype=tl.float32)
    if d_final is not None:  # noqa: SIM102 - decided when compiled
        if (is_last != 0) & (stop == count):
            d_state = read_state(d_final, sequence * heads + head, column, D, V)
    if not SUMMARIZE:  # noqa: SIM102
        if is_last == 0:
            d_state = read_state(d_starts, (row + 1) * heads + head, column, D, V)
    for step in tl.range(0, stop):
        number = stop - 1 - step
        rows = (i < length - number * C)[:, None]
        place = (first_chunk + number) * heads + head
        at = token.to(tl.int64) + number * C
        queries = tl.load(q + at * q_st + i[:, None] * q_st + d[None, :], mask=rows, other=0.0)
        keys = tl.load(k + at * k_st + i[:, None] * k_st + d[None, :], mask=rows, other=0.0)
        dout = tl.load(do + at * do_st + i[:, None] * do_st + e[None, :], mask=rows, other=0.0)
        query_scale = inverse_norm(queries) * scale
        g = tl.load(g_in + place * C + i)
        c = tl.load(c_in + place * C + i)
        total = tl.load(g_in + place * C + C - 1)
        local = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        not_earlier = i[:, None] <= i[None, :]
        local *= tl.exp2(tl.where(not_earlier, c[:, None] + g[None, :], float("-inf")))
        local = (local * query_scale[None, :]).to(keys.dtype)

        d_inner = d_state.to(keys.dtype)
        if not SUMMARIZE:
            write_state(d_states, d_inner, place, column, D, V)
        d_written = tl.dot(keys, d_inner, input_precision=PRECISION)
        d_written *= tl.exp2(total + c)[:, None]
        d_written = tl.dot(local, dout, acc=d_written, input_precision=PRECISION)
        x = tl.load(x_in + place * (C * C) + i[:, None] * C + i[None, :])
        rest = tl.dot(tl.trans(x), d_written.to(x.dtype), input_precision=PRECISION)
        if not SUMMARIZE:
            at_rest = d_rest + place * (C * D) + column + i[:, None] * D + e[None, :]
            tl.store(at_rest, rest.to(keys.dtype))
        rest = (rest * -tl.exp2(2 * g + c)[:, None]).to(keys.dtype)
        asked = (dout.to(tl.float32) * (query_scale * tl.exp2(g))[:, None]).to(keys.dtype)
        d_state *= tl.exp2(total)
        d_state = tl.dot(tl.trans(queries), asked, acc=d_state, input_precision=PRECISION)
        d_state = tl.dot(tl.trans(keys), rest, acc=d_state, input_precision=PRECISION)
    if SUMMARIZE:
        write_state(d_starts, d_state, row * heads + head, column, D, V)
    elif d_initial is not None:  # noqa: SIM102
        if position == 0:
            write_state(d_initial, d_state, sequence * heads + head, column, D, V)


@triton.jit(do_not_specialize=COUNTS)
def link_back(
    first_rows: tl.tensor,
    d_starts: tl.tensor,
    maps: tl.tensor,
    reach: tl.tensor,
    heads: tl.tensor,
    D: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Gradients of segments' first states, in place: d_starts[j] += maps[j]^T d_starts[j + 1], V columns a program."""
    blocks: tl.constexpr = D // V
    column = tl.program_id(0) % blocks * V
    head = tl.program_id(0) // blocks % heads
    sequence = tl.program_id(0) // blocks // heads
    d = tl.arange(0, D)
    p = tl.arange(0, K)
    start = tl.load(first_rows + sequence)
    stop = tl.load(first_rows + sequence + 1)
    for step in tl.range(start + 1, stop - 1):
        row = start + stop - 1 - step
        place = row * heads + head
        if tl.load(reach + place) > -FORGOTTEN:
            state = read_state(d_starts, place, column, D, V)
            rows = maps + place.to(tl.int64) * (D * D)
            after = d_starts + (place + heads).to(tl.int64) * (D * D) + column
            for part in tl.range(0, D, K):
                m = tl.load(rows + (part + p)[None, :] * D + d[:, None])
                later = tl.load(after + (part + p)[:, None] * D + tl.arange(0, V)[None, :])
                state = tl.dot(m, later, acc=state, input_precision=PRECISION)
            write_state(d_starts, state, place, column, D, V)
            # The next row reads what other threads of this program have just written.
            tl.debug_barrier()


@triton.jit
def dots(rows: tl.tensor, others: tl.tensor) -> tl.tensor:
    """Dot products of equal rows, fp32."""
    return tl.sum(rows.to(tl.float32) * others.to(tl.float32), axis=1)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SCATTERED)
def gradients(
    q: tl.tensor,
    k: tl.tensor,
    do: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    q_index: tl.tensor,
    order: tl.tensor,
    first_of: tl.tensor,
    segments: tl.tensor,
    g_in: tl.tensor,
    c_in: tl.tensor,
    states: tl.tensor,
    written_in: tl.tensor,
    d_states: tl.tensor,
    d_rest: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    da: tl.tensor,
    db: tl.tensor,
    d_decay: tl.tensor,
    heads: tl.tensor,
    q_heads: tl.tensor,
    kv_heads: tl.tensor,
    tokens: tl.tensor,
    chunks_per_segment: tl.tensor,
    num_chunks: tl.tensor,
    q_sb: tl.tensor,
    q_st: tl.tensor,
    q_sh: tl.tensor,
    k_sb: tl.tensor,
    k_st: tl.tensor,
    k_sh: tl.tensor,
    do_sb: tl.tensor,
    do_st: tl.tensor,
    do_sh: tl.tensor,
    a_sb: tl.tensor,
    a_st: tl.tensor,
    b_sb: tl.tensor,
    b_st: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """All gradients but the states', a program a chunk and KV head, for the selected heads order[first_of[kv_head]..] in turn.

    dq [B, T, H, D], dk and dv [B, T, G, D], da and db [B, T, H], all without gaps; of heads that do not run nothing is
    written in dq, da, db, and zeros in dk, dv. d_decay [2, n, chunks]: a chunk's parts of the gradients of A_log and dt_bias.
    """
    kv_head = tl.program_id(0) % kv_heads
    slot = tl.program_id(0) // kv_heads
    segment = segments + slot // chunks_per_segment * FIELDS
    number = slot % chunks_per_segment
    batch = tl.load(segment + 1).to(tl.int64)
    token = tl.load(segment + 2) + number * C
    left = tl.load(segment + 3) - token
    chunk = tl.load(segment + 4).to(tl.int64) + number
    if left <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    e = tl.arange(0, V)
    valid = i < left
    rows = valid[:, None]
    below = i[:, None] > i[None, :]
    at = token.to(tl.int64)
    k += batch * k_sb + at * k_st + kv_head * k_sh
    k_at = k + i[:, None] * k_st + d[None, :]
    q += batch * q_sb + at * q_st
    do += batch * do_sb + at * do_st
    a += batch * a_sb + at * a_st
    b += batch * b_sb + at * b_st
    row = batch * tokens + at
    first = tl.load(first_of + kv_head)
    last = tl.load(first_of + kv_head + 1)

    dk_rows = tl.zeros([C, D], dtype=tl.float32)
    for entry in tl.range(first, last):
        head = tl.load(order + entry)
        gate = tl.load(q_index + head)
        place = chunk * heads + head
        queries = tl.load(q + gate * q_sh + i[:, None] * q_st + d[None, :], mask=rows, other=0.0)
        keys = tl.load(k_at, mask=rows, other=0.0)
        g = tl.load(g_in + place * C + i)
        c = tl.load(c_in + place * C + i)
        total = tl.load(g_in + place * C + C - 1)
        do_at = do + head * do_sh + i[:, None] * do_st + e[None, :]
        u_at = written_in + place * (C * D) + i[:, None] * D + e[None, :]
        dp_at = d_rest + place * (C * D) + i[:, None] * D + e[None, :]
        state_at = states + place * (D * D) + d[:, None] * D + e[None, :]
        d_state_at = d_states + place * (D * D) + d[:, None] * D + e[None, :]

        # What reads S and U, and what the next chunk's state hands back.
        d_local = tl.zeros([C, C], dtype=tl.float32)
        dq_rows = tl.zeros([C, D], dtype=tl.float32)
        overlap = tl.zeros([D], dtype=tl.float32)
        before = dots(keys, dk_rows)
        for column in tl.range(0, D, V):
            dout = tl.load(do_at + column, mask=rows, other=0.0)
            written = tl.load(u_at + column)
            state = tl.load(state_at + column)
            d_state = tl.load(d_state_at + column)
            d_local = tl.dot(dout, tl.trans(written), acc=d_local, input_precision=PRECISION)
            dq_rows = tl.dot(dout, tl.trans(state), acc=dq_rows, input_precision=PRECISION)
            kept = (written.to(tl.float32) * tl.exp2(total + c)[:, None]).to(keys.dtype)
            dk_rows = tl.dot(kept, tl.trans(d_state), acc=dk_rows, input_precision=PRECISION)
            overlap += dots(state, d_state)
        handed = dots(keys, dk_rows) - before
        d_total = tl.sum(overlap) * tl.exp2(total) + tl.sum(handed)

        norm = inverse_norm(queries)
        dq_rows *= (norm * scale * tl.exp2(g))[:, None]
        dg = dots(queries, dq_rows) - handed
        between = tl.where(i[:, None] >= i[None, :], g[:, None] + c[None, :], float("-inf"))
        d_local *= tl.exp2(between) * (norm * scale)[:, None]
        local = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        pairs = tl.where(below, local * d_local, 0.0)
        d_inner = d_local.to(keys.dtype)
        dq_rows = tl.dot(d_inner, keys, acc=dq_rows, input_precision=PRECISION)
        dk_rows = tl.dot(tl.trans(d_inner), queries, acc=dk_rows, input_precision=PRECISION)
        along = dots(queries, dq_rows) * norm * norm
        dq_rows -= queries.to(tl.float32) * along[:, None]
        dq_at = dq + (row * q_heads + gate) * D + i[:, None] * (q_heads * D) + d[None, :]
        tl.store(dq_at, dq_rows.to(dq.dtype.element_ty), mask=rows)

        # What P = V - 2^g K S and the inverted matrix hand back.
        d_a = tl.zeros([C, C], dtype=tl.float32)
        d_rate = tl.zeros([C], dtype=tl.float32)
        before = dots(keys, dk_rows)
        for column in tl.range(0, D, V):
            rest = tl.load(dp_at + column)
            written = tl.load(u_at + column)
            state = tl.load(state_at + column)
            d_a = tl.dot(rest, tl.trans(written), acc=d_a, input_precision=PRECISION)
            late = (rest.to(tl.float32) * -tl.exp2(2 * g + c)[:, None]).to(keys.dtype)
            dk_rows = tl.dot(late, tl.trans(state), acc=dk_rows, input_precision=PRECISION)
            d_rate += dots(rest, written)
        dg += dots(keys, dk_rows) - before
        between = tl.where(below, g[:, None] + c[None, :], float("-inf"))
        d_a *= tl.exp2(between) * -tl.exp2(g + c)[:, None]
        alike = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        pairs += alike * d_a
        d_inner = d_a.to(keys.dtype)
        dk_rows = tl.dot(d_inner, keys, acc=dk_rows, input_precision=PRECISION)
        dk_rows = tl.dot(tl.trans(d_inner), keys, acc=dk_rows, input_precision=PRECISION)
        dg += tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0)

        d_log = tl.cumsum(tl.where(valid, dg, 0.0), axis=0, reverse=True) + d_total
        raw = tl.load(a + gate + i * a_st, mask=valid, other=0.0).to(tl.float32)
        raw += tl.load(dt_bias + gate).to(tl.float32)
        d_log *= -tl.exp(tl.load(A_log + gate).to(tl.float32))
        d_log = tl.where(valid, d_log, 0.0)
        d_raw = d_log * tl.sigmoid(raw)
        at_gate = (row + i) * q_heads + gate
        tl.store(da + at_gate, d_raw.to(da.dtype.element_ty), mask=valid)
        at_decay = d_decay + head * num_chunks + chunk
        tl.store(at_decay, tl.sum(d_log * softplus(raw)))
        tl.store(at_decay + heads * num_chunks, tl.sum(d_raw))
        raw = tl.load(b + gate + i * b_st, mask=valid, other=0.0).to(tl.float32)
        # Both factors of the product hold b, so that it stays small where b is.
        d_rate *= tl.sigmoid(-raw) / tl.maximum(tl.sigmoid(raw), SMALLEST_RATE)
        tl.store(db + at_gate, d_rate.to(db.dtype.element_ty), mask=valid)

    keys = tl.load(k_at, mask=rows, other=0.0)
    norm = inverse_norm(keys)
    along = dots(keys, dk_rows) * norm * norm
    dk_rows -= keys.to(tl.float32) * along[:, None]
    kv_at = (row * kv_heads + kv_head) * D + i[:, None] * (kv_heads * D)
    tl.store(dk + kv_at + d[None, :], dk_rows.to(dk.dtype.element_ty), mask=rows)
    for column in tl.range(0, D, V):
        total_rest = tl.zeros([C, V], dtype=tl.float32)
        for entry in tl.range(first, last):
            place = chunk * heads + tl.load(order + entry)
            dp_at = d_rest + place * (C * D) + i[:, None] * D + e[None, :] + column
            total_rest += tl.load(dp_at).to(tl.float32)
        dv_at = dv + kv_at + e[None, :] + column
        tl.store(dv_at, total_rest.to(dv.dtype.element_ty), mask=rows)
