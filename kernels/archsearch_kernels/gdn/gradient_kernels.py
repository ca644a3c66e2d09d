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

from archsearch_kernels.gdn.forward_kernels import (
    FIELDS,
    RUN_TIME_COUNTS,
    UNALIGNED,
    inverse_norm,
    softplus,
)

COUNTS = [*RUN_TIME_COUNTS, "q_heads", "kv_heads", "tokens"]
SCATTERED = [*UNALIGNED, "order", "first_of", "da", "db"]
SMALLEST_RATE = tl.constexpr(1e-37)


@triton.jit
def dots(rows: tl.tensor, others: tl.tensor) -> tl.tensor:
    """Dot products of equal rows, fp32."""
    return tl.sum(rows.to(tl.float32) * others, axis=1)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SCATTERED)
def gradients(
    q: tl.tensor,
    k: tl.tensor,
    do: tl.tensor,
    q_index: tl.tensor,
    order: tl.tensor,
    first_of: tl.tensor,
    segments: tl.tensor,
    factors_in: tl.tensor,
    g_in: tl.tensor,
    c_in: tl.tensor,
    states: tl.tensor,
    written_in: tl.tensor,
    d_states: tl.tensor,
    d_rest: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    rows_out: tl.tensor,
    d_totals: tl.tensor,
    heads: tl.tensor,
    q_heads: tl.tensor,
    kv_heads: tl.tensor,
    tokens: tl.tensor,
    chunks_per_segment: tl.tensor,
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
    """Gradients of q, k and v, a program a chunk and KV head: it adds up those of the heads order[first_of[kv_head]..].

    dq [B, T, H, D], dk and dv [B, T, G, D] are without gaps. For `gates`, fp32: rows_out [chunks, n, 2, C], dg but for what
    d_totals [chunks, n] = dG holds, and dP.U.
    """
    kv_head = tl.program_id(0) % kv_heads
    slot = tl.program_id(0) // kv_heads
    segment = segments + slot // chunks_per_segment * FIELDS
    number = slot % chunks_per_segment
    if tl.load(segment + 2) + number * C >= tl.load(segment + 3):
        return
    first = tl.load(first_of + kv_head)
    last = tl.load(first_of + kv_head + 1)
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    e = tl.arange(0, V)
    if first == last:
        token = tl.load(segment + 2) + number * C
        row = tl.load(segment + 1).to(tl.int64) * tokens + token
        rows = (i < tl.load(segment + 3) - token)[:, None]
        out_at = (row * kv_heads + kv_head) * D + i[:, None] * (kv_heads * D) + d[None, :]
        tl.store(dk + out_at, tl.zeros([C, D], dtype=dk.dtype.element_ty), mask=rows)
        tl.store(dv + out_at, tl.zeros([C, D], dtype=dv.dtype.element_ty), mask=rows)
    for entry in tl.range(first, last):
        # Addresses are made anew for each head: kept from one to the next, they would be spilled.
        batch = tl.load(segment + 1).to(tl.int64)
        token = tl.load(segment + 2) + number * C
        rows = (i < tl.load(segment + 3) - token)[:, None]
        at = token.to(tl.int64)
        row = batch * tokens + at
        head = tl.load(order + entry)
        gate = tl.load(q_index + head)
        place = (tl.load(segment + 4).to(tl.int64) + number) * heads + head
        do_at = do + batch * do_sb + at * do_st + head * do_sh
        dv_at = dv + (row * kv_heads + kv_head) * D
        written_at = written_in + place * (C * D)
        rest_at = d_rest + place * (C * D)
        state_at = states + place * (D * D)
        d_state_at = d_states + place * (D * D)
        tile = i[:, None] * D + e[None, :]
        square = e[:, None] * D + d[None, :]
        do_tile = i[:, None] * do_st + e[None, :]
        dv_tile = i[:, None] * (kv_heads * D) + e[None, :]

        # What O and P have of the state before the chunk.
        d_local = tl.zeros([C, C], dtype=tl.float32)
        d_a = tl.zeros([C, C], dtype=tl.float32)
        dq_rows = tl.zeros([C, D], dtype=tl.float32)
        dk_rows = tl.zeros([C, D], dtype=tl.float32)
        for column in tl.range(0, D, V):
            dout = tl.load(do_at + column + do_tile, mask=rows, other=0.0)
            rest = tl.load(rest_at + column + tile)
            written = tl.trans(tl.load(written_at + column + tile))
            state = tl.load(state_at + column * D + square)
            d_local = tl.dot(dout, written, acc=d_local, input_precision=PRECISION)
            d_a = tl.dot(rest, written, acc=d_a, input_precision=PRECISION)
            dq_rows = tl.dot(dout, state, acc=dq_rows, input_precision=PRECISION)
            dk_rows = tl.dot(rest, state, acc=dk_rows, input_precision=PRECISION)
            d_values = rest.to(tl.float32)
            if entry > first:
                d_values += tl.load(dv_at + column + dv_tile, mask=rows, other=0.0).to(tl.float32)
            tl.store(dv_at + column + dv_tile, d_values.to(dv.dtype.element_ty), mask=rows)

        # Between tokens of the chunk.
        q_at = q + batch * q_sb + at * q_st + gate * q_sh + (i[:, None] * q_st + d[None, :])
        k_at = k + batch * k_sb + at * k_st + kv_head * k_sh + (i[:, None] * k_st + d[None, :])
        keys = tl.load(k_at, mask=rows, other=0.0)
        queries = tl.load(q_at, mask=rows, other=0.0)
        query_norm = inverse_norm(queries)
        factors = factors_in + place * (3 * C) + i
        g = tl.load(g_in + place * C + i)
        c = tl.load(c_in + place * C + i)
        d_rate = tl.sum(tl.where(i[:, None] == i[None, :], d_a, 0.0), axis=1)
        tl.store(rows_out + place * (2 * C) + C + i, d_rate)
        between = g[:, None] + c[None, :]
        between = tl.exp2(tl.where(i[:, None] >= i[None, :], between, float("-inf")))
        d_a *= tl.where(i[:, None] == i[None, :], 0.0, between) * -tl.exp2(g + c)[:, None]
        d_a_inner = d_a.to(keys.dtype)
        d_local *= between * (query_norm * scale)[:, None]
        d_local_inner = d_local.to(queries.dtype)
        dq_rows *= tl.load(factors + 2 * C)[:, None]
        dq_rows = tl.dot(d_local_inner, keys, acc=dq_rows, input_precision=PRECISION)
        asked = dots(queries, dq_rows)
        dq_rows -= queries.to(tl.float32) * (asked * query_norm * query_norm)[:, None]
        dq_at = dq + (row * q_heads + gate) * D + (i[:, None] * (q_heads * D) + d[None, :])
        tl.store(dq_at, dq_rows.to(dq.dtype.element_ty), mask=rows)
        key_rows = tl.load(k_at, mask=rows, other=0.0, cache_modifier=".ca")
        dk_rows *= -tl.load(factors)[:, None]
        dk_rows = tl.dot(d_a_inner, keys, acc=dk_rows, input_precision=PRECISION)
        reading = dots(key_rows, dk_rows)
        dk_rows = tl.dot(tl.trans(d_a_inner), keys, acc=dk_rows, input_precision=PRECISION)
        d_local_inner = tl.trans(d_local_inner)
        dk_rows = tl.dot(d_local_inner, queries, acc=dk_rows, input_precision=PRECISION)
        along = dots(key_rows, dk_rows)

        # What the state after the chunk has of the keys and of the state before it; <S, dS'> is a trace.
        handed_rows = tl.zeros([C, D], dtype=tl.float32)
        overlap = tl.zeros([V, V], dtype=tl.float32)
        for column in tl.range(0, D, V):
            written = tl.load(written_at + column + tile)
            state = tl.load(state_at + column * D + square)
            d_state = tl.load(d_state_at + column * D + square)
            handed_rows = tl.dot(written, d_state, acc=handed_rows, input_precision=PRECISION)
            d_state = tl.trans(d_state)
            overlap = tl.dot(state, d_state, acc=overlap, input_precision=PRECISION)
        overlap = tl.sum(tl.where(e[:, None] == e[None, :], overlap, 0.0), axis=1)
        d_total = tl.sum(overlap) * tl.exp2(tl.load(g_in + place * C + C - 1))
        write_key = tl.load(factors + C)
        handed = dots(key_rows, handed_rows) * write_key
        tl.store(d_totals + place, d_total + tl.sum(handed))
        tl.store(rows_out + place * (2 * C) + i, asked + 2 * reading - along - handed)
        along = (along + handed) * tl.exp2(2 * (g + c))
        dk_rows += handed_rows * write_key[:, None]
        dk_rows -= key_rows.to(tl.float32) * along[:, None]
        dk_at = dk + (row * kv_heads + kv_head) * D + (i[:, None] * (kv_heads * D) + d[None, :])
        if entry > first:
            dk_rows += tl.load(dk_at, mask=rows, other=0.0).to(tl.float32)
        tl.store(dk_at, dk_rows.to(dk.dtype.element_ty), mask=rows)
        # The next head adds to what other threads of this program may have written.
        tl.debug_barrier()


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
    num_chunks: tl.tensor,
    a_sb: tl.tensor,
    a_st: tl.tensor,
    b_sb: tl.tensor,
    b_st: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
) -> None:
    """Gradients of a and b from what `gradients` leaves, a program H heads of a chunk.

    da and db [B, T, H] are without gaps. d_decay [2, n, chunks]: a chunk's parts of the gradients of A_log and dt_bias.
    """
    blocks = tl.cdiv(heads, H)
    slot = tl.program_id(0) // blocks
    segment = segments + slot // chunks_per_segment * FIELDS
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
    place = chunk * heads + head
    rows_at = rows_in + place[:, None] * (2 * C) + i[None, :]
    at = token.to(tl.int64) + i
    d_log = tl.cumsum(tl.load(rows_at, mask=valid, other=0.0), axis=1, reverse=True)
    d_log += tl.load(d_totals + place, mask=real, other=0.0)[:, None]
    raw_at = a + batch * a_sb + at[None, :] * a_st + gate[:, None]
    raw = tl.load(raw_at, mask=valid, other=0.0).to(tl.float32)
    raw += tl.load(dt_bias + gate).to(tl.float32)[:, None]
    d_log *= -tl.exp(tl.load(A_log + gate).to(tl.float32))[:, None]
    d_log = tl.where(valid, d_log, 0.0)
    d_raw = d_log * tl.sigmoid(raw)
    out_at = (batch * tokens + at)[None, :] * q_heads + gate[:, None]
    tl.store(da + out_at, d_raw.to(da.dtype.element_ty), mask=valid)
    at_decay = d_decay + head * num_chunks + chunk
    tl.store(at_decay, tl.sum(d_log * softplus(raw), axis=1), mask=real)
    tl.store(at_decay + heads * num_chunks, tl.sum(d_raw, axis=1), mask=real)
    raw_at = b + batch * b_sb + at[None, :] * b_st + gate[:, None]
    raw = tl.load(raw_at, mask=valid, other=0.0).to(tl.float32)
    # Both factors of the product hold b, so that it stays small where b is.
    d_rate = tl.load(rows_at + C, mask=valid, other=0.0)
    d_rate *= tl.sigmoid(-raw) / tl.maximum(tl.sigmoid(raw), SMALLEST_RATE)
    tl.store(db + out_at, d_rate.to(db.dtype.element_ty), mask=valid)
