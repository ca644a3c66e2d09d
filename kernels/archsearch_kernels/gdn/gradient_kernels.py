"""Triton kernels of the gated delta rule's backward pass that run for all chunks at the same time; backward.py launches them.

Formulas and names are those of backward_kernels.py. A row's dot product with its gradient is at the same time its part of dg:
rows of q read, and rows of k read in P and as rows of A, which counts for g_i, and write in the state and as columns of L and
A, which counts against it. Both come from the same rounded matrices, so that pairs of tokens cancel in the sums over tokens.

Loads with different cache modifiers stay different loads. One alone would keep its tile in registers between its uses.
"""

# Triton's decorator has no types, and a kernel is one function.
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0915

from __future__ import annotations

import triton
import triton.language as tl

from archsearch_kernels.gdn.transform_kernels import (
    FIELDS,
    RUN_TIME_COUNTS,
    UNALIGNED,
    inverse_norm,
    softplus,
)

COUNTS = [*RUN_TIME_COUNTS, "q_heads", "kv_heads", "idle_heads", "tokens"]
SCATTERED = [*UNALIGNED, "order", "first_of", "idle", "da", "db"]
SMALLEST_RATE = tl.constexpr(1e-37)


@triton.jit
def dots(rows: tl.tensor, others: tl.tensor) -> tl.tensor:
    """Dot products of equal rows, fp32."""
    return tl.sum(rows.to(tl.float32) * others, axis=1)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SCATTERED)
def query_gradients(
    q: tl.tensor,
    k: tl.tensor,
    do: tl.tensor,
    q_index: tl.tensor,
    kv_index: tl.tensor,
    idle: tl.tensor,
    segments: tl.tensor,
    factors_in: tl.tensor,
    g_in: tl.tensor,
    c_in: tl.tensor,
    states: tl.tensor,
    written_in: tl.tensor,
    dq: tl.tensor,
    da: tl.tensor,
    db: tl.tensor,
    d_decay: tl.tensor,
    local_out: tl.tensor,
    rows_out: tl.tensor,
    heads: tl.tensor,
    idle_heads: tl.tensor,
    q_heads: tl.tensor,
    tokens: tl.tensor,
    chunks_per_segment: tl.tensor,
    first_row: tl.tensor,
    base: tl.tensor,
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
    PRECISION: tl.constexpr,
) -> None:
    """What outputs ask: dq [B, T, H, D] without gaps, a program a chunk and head; zeros there, in da, db and d_decay for
    idle heads.

    local_out [chunks, n, C, C] = s dL Gam of the rows as loaded is for `key_gradients`, and rows_out [chunks, n, 5, C], fp32,
    for `gates`: its first row is q.dq.
    """
    head = tl.program_id(0) % (heads + idle_heads)
    slot = tl.program_id(0) // (heads + idle_heads)
    segment = segments + (first_row + slot // chunks_per_segment) * FIELDS
    number = slot % chunks_per_segment
    batch = tl.load(segment + 1).to(tl.int64)
    token = tl.load(segment + 2) + number * C
    left = tl.load(segment + 3) - token
    if left <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    e = tl.arange(0, V)
    rows = (i < left)[:, None]
    at = token.to(tl.int64)
    if head >= heads:
        gate = tl.load(idle + head - heads).to(tl.int64)
        spare = (batch * tokens + at + i) * q_heads + gate
        at_decay = d_decay + gate * num_chunks + tl.load(segment + 4) + number
        tl.store(at_decay, 0.0)
        tl.store(at_decay + q_heads * num_chunks, 0.0)
        zeros = tl.zeros([C, D], dtype=dq.dtype.element_ty)
        tl.store(dq + spare[:, None] * D + d[None, :], zeros, mask=rows)
        tl.store(da + spare, tl.zeros([C], dtype=da.dtype.element_ty), mask=i < left)
        tl.store(db + spare, tl.zeros([C], dtype=db.dtype.element_ty), mask=i < left)
        return
    gate = tl.load(q_index + head).to(tl.int64)
    place = (tl.load(segment + 4).to(tl.int64) + number) * heads + head
    made = place - base * heads
    do += batch * do_sb + at * do_st + head.to(tl.int64) * do_sh
    q += batch * q_sb + at * q_st + gate * q_sh
    k += batch * k_sb + at * k_st + tl.load(kv_index + head).to(tl.int64) * k_sh

    d_local = tl.zeros([C, C], dtype=tl.float32)
    dq_rows = tl.zeros([C, D], dtype=tl.float32)
    for column in tl.range(0, D, V):
        dout = tl.load(do + column + i[:, None] * do_st + e[None, :], mask=rows, other=0.0)
        written = tl.load(written_in + made * (C * D) + column + i[:, None] * D + e[None, :])
        state = tl.load(states + made * (D * D) + column * D + e[:, None] * D + d[None, :])
        d_local = tl.dot(dout, tl.trans(written), acc=d_local, input_precision=PRECISION)
        dq_rows = tl.dot(dout, state, acc=dq_rows, input_precision=PRECISION)
    keys = tl.load(k + i[:, None] * k_st + d[None, :], mask=rows, other=0.0)
    queries = tl.load(q + i[:, None] * q_st + d[None, :], mask=rows, other=0.0)
    g = tl.load(g_in + place * C + i)
    c = tl.load(c_in + place * C + i)
    norm = inverse_norm(queries)
    between = tl.where(i[:, None] >= i[None, :], g[:, None] + c[None, :], float("-inf"))
    d_local *= tl.exp2(between) * (norm * scale)[:, None]
    local_at = local_out + made * (C * C) + i[:, None] * C + i[None, :]
    tl.store(local_at, d_local.to(local_out.dtype.element_ty))
    dq_rows *= tl.load(factors_in + place * (3 * C) + 2 * C + i)[:, None]
    dq_rows = tl.dot(d_local.to(keys.dtype), keys, acc=dq_rows, input_precision=PRECISION)
    asked = dots(queries, dq_rows)
    tl.store(rows_out + made * (5 * C) + i, asked)
    dq_rows -= queries.to(tl.float32) * (asked * norm * norm)[:, None]
    dq += ((batch * tokens + at) * q_heads + gate) * D
    dq_at = dq + i[:, None] * (q_heads * D) + d[None, :]
    tl.store(dq_at, dq_rows.to(dq.dtype.element_ty), mask=rows)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SCATTERED)
