"""Triton kernels of the gated delta rule's backward pass that run for all chunks at the same time; backward.py launches them.

Formulas and names are those of backward_kernels.py. Gradients here are those of rows of q and k as they were loaded, not yet
freed of what lies along the row, which the L2 norm does not see: the dot product of such a gradient with its row is at the
same time its part of dg.

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
    return tl.sum(rows.to(tl.float32) * others.to(tl.float32), axis=1)


@triton.jit
def across(rows: tl.tensor, gradient: tl.tensor) -> tl.tensor:
    """What the L2 norm of the rows lets through of the gradient."""
    norm = inverse_norm(rows)
    along = dots(rows, gradient) * norm * norm
    return gradient - rows.to(tl.float32) * along[:, None]


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
    kv_index: tl.tensor,
    first_of: tl.tensor,
    segments: tl.tensor,
    local_in: tl.tensor,
    factors_in: tl.tensor,
    g_in: tl.tensor,
    c_in: tl.tensor,
    states: tl.tensor,
    written_io: tl.tensor,
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
    """Gradients of q, a, b and, where one head alone reads a KV head, of k and v, a program a chunk and head.

    dq [B, T, H, D], dk and dv [B, T, G, D], da and db [B, T, H] are without gaps. d_decay [2, n, chunks]: a chunk's parts of
    the gradients of A_log and dt_bias. Of KV heads with several readers the part of dk takes U's place, for `gather`.
    """
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
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
    row = batch * tokens + at
    gate = tl.load(q_index + head)
    kv_head = tl.load(kv_index + head)
    alone = tl.load(first_of + kv_head + 1) - tl.load(first_of + kv_head) == 1
    place = chunk * heads + head
    q_at = q + batch * q_sb + at * q_st + gate * q_sh + i[:, None] * q_st + d[None, :]
    k_at = k + batch * k_sb + at * k_st + kv_head * k_sh + i[:, None] * k_st + d[None, :]
    do_at = do + batch * do_sb + at * do_st + head * do_sh + i[:, None] * do_st + e[None, :]
    rows_at = place * (C * D) + i[:, None] * D + e[None, :]
    square_at = place * (D * D) + e[:, None] * D + d[None, :]
    g = tl.load(g_in + place * C + i)
    c = tl.load(c_in + place * C + i)
    factors = factors_in + place * (3 * C) + i

    # What comes from the outputs. A tile is loaded again for each use: registers are what is scarce.
    d_local = tl.zeros([C, C], dtype=tl.float32)
    dq_rows = tl.zeros([C, D], dtype=tl.float32)
    for column in tl.range(0, D, V):
        dout = tl.load(do_at + column, mask=rows, other=0.0)
        written = tl.load(written_io + rows_at + column)
        state = tl.load(states + square_at + column * D)
        d_local = tl.dot(dout, tl.trans(written), acc=d_local, input_precision=PRECISION)
        dq_rows = tl.dot(dout, state, acc=dq_rows, input_precision=PRECISION)
    dq_rows *= tl.load(factors + 2 * C)[:, None]
    queries = tl.load(q_at, mask=rows, other=0.0)
    query_scale = inverse_norm(queries) * scale
    dg = dots(queries, dq_rows)
    local = tl.load(local_in + place * (C * C) + i[:, None] * C + i[None, :])
    pairs = tl.where(below, local.to(tl.float32) * d_local, 0.0)
    dg += tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0)
    between = tl.where(i[:, None] >= i[None, :], g[:, None] + c[None, :], float("-inf"))
    d_local *= tl.exp2(between) * query_scale[:, None]
    d_local_inner = d_local.to(queries.dtype)
    keys = tl.load(k_at, mask=rows, other=0.0, cache_modifier=".ca")
    dq_rows = tl.dot(d_local_inner, keys, acc=dq_rows, input_precision=PRECISION)
    dq_rows = across(tl.load(q_at, mask=rows, other=0.0, cache_modifier=".cg"), dq_rows)
    dq_at = dq + (row * q_heads + gate) * D + i[:, None] * (q_heads * D) + d[None, :]
    tl.store(dq_at, dq_rows.to(dq.dtype.element_ty), mask=rows)

    # What comes from the state after the chunk, then through P = V - 2^g K S and the inverted matrix.
    dk_rows = tl.zeros([C, D], dtype=tl.float32)
    overlap = tl.zeros([V], dtype=tl.float32)
    for column in tl.range(0, D, V):
        written = tl.load(written_io + rows_at + column)
        d_state = tl.load(d_states + square_at + column * D)
        dk_rows = tl.dot(written, d_state, acc=dk_rows, input_precision=PRECISION)
        overlap += dots(tl.load(states + square_at + column * D), d_state)
    dk_rows *= tl.load(factors + C)[:, None]
    handed = dots(tl.load(k_at, mask=rows, other=0.0, cache_modifier=".ca"), dk_rows)
    d_total = tl.sum(overlap) * tl.exp2(tl.load(g_in + place * C + C - 1)) + tl.sum(handed)
    dg -= 2 * handed
    d_a = tl.zeros([C, C], dtype=tl.float32)
    d_rate = tl.zeros([C], dtype=tl.float32)
    read_key = tl.load(factors)
    dv_at = dv + (row * kv_heads + kv_head) * D + i[:, None] * (kv_heads * D) + e[None, :]
    for column in tl.range(0, D, V):
        rest = tl.load(d_rest + rows_at + column)
        written = tl.load(written_io + rows_at + column)
        state = tl.load(states + square_at + column * D)
        d_a = tl.dot(rest, tl.trans(written), acc=d_a, input_precision=PRECISION)
        d_rate += dots(rest, written)
        tl.store(dv_at + column, rest, mask=rows & alone)
        rest = (rest.to(tl.float32) * -read_key[:, None]).to(rest.dtype)
        dk_rows = tl.dot(rest, state, acc=dk_rows, input_precision=PRECISION)
    keys = tl.load(k_at, mask=rows, other=0.0)
    between = tl.where(below, g[:, None] + c[None, :], float("-inf"))
    d_a *= tl.exp2(between) * -tl.exp2(g + c)[:, None]
    pairs = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * d_a
    dg += tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0)
    d_inner = d_a.to(keys.dtype)
    dg += dots(tl.load(k_at, mask=rows, other=0.0, cache_modifier=".cg"), dk_rows)
    dk_rows = tl.dot(d_inner, keys, acc=dk_rows, input_precision=PRECISION)
    dk_rows = tl.dot(tl.trans(d_inner), keys, acc=dk_rows, input_precision=PRECISION)
    queries = tl.load(q_at, mask=rows, other=0.0)
    dk_rows = tl.dot(tl.trans(d_local_inner), queries, acc=dk_rows, input_precision=PRECISION)
    if alone:
        dk_at = dk + (row * kv_heads + kv_head) * D + i[:, None] * (kv_heads * D) + d[None, :]
        dk_rows = across(tl.load(k_at, mask=rows, other=0.0, cache_modifier=".ca"), dk_rows)
        tl.store(dk_at, dk_rows.to(dk.dtype.element_ty), mask=rows)
    else:
        # Other threads of this program have read what is overwritten here.
        tl.debug_barrier()
        part_at = written_io + place * (C * D) + i[:, None] * D + d[None, :]
        tl.store(part_at, dk_rows.to(written_io.dtype.element_ty))

    d_log = tl.cumsum(tl.where(valid, dg, 0.0), axis=0, reverse=True) + d_total
    raw = tl.load(a + batch * a_sb + (at + i) * a_st + gate, mask=valid, other=0.0).to(tl.float32)
    raw += tl.load(dt_bias + gate).to(tl.float32)
    d_log *= -tl.exp(tl.load(A_log + gate).to(tl.float32))
    d_log = tl.where(valid, d_log, 0.0)
    d_raw = d_log * tl.sigmoid(raw)
    at_gate = (row + i) * q_heads + gate
    tl.store(da + at_gate, d_raw.to(da.dtype.element_ty), mask=valid)
    at_decay = d_decay + head * num_chunks + chunk
    tl.store(at_decay, tl.sum(d_log * softplus(raw)))
    tl.store(at_decay + heads * num_chunks, tl.sum(d_raw))
    raw = tl.load(b + batch * b_sb + (at + i) * b_st + gate, mask=valid, other=0.0).to(tl.float32)
    # Both factors of the product hold b, so that it stays small where b is.
    d_rate *= tl.sigmoid(-raw) / tl.maximum(tl.sigmoid(raw), SMALLEST_RATE)
    tl.store(db + at_gate, d_rate.to(db.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SCATTERED)
def gather(
    k: tl.tensor,
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
    k_sb: tl.tensor,
    k_st: tl.tensor,
    k_sh: tl.tensor,
    D: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """dk and dv of KV heads that no head or several heads read (order[first_of[kv_head]..]), a program R tokens of a chunk."""
    kv_head = tl.program_id(0) % kv_heads
    slot = tl.program_id(0) // kv_heads // (C // R)
    r = tl.program_id(0) // kv_heads % (C // R) * R + tl.arange(0, R)
    segment = segments + slot // chunks_per_segment * FIELDS
    number = slot % chunks_per_segment
    batch = tl.load(segment + 1).to(tl.int64)
    token = tl.load(segment + 2) + number * C
    left = tl.load(segment + 3) - token
    chunk = tl.load(segment + 4).to(tl.int64) + number
    first = tl.load(first_of + kv_head)
    last = tl.load(first_of + kv_head + 1)
    if (left <= 0) | (last - first == 1):
        return
    d = tl.arange(0, D)
    mask = (r < left)[:, None]
    dk_rows = tl.zeros([R, D], dtype=tl.float32)
    dv_rows = tl.zeros([R, D], dtype=tl.float32)
    for entry in tl.range(first, last):
        place = chunk * heads + tl.load(order + entry)
        rows_at = place * (C * D) + r[:, None] * D + d[None, :]
        dk_rows += tl.load(parts + rows_at).to(tl.float32)
        dv_rows += tl.load(d_rest + rows_at).to(tl.float32)
    at = token + r.to(tl.int64)
    k_at = k + batch * k_sb + kv_head * k_sh + at[:, None] * k_st + d[None, :]
    keys = tl.load(k_at, mask=mask, other=0.0)
    out_at = ((batch * tokens + at) * kv_heads + kv_head)[:, None] * D + d[None, :]
    tl.store(dk + out_at, across(keys, dk_rows).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + out_at, dv_rows.to(dv.dtype.element_ty), mask=mask)
