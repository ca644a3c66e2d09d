"""Triton kernels of the gated delta rule's forward pass; kernel.py launches them, schedule.py cuts the work.

Notation, per head and chunk of C tokens that starts at state S [D, D] (rows are key dimensions): k and q are rows divided
by their L2 norm, b the writing rates, g_i the log2 decay summed from the chunk's start to token i, G the chunk's sum, s = D^-1/2.
With A_ij = 2^(g_i - g_j) k_i.k_j below the diagonal and X = (I + diag(b) A)^-1 diag(b) (UT transform, arXiv 2406.06484),
    U = X (V - 2^g K S),  O = s 2^g Q S + L U,  S <- 2^G S + (2^(G - g) K)^T U,
where L_ij = s 2^(g_i - g_j) q_i.k_j on and below the diagonal. q and k enter the products as they were loaded: their norms are
in factors of rows and columns. Stage 1, `transform`, is parallel over chunks and leaves X, L, those factors, and g and c =
-log2|k| - g for the backward pass: 276 bytes a token-head in bf16.

The passes over chunks keep S transposed. Each product then takes its left side from registers, where the product before has
left it, and its right side from a tile as loaded, so that nothing of the chain from chunk to chunk goes through shared memory.

The state pass is affine in S. A long sequence is cut into segments that run at the same time: `summarize` finds each
segment's map S_end = M S_start + N, `link` chains the maps, and `attend` runs from the linked states. Each token's map has
a spectral norm of at most 2^(its log2 decay), because 0 <= b <= 1 and |k| <= 1; what lies more than FORGOTTEN powers of two
back from a segment's end is therefore left out of N, and an M below 2^-FORGOTTEN is not computed at all.

Dimension names: n selected heads, D head_dim, C tokens in a chunk, V columns of the state in one program.
"""

# Triton's decorator has no types, and a kernel is one function.
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0915

from __future__ import annotations

import triton
import triton.language as tl

FORGOTTEN = tl.constexpr(35.0)
"""Powers of two: 2^-35 is 3e-11, far below fp32's rounding of the state that it is left out of."""

NORM_EPSILON = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)

FIELDS = tl.constexpr(8)
"""Columns of the table of segments (schedule.py): sequence, batch row, first token, end, first chunk, position, last."""

RUN_TIME_COUNTS = ["heads", "chunks_per_segment", "num_chunks", "a_st", "a_sb", "b_st", "b_sb"]
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
    gate = tl.load(q_index + head)
    k += batch * k_sb + token.to(tl.int64) * k_st + tl.load(kv_index + head) * k_sh
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


@triton.jit
def read_state(
    states: tl.tensor, place: tl.tensor, column: tl.tensor, D: tl.constexpr, V: tl.constexpr
) -> tl.tensor:
    """Columns column.. of states[place], fp32 [D, V]."""
    d = tl.arange(0, D)
    states += place.to(tl.int64) * (D * D) + column
    return tl.load(states + d[:, None] * D + tl.arange(0, V)[None, :])


@triton.jit
def write_state(
    states: tl.tensor,
    state: tl.tensor,
    place: tl.tensor,
    column: tl.tensor,
    D: tl.constexpr,
    V: tl.constexpr,
) -> None:
    d = tl.arange(0, D)
    states += place.to(tl.int64) * (D * D) + column
    tl.store(states + d[:, None] * D + tl.arange(0, V)[None, :], state)