def key_gradients(
    q: tl.tensor,
    k: tl.tensor,
    q_index: tl.tensor,
    kv_index: tl.tensor,
    first_of: tl.tensor,
    segments: tl.tensor,
    factors_in: tl.tensor,
    g_in: tl.tensor,
    c_in: tl.tensor,
    states: tl.tensor,
    written_io: tl.tensor,
    d_states: tl.tensor,
    d_rest: tl.tensor,
    local_in: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    rows_out: tl.tensor,
    d_totals: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    tokens: tl.tensor,
    chunks_per_segment: tl.tensor,
    first_row: tl.tensor,
    base: tl.tensor,
    q_sb: tl.tensor,
    q_st: tl.tensor,
    q_sh: tl.tensor,
    k_sb: tl.tensor,
    k_st: tl.tensor,
    k_sh: tl.tensor,
    D: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Gradients of k and v of each selected head, a program a chunk and head.

    Of a KV head that it alone reads they go to dk and dv [B, T, G, D], without gaps; else the part of dk takes U's place, for
    `gather`. For `gates`, fp32: d_totals [chunks, n] = 2^G <S, dS'>, and the other rows of rows_out [chunks, n, 5, C]: k.dk of
    the state after the chunk alone, with what reads keys, of all; dP.U.
    """
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    segment = segments + (first_row + slot // chunks_per_segment) * FIELDS
    number = slot % chunks_per_segment
    if tl.load(segment + 2) + number * C >= tl.load(segment + 3):
        return
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    e = tl.arange(0, V)
    kv_head = tl.load(kv_index + head).to(tl.int64)
    alone = tl.load(first_of + kv_head + 1) - tl.load(first_of + kv_head) == 1
    batch = tl.load(segment + 1).to(tl.int64)
    token = tl.load(segment + 2) + number * C
    rows = (i < tl.load(segment + 3) - token)[:, None]
    at = token.to(tl.int64)
    row = batch * tokens + at
    gate = tl.load(q_index + head).to(tl.int64)
    place = (tl.load(segment + 4).to(tl.int64) + number) * heads + head
    made = place - base * heads
    written_at = written_io + made * (C * D) + (i[:, None] * D + e[None, :])
    square = made * (D * D) + (e[:, None] * D + d[None, :])

    # What the state after the chunk has of the keys and of the state before it; <S, dS'> is a trace.
    dk_rows = tl.zeros([C, D], dtype=tl.float32)
    overlap = tl.zeros([V, V], dtype=tl.float32)
    for column in tl.range(0, D, V):
        written = tl.load(written_at + column)
        state = tl.load(states + square + column * D)
        d_state = tl.load(d_states + square + column * D)
        dk_rows = tl.dot(written, d_state, acc=dk_rows, input_precision=PRECISION)
        overlap = tl.dot(state, tl.trans(d_state), acc=overlap, input_precision=PRECISION)
    overlap = tl.sum(tl.where(e[:, None] == e[None, :], overlap, 0.0), axis=1)
    d_total = tl.sum(overlap) * tl.exp2(tl.load(g_in + place * C + C - 1))
    dk_rows *= tl.load(factors_in + place * (3 * C) + C + i)[:, None]
    k_at = k + batch * k_sb + at * k_st + kv_head * k_sh + (i[:, None] * k_st + d[None, :])
    tl.store(d_totals + made, d_total)
    rows_at = rows_out + made * (5 * C) + i
    tl.store(rows_at + C, dots(tl.load(k_at, mask=rows, other=0.0), dk_rows))

    # What P has of the state before the chunk, and A of pairs of tokens.
    d_a = tl.zeros([C, C], dtype=tl.float32)
    read_key = tl.load(factors_in + place * (3 * C) + i)
    dv_at = dv + (row * kv_heads + kv_head) * D + (i[:, None] * (kv_heads * D) + e[None, :])
    for column in tl.range(0, D, V):
        rest = tl.load(d_rest + made * (C * D) + column + (i[:, None] * D + e[None, :]))
        written = tl.load(written_at + column)
        state = tl.load(states + square + column * D)
        d_a = tl.dot(rest, tl.trans(written), acc=d_a, input_precision=PRECISION)
        late = (rest.to(tl.float32) * -read_key[:, None]).to(rest.dtype)
        dk_rows = tl.dot(late, state, acc=dk_rows, input_precision=PRECISION)
        tl.store(dv_at + column, rest, mask=rows & alone)
    same = i[:, None] == i[None, :]
    tl.store(rows_at + 4 * C, tl.sum(tl.where(same, d_a, 0.0), axis=1))
    g = tl.load(g_in + place * C + i)
    c = tl.load(c_in + place * C + i)
    between = tl.where(i[:, None] > i[None, :], g[:, None] + c[None, :], float("-inf"))
    d_a *= tl.exp2(between) * -tl.exp2(g + c)[:, None]
    keys = tl.load(k_at, mask=rows, other=0.0, cache_modifier=".ca")
    d_inner = d_a.to(keys.dtype)
    dk_rows = tl.dot(d_inner, keys, acc=dk_rows, input_precision=PRECISION)
    tl.store(rows_at + 2 * C, dots(keys, dk_rows))
    key_rows = tl.load(k_at, mask=rows, other=0.0, cache_modifier=".cg")
    dk_rows = tl.dot(tl.trans(d_inner), keys, acc=dk_rows, input_precision=PRECISION)
    q_at = q + batch * q_sb + at * q_st + gate * q_sh + (i[:, None] * q_st + d[None, :])
    queries = tl.load(q_at, mask=rows, other=0.0)
    local = tl.load(local_in + made * (C * C) + (i[:, None] * C + i[None, :]))
    dk_rows = tl.dot(tl.trans(local), queries, acc=dk_rows, input_precision=PRECISION)
    along = dots(key_rows, dk_rows)
    tl.store(rows_at + 3 * C, along)
    dk_rows -= key_rows.to(tl.float32) * (along * tl.exp2(2 * (g + c)))[:, None]
    if alone:
        dk_at = dk + (row * kv_heads + kv_head) * D + (i[:, None] * (kv_heads * D) + d[None, :])
        tl.store(dk_at, dk_rows.to(dk.dtype.element_ty), mask=rows)
    else:
        # Other threads of this program have read what is overwritten here.
        tl.debug_barrier()
        part_at = written_io + made * (C * D) + (i[:, None] * D + d[None, :])
        tl.store(part_at, dk_rows.to(written_io.dtype.element_ty))


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SCATTERED)
def gather(
    order: tl.tensor,
    first_of: tl.tensor,
    segments: tl.tensor,
    parts: tl.tensor,
    d_rest: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    tokens: tl.tensor,
    chunks_per_segment: tl.tensor,
    first_row: tl.tensor,
    base: tl.tensor,
    D: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """dk and dv of KV heads that no head or several heads read (order[first_of[kv_head]..]), a program R tokens of a chunk."""
    kv_head = tl.program_id(0) % kv_heads
    slot = tl.program_id(0) // kv_heads // (C // R)
    r = tl.program_id(0) // kv_heads % (C // R) * R + tl.arange(0, R)
    segment = segments + (first_row + slot // chunks_per_segment) * FIELDS
    number = slot % chunks_per_segment
    token = tl.load(segment + 2) + number * C
    left = tl.load(segment + 3) - token
    first = tl.load(first_of + kv_head)
    last = tl.load(first_of + kv_head + 1)
    if (left <= 0) | (last - first == 1):
        return
    batch = tl.load(segment + 1).to(tl.int64)
    chunk = tl.load(segment + 4).to(tl.int64) + number - base
    d = tl.arange(0, D)
    dk_rows = tl.zeros([R, D], dtype=tl.float32)
    dv_rows = tl.zeros([R, D], dtype=tl.float32)
    for entry in tl.range(first, last):
        place = chunk * heads + tl.load(order + entry)
        rows_at = place * (C * D) + r[:, None] * D + d[None, :]
        dk_rows += tl.load(parts + rows_at).to(tl.float32)
        dv_rows += tl.load(d_rest + rows_at).to(tl.float32)
    at = batch * tokens + token + r.to(tl.int64)
    out_at = (at * kv_heads + kv_head)[:, None] * D + d[None, :]
    mask = (r < left)[:, None]
    tl.store(dk + out_at, dk_rows.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + out_at, dv_rows.to(dv.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SCATTERED)
def gates(
    a: tl.tensor,
    b: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    q_index: tl.tensor,
    segments: tl.tensor,
    rows_in: tl.tensor,
    d_totals: tl.tensor,
    da: tl.tensor,
    db: tl.tensor,
    d_decay: tl.tensor,
    heads: tl.tensor,
    q_heads: tl.tensor,
    tokens: tl.tensor,
    chunks_per_segment: tl.tensor,
    first_row: tl.tensor,
    base: tl.tensor,
    num_chunks: tl.tensor,
    a_sb: tl.tensor,
    a_st: tl.tensor,
    b_sb: tl.tensor,
    b_st: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
) -> None:
    """Gradients of a and b from what `gradients` leaves, a program H heads of a chunk.

    da and db [B, T, H] are without gaps. d_decay [2, H, chunks]: a chunk's parts of the gradients of A_log and dt_bias.
    """
    blocks = tl.cdiv(heads, H)
    slot = tl.program_id(0) // blocks
    segment = segments + (first_row + slot // chunks_per_segment) * FIELDS
    number = slot % chunks_per_segment
    batch = tl.load(segment + 1).to(tl.int64)
    token = tl.load(segment + 2) + number * C
    left = tl.load(segment + 3) - token
    chunk = tl.load(segment + 4).to(tl.int64) + number
    if left <= 0:
        return
    i = tl.arange(0, C)
    head = tl.program_id(0) % blocks * H + tl.arange(0, H)
    real = head < heads
    valid = real[:, None] & (i < left)[None, :]
    gate = tl.load(q_index + head, mask=real, other=0)
    place = (chunk - base) * heads + head
    rows_at = rows_in + place[:, None] * (5 * C) + i[None, :]
    at = token.to(tl.int64) + i
    handed = tl.load(rows_at + C, mask=valid, other=0.0)
    reading = tl.load(rows_at + 2 * C, mask=valid, other=0.0) - handed
    dg = tl.load(rows_at, mask=valid, other=0.0) + 2 * reading
    dg -= tl.load(rows_at + 3 * C, mask=valid, other=0.0)
    d_total = tl.load(d_totals + place, mask=real, other=0.0) + tl.sum(handed, axis=1)
    d_log = tl.cumsum(dg, axis=1, reverse=True) + d_total[:, None]
    raw_at = a + batch * a_sb + at[None, :] * a_st + gate[:, None]
    raw = tl.load(raw_at, mask=valid, other=0.0).to(tl.float32)
    raw += tl.load(dt_bias + gate).to(tl.float32)[:, None]
    d_log *= -tl.exp(tl.load(A_log + gate).to(tl.float32))[:, None]
    d_log = tl.where(valid, d_log, 0.0)
    d_raw = d_log * tl.sigmoid(raw)
    out_at = (batch * tokens + at)[None, :] * q_heads + gate[:, None]
    tl.store(da + out_at, d_raw.to(da.dtype.element_ty), mask=valid)
    at_decay = d_decay + gate * num_chunks + chunk
    tl.store(at_decay, tl.sum(d_log * softplus(raw), axis=1), mask=real)
    tl.store(at_decay + q_heads * num_chunks, tl.sum(d_raw, axis=1), mask=real)
    raw_at = b + batch * b_sb + at[None, :] * b_st + gate[:, None]
    raw = tl.load(raw_at, mask=valid, other=0.0).to(tl.float32)
    # Both factors of the product hold b, so that it stays small where b is.
    d_rate = tl.load(rows_at + 4 * C, mask=valid, other=0.0)
    d_rate *= tl.sigmoid(-raw) / tl.maximum(tl.sigmoid(raw), SMALLEST_RATE)
    tl.store(db + out_at, d_rate.to(db.dtype.element_ty), mask=valid)
