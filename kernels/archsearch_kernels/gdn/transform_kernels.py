"""Stage 1 of the gated delta rule in Triton, for all chunks at the same time; forward_kernels.py has the notation.

X is built by doubling: two neighbouring blocks P and Q on the diagonal make [[P, 0], [-Q L P, Q]] with L what A has between them.
"""

# Triton's decorator has no types, and a kernel is one function.
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0915

from __future__ import annotations

import triton
import triton.language as tl

NORM_EPSILON = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)

FIELDS = tl.constexpr(8)
"""Columns of the table of segments (schedule.py): sequence, batch row, first token, end, first chunk, position, last."""

RUN_TIME_COUNTS = ["heads", "chunks_per_segment", "num_chunks", "a_st", "a_sb", "b_st", "b_sb"]
RUN_TIME_COUNTS += ["first_row", "base"]
"""Integers for which Triton must not compile again when they become 1 or a multiple of 16."""
UNALIGNED = ["q_index", "kv_index", "a", "b", "A_log", "dt_bias"]
"""Pointers that are read a number at a time, for which Triton must not compile again when they are not aligned."""


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + e^x), exact also where e^x is far below 1: long-lived heads have decays of 1e-5."""
    small = tl.exp(-tl.abs(x))
    series = small * (1.0 - small * (0.5 - small * (0.3333333333 - small * 0.25)))
    return tl.maximum(x, 0.0) + tl.where(small < 0.01, series, tl.log(1.0 + small))


@triton.jit
def inverse_norm(rows: tl.tensor) -> tl.tensor:
    wide = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + NORM_EPSILON)


@triton.jit(do_not_specialize=RUN_TIME_COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def transform(
    q: tl.tensor,
    k: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    q_index: tl.tensor,
    kv_index: tl.tensor,
    segments: tl.tensor,
    x_out: tl.tensor,
    local_out: tl.tensor,
    factors_out: tl.tensor,
    g_out: tl.tensor,
    c_out: tl.tensor,
    total_out: tl.tensor,
    heads: tl.tensor,
    chunks_per_segment: tl.tensor,
    num_chunks: tl.tensor,
    q_sb: tl.tensor,
    q_st: tl.tensor,
    q_sh: tl.tensor,
    k_sb: tl.tensor,
    k_st: tl.tensor,
    k_sh: tl.tensor,
    a_sb: tl.tensor,
    a_st: tl.tensor,
    b_sb: tl.tensor,
    b_st: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Stage 1, a program a chunk and head: X and L [chunks, n, C, C], factors [chunks, n, 3, C], g and c [chunks, n, C], G [n, chunks].

    The factors of a token, fp32: 2^g / |k|, 2^(G - g) / |k| and s 2^g / |q|.
    """
    head = tl.program_id(0) % heads
    place = tl.program_id(0) // heads
    segment = segments + place // chunks_per_segment * FIELDS
    number = place % chunks_per_segment
    batch = tl.load(segment + 1).to(tl.int64)
    token = tl.load(segment + 2) + number * C
    left = tl.load(segment + 3) - token
    chunk = tl.load(segment + 4) + number
    if left <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    valid = i < left
    gate = tl.load(q_index + head).to(tl.int64)
    k += batch * k_sb + token.to(tl.int64) * k_st + tl.load(kv_index + head).to(tl.int64) * k_sh
    rows = tl.load(k + i[:, None] * k_st + d[None, :], mask=valid[:, None], other=0.0)
    q += batch * q_sb + token.to(tl.int64) * q_st + gate * q_sh
    queries = tl.load(q + i[:, None] * q_st + d[None, :], mask=valid[:, None], other=0.0)
    a += batch * a_sb + token.to(tl.int64) * a_st + gate
    b += batch * b_sb + token.to(tl.int64) * b_st + gate
    raw = tl.load(a + i * a_st, mask=valid, other=0.0).to(tl.float32)
    raw = softplus(raw + tl.load(dt_bias + gate).to(tl.float32))
    decay = tl.exp(tl.load(A_log + gate).to(tl.float32)) * raw
    steps = tl.where(valid, -decay * LOG2_E, 0.0)
    g = tl.cumsum(steps, axis=0)
    total = tl.sum(steps)
    rate = tl.sigmoid(tl.load(b + i * b_st, mask=valid, other=float("-inf")).to(tl.float32))
    before = tl.load(b + (i - 1) * b_st, mask=valid & (i > 0), other=float("-inf"))
    before = tl.sigmoid(before.to(tl.float32))

    # Squared norms are diagonals: sums over rows of tiles would take more instructions than these products.
    same = i[:, None] == i[None, :]
    alike = tl.dot(queries, tl.trans(queries), input_precision=PRECISION)
    query_norm = tl.rsqrt(tl.sum(tl.where(same, alike, 0.0), axis=1) + NORM_EPSILON) * scale
    alike = tl.dot(rows, tl.trans(rows), input_precision=PRECISION)
    norm = tl.rsqrt(tl.sum(tl.where(same, alike, 0.0), axis=1) + NORM_EPSILON)
    place_out = chunk.to(tl.int64) * heads + head
    c = tl.log2(norm) - g
    tl.store(g_out + place_out * C + i, g)
    tl.store(c_out + place_out * C + i, c)
    tl.store(total_out + head * num_chunks + chunk, total)
    factors = factors_out + place_out * (3 * C) + i
    tl.store(factors, tl.exp2(g) * norm)
    tl.store(factors + C, tl.exp2(total - g) * norm)
    tl.store(factors + 2 * C, tl.exp2(g) * query_norm)

    # Both matrices share their decays and the norms of k.
    between = tl.exp2(tl.where(i[:, None] >= i[None, :], g[:, None] + c[None, :], float("-inf")))
    minus_a = alike * between * (-norm)[:, None]
    minus_a_inner = tl.where(same, 0.0, minus_a).to(INNER)
    local = tl.dot(queries, tl.trans(rows), input_precision=PRECISION)
    local *= between * query_norm[:, None]
    square_at = place_out * (C * C) + i[:, None] * C + i[None, :]
    tl.store(local_out + square_at, local.to(local_out.dtype.element_ty))
    # X for blocks of 1, 2, 4, .. tokens along the diagonal: two neighbours P and Q make [[P, 0], [-Q L P, Q]] with L what A
    # has between them. Entries of A and X are at most 1, so that fp16 is the best 16-bit type for them.
    below = i[:, None] > i[None, :]
    apart = tl.where(below, i[:, None] ^ i[None, :], 0)
    x = tl.where(apart == 1, minus_a_inner.to(tl.float32) * (rate * before)[:, None], 0.0)
    x = tl.where(same, rate[:, None], x)
    for level in tl.static_range(1, LEVELS):
        x_inner = x.to(INNER)
        product = tl.dot(x_inner, minus_a_inner, input_precision=PRECISION)
        product = tl.dot(product.to(INNER), x_inner, input_precision=PRECISION)
        x = tl.where((apart >> level) == 1, product, x)

    tl.store(x_out + square_at, x.to(x_out.dtype.element_ty))