@triton.jit(do_not_specialize=RUN_TIME_COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def summarize(
    k: tl.tensor,
    v: tl.tensor,
    kv_index: tl.tensor,
    segments: tl.tensor,
    x_in: tl.tensor,
    factors_in: tl.tensor,
    total_in: tl.tensor,
    initial: tl.tensor,
    ends: tl.tensor,
    maps: tl.tensor,
    reach: tl.tensor,
    heads: tl.tensor,
    num_chunks: tl.tensor,
    k_sb: tl.tensor,
    k_st: tl.tensor,
    k_sh: tl.tensor,
    v_sb: tl.tensor,
    v_st: tl.tensor,
    v_sh: tl.tensor,
    D: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Segments' maps: ends = N and maps = M [segments, n, D, D], reach [segments, n] = log2 of M's bound.

    A program has V columns of N or of M, which is the same pass from the unit matrix with v = 0. A sequence's first segment
    starts at its initial state, so that its N is its last state and it needs no M; its last segment needs neither.
    """
    blocks: tl.constexpr = D // V
    is_map = tl.program_id(0) % (2 * blocks) >= blocks
    column = tl.program_id(0) % blocks * V
    head = tl.program_id(0) // (2 * blocks) % heads
    row = tl.program_id(0) // (2 * blocks) // heads
    segment = segments + row * FIELDS
    position = tl.load(segment + 5)
    is_last = tl.load(segment + 6)
    token = tl.load(segment + 2)
    length = tl.load(segment + 3) - token
    first_chunk = tl.load(segment + 4).to(tl.int64)
    batch = tl.load(segment + 1).to(tl.int64)
    count = tl.cdiv(length, C)

    number = tl.arange(0, MOST_CHUNKS)
    here = number < count
    totals = tl.load(total_in + head * num_chunks + first_chunk + number, mask=here, other=0.0)
    whole = tl.sum(totals)
    after = whole - tl.cumsum(totals, axis=0)
    first = tl.sum((here & (after < -FORGOTTEN)).to(tl.int32))
    if first > 0:
        whole = whole * 0.0 - 2 * FORGOTTEN
    needed = (is_last == 0) & ((is_map == 0) | ((position > 0) & (first == 0)))
    if not needed:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    e = tl.arange(0, V)
    kv_head = tl.load(kv_index + head)
    k += batch * k_sb + kv_head * k_sh
    v += batch * v_sb + kv_head * v_sh + column
    state = tl.where(is_map & (d[None, :] == column + e[:, None]), 1.0, 0.0)
    if initial is not None:  # noqa: SIM102 - decided when compiled
        if (position == 0) & (first == 0):
            state = tl.trans(read_state(initial, tl.load(segment) * heads + head, column, D, V))
    totals_at = total_in + head * num_chunks + first_chunk
    total = tl.load(totals_at + first, mask=first < count, other=0.0)
    for number in tl.range(first, count):
        next_total = tl.load(totals_at + number + 1, mask=number + 1 < count, other=0.0)
        valid = i < tl.where(is_map, 0, length - number * C)
        place = (first_chunk + number) * heads + head
        at = token.to(tl.int64) + number * C
        rows = (i < length - number * C)[:, None]
        keys = tl.load(k + at * k_st + i[:, None] * k_st + d[None, :], mask=rows, other=0.0)
        values = tl.load(
            v + at * v_st + i[:, None] * v_st + e[None, :], mask=valid[:, None], other=0.0
        )
        x = tl.load(x_in + place * (C * C) + i[:, None] * C + i[None, :])
        read_key = tl.load(factors_in + place * (3 * C) + i)
        write_key = tl.load(factors_in + place * (3 * C) + C + i)
        read = tl.dot(state.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        rest = tl.trans(values).to(tl.float32) - read * read_key[None, :]
        written = tl.dot(rest.to(x.dtype), tl.trans(x), input_precision=PRECISION)
        kept = (written * write_key[None, :]).to(keys.dtype)
        state = tl.dot(kept, keys, acc=state * tl.exp2(total), input_precision=PRECISION)
        total = next_total
    place = row * heads + head
    if is_map:
        write_state(maps, tl.trans(state), place, column, D, V)
    else:
        write_state(ends, tl.trans(state), place, column, D, V)
        tl.store(reach + place, whole)


@triton.jit(do_not_specialize=RUN_TIME_COUNTS)
def link(
    first_rows: tl.tensor,
    ends: tl.tensor,
    maps: tl.tensor,
    reach: tl.tensor,
    heads: tl.tensor,
    D: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Turns N into the state after each segment, in place: ends[j] += maps[j] ends[j - 1], V columns a program."""
    blocks: tl.constexpr = D // V
    column = tl.program_id(0) % blocks * V
    head = tl.program_id(0) // blocks % heads
    sequence = tl.program_id(0) // blocks // heads
    d = tl.arange(0, D)
    p = tl.arange(0, K)
    start = tl.load(first_rows + sequence)
    stop = tl.load(first_rows + sequence + 1)
    for row in tl.range(start + 1, stop - 1):
        place = row * heads + head
        if tl.load(reach + place) > -FORGOTTEN:
            state = read_state(ends, place, column, D, V)
            rows = maps + place.to(tl.int64) * (D * D)
            before = ends + (place - heads).to(tl.int64) * (D * D) + column
            for part in tl.range(0, D, K):
                m = tl.load(rows + d[:, None] * D + (part + p)[None, :])
                old = tl.load(before + (part + p)[:, None] * D + tl.arange(0, V)[None, :])
                state = tl.dot(m, old, acc=state, input_precision=PRECISION)
            write_state(ends, state, place, column, D, V)
            # The next row reads what other threads of this program have just written.
            tl.debug_barrier()


@triton.jit(do_not_specialize=RUN_TIME_COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def attend(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    o: tl.tensor,
    q_index: tl.tensor,
    kv_index: tl.tensor,
    segments: tl.tensor,
    x_in: tl.tensor,
    local_in: tl.tensor,
    factors_in: tl.tensor,
    total_in: tl.tensor,
    initial: tl.tensor,
    ends: tl.tensor,
    final: tl.tensor,
    heads: tl.tensor,
    num_chunks: tl.tensor,
    q_sb: tl.tensor,
    q_st: tl.tensor,
    q_sh: tl.tensor,
    k_sb: tl.tensor,
    k_st: tl.tensor,
    k_sh: tl.tensor,
    v_sb: tl.tensor,
    v_st: tl.tensor,
    v_sh: tl.tensor,
    o_sb: tl.tensor,
    D: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The state pass with its outputs, a program for V columns of a segment and head; the state stays in registers.

    o is [B, T, n, D] without gaps; its stride o_sb stands for T n D.
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
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    e = tl.arange(0, V)
    kv_head = tl.load(kv_index + head)
    q += batch * q_sb + tl.load(q_index + head) * q_sh
    k += batch * k_sb + kv_head * k_sh
    v += batch * v_sb + kv_head * v_sh + column
    o_st = heads * D
    o += batch * o_sb + head * D + column

    state = tl.zeros([V, D], dtype=tl.float32)
    if initial is not None:  # noqa: SIM102 - decided when compiled
        if position == 0:
            state = tl.trans(read_state(initial, sequence * heads + head, column, D, V))
    if position > 0:
        state = tl.trans(read_state(ends, (row - 1) * heads + head, column, D, V))
    count = tl.cdiv(length, C)
    totals = total_in + head * num_chunks + first_chunk
    total = tl.load(totals, mask=count > 0, other=0.0)
    for number in tl.range(0, count):
        next_total = tl.load(totals + number + 1, mask=number + 1 < count, other=0.0)
        rows = (i < length - number * C)[:, None]
        place = (first_chunk + number) * heads + head
        at = token.to(tl.int64) + number * C
        keys = tl.load(k + at * k_st + i[:, None] * k_st + d[None, :], mask=rows, other=0.0)
        values = tl.load(v + at * v_st + i[:, None] * v_st + e[None, :], mask=rows, other=0.0)
        queries = tl.load(q + at * q_st + i[:, None] * q_st + d[None, :], mask=rows, other=0.0)
        x = tl.load(x_in + place * (C * C) + i[:, None] * C + i[None, :])
        local = tl.load(local_in + place * (C * C) + i[:, None] * C + i[None, :])
        read_key = tl.load(factors_in + place * (3 * C) + i)
        write_key = tl.load(factors_in + place * (3 * C) + C + i)
        read_query = tl.load(factors_in + place * (3 * C) + 2 * C + i)

        state_inner = state.to(keys.dtype)
        read = tl.dot(state_inner, tl.trans(keys), input_precision=PRECISION)
        rest = tl.trans(values).to(tl.float32) - read * read_key[None, :]
        written = tl.dot(rest.to(x.dtype), tl.trans(x), input_precision=PRECISION)
        kept = (written * write_key[None, :]).to(keys.dtype)
        state = tl.dot(kept, keys, acc=state * tl.exp2(total), input_precision=PRECISION)
        out = tl.dot(state_inner, tl.trans(queries), input_precision=PRECISION)
        out *= read_query[None, :]
        local = tl.trans(local)
        out = tl.dot(written.to(local.dtype), local, acc=out, input_precision=PRECISION)
        out_at = o + at * o_st + i[:, None] * o_st + e[None, :]
        tl.store(out_at, tl.trans(out.to(o.dtype.element_ty)), mask=rows)
        total = next_total
    if final is not None:  # noqa: SIM102 - decided when compiled
        if tl.load(segment + 6) != 0:
            write_state(final, tl.trans(state), sequence * heads + head, column, D, V)
