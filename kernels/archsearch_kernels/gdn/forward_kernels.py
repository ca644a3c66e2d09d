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

from archsearch_kernels.gdn.transform_kernels import FIELDS, RUN_TIME_COUNTS, UNALIGNED

FORGOTTEN = tl.constexpr(35.0)
"""Powers of two: 2^-35 is 3e-11, far below fp32's rounding of the state that it is left out of."""


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
    kv_head = tl.load(kv_index + head).to(tl.int64)
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
    states: tl.tensor,
    maps: tl.tensor,
    reach: tl.tensor,
    heads: tl.tensor,
    D: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    FEW: tl.constexpr,
    BACK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Turns N into the state after each segment, in place: states[j] += maps[j] states[j - 1], V columns a program.

    BACK: gradients of segments' first states, states[j] += maps[j]^T states[j + 1], from the last on.
    """
    blocks: tl.constexpr = D // V
    column = tl.program_id(0) % blocks * V
    head = tl.program_id(0) // blocks % heads
    sequence = tl.program_id(0) // blocks // heads
    d = tl.arange(0, D)
    p = tl.arange(0, K)
    start = tl.load(first_rows + sequence)
    stop = tl.load(first_rows + sequence + 1)
    # Among a few segments it is soon seen that none hands anything on.
    few = start + 1 + tl.arange(0, FEW)
    far = tl.load(reach + few * heads + head, mask=few < stop - 1, other=float("-inf"))
    linked = (stop - 1 - start > FEW) | (tl.max(far, axis=0) > -FORGOTTEN)
    if not linked:
        return
    if K == D:
        first = (stop - 1 if BACK else start) * heads + head
        state = tl.trans(read_state(states, first, column, D, V))
        for step in tl.range(start + 1, stop - 1):
            row = start + stop - 1 - step if BACK else step
            place = row * heads + head
            known = tl.where(tl.load(reach + place) > -FORGOTTEN, D, 0)
            map_at = maps + place.to(tl.int64) * (D * D) + (d[:, None] * D + p[None, :])
            m = tl.load(map_at, mask=(d < known)[:, None], other=0.0)
            own = tl.trans(read_state(states, place, column, D, V))
            m = m if BACK else tl.trans(m)
            state = tl.dot(state, m, acc=own, input_precision=PRECISION)
            write_state(states, tl.trans(state), place, column, D, V)
    else:
        # A wide map comes in parts of K columns, and the neighbour's state from memory.
        for step in tl.range(start + 1, stop - 1):
            row = start + stop - 1 - step if BACK else step
            place = row * heads + head
            if tl.load(reach + place) > -FORGOTTEN:
                state = read_state(states, place, column, D, V)
                rows = maps + place.to(tl.int64) * (D * D)
                neighbour = place + heads if BACK else place - heads
                other = (
                    states + neighbour.to(tl.int64) * (D * D) + column + tl.arange(0, V)[None, :]
                )
                for part in tl.range(0, D, K):
                    if BACK:
                        m = tl.load(rows + (part + p)[None, :] * D + d[:, None])
                    else:
                        m = tl.load(rows + d[:, None] * D + (part + p)[None, :])
                    there = tl.load(other + (part + p)[:, None] * D)
                    state = tl.dot(m, there, acc=state, input_precision=PRECISION)
                write_state(states, state, place, column, D, V)
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
    kv_head = tl.load(kv_index + head).to(tl.int64)
    q += batch * q_sb + tl.load(q_index + head).to(tl.int64) * q_sh
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
