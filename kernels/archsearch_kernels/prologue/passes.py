"""Triton kernels of the prologue, both bound by memory; kernel.py launches them, heads.py makes their tables.

A head's two halves are separate tiles, so that rotation pairs numbers that one thread holds. Forward, a program takes a few
tokens and the heads of one block of one part; backward, a few tokens and neighbouring source heads, one after the other.
With y = f R(w * x / rms(x)) for each reader of a source head, g = sum over readers of f R^T dy:
    dw = sum over tokens of g * x / rms,  dx = (w g - x mean(w g x) / rms^2) / rms.

Dimension names: D head_dim, BT tokens in a tile, BH heads in a program.
"""

# Triton's decorator has no types, and a kernel is one function.
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0915

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_FIELDS = tl.constexpr(8)
READER_FIELDS = tl.constexpr(4)
"""Columns of the tables in heads.py."""

RUN_TIME_COUNTS = [
    "num_blocks",
    "num_q_heads",
    "num_k_heads",
    "num_tokens",
    "tokens",
    "factor_sb",
    "factor_st",
]
"""Integers for which Triton must not compile again when they become 1 or a multiple of 16."""
UNALIGNED = ["factor", "blocks", "sources", "source_starts", "readers"]
"""Pointers that are read a number at a time, for which Triton must not compile again when they are not aligned."""


@triton.jit
def choose(number: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    """The argument with this number."""
    return tl.where(number == 0, a, tl.where(number == 1, b, tl.where(number == 2, c, d)))


@triton.jit
def read_halves(at: tl.tensor, mask: tl.tensor, D: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of the rows that begin at `at`, in their own type: they take half the registers until they are used."""
    half = tl.arange(0, D // 2)[None, :]
    first = tl.load(at[:, None] + half, mask=mask[:, None], other=0.0)
    second = tl.load(at[:, None] + (half + D // 2), mask=mask[:, None], other=0.0)
    return first, second


@triton.jit
def widen(first: tl.tensor, second: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def write_halves(
    at: tl.tensor, first: tl.tensor, second: tl.tensor, mask: tl.tensor, D: tl.constexpr
) -> None:
    half = tl.arange(0, D // 2)[None, :]
    kind = at.dtype.element_ty
    tl.store(at[:, None] + half, first.to(kind), mask=mask[:, None])
    tl.store(at[:, None] + (half + D // 2), second.to(kind), mask=mask[:, None])


@triton.jit
def read_tables(
    cos: tl.tensor, sin: tl.tensor, offset: tl.tensor, mask: tl.tensor, D: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """cos and sin of the rows; no rotation where the mask is off."""
    half = tl.arange(0, D // 2)[None, :]
    c = tl.load(cos + offset[:, None] + half, mask=mask[:, None], other=1.0)
    s = tl.load(sin + offset[:, None] + half, mask=mask[:, None], other=0.0)
    return c, s


@triton.jit
def read_weight(weight: tl.tensor, D: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    half = tl.arange(0, D // 2)
    first, second = tl.load(weight + half), tl.load(weight + half + D // 2)
    return first.to(tl.float32)[None, :], second.to(tl.float32)[None, :]


@triton.jit
def inverse_rms(first: tl.tensor, second: tl.tensor, eps: tl.tensor, D: tl.constexpr) -> tl.tensor:
    total = tl.sum(first * first + second * second, axis=1)
    return tl.rsqrt(total / D + eps)


@triton.jit(do_not_specialize=RUN_TIME_COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def write_parts(
    q: tl.tensor,
    k: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    factor: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    o0: tl.tensor,
    o1: tl.tensor,
    o2: tl.tensor,
    o3: tl.tensor,
    blocks: tl.tensor,
    sources: tl.tensor,
    num_blocks: tl.tensor,
    num_tokens: tl.tensor,
    tokens: tl.tensor,
    q_sb: tl.tensor,
    q_st: tl.tensor,
    q_sh: tl.tensor,
    k_sb: tl.tensor,
    k_st: tl.tensor,
    k_sh: tl.tensor,
    table_sb: tl.tensor,
    table_st: tl.tensor,
    factor_sb: tl.tensor,
    factor_st: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
) -> None:
    """A block of a part's heads for BT of the B T tokens; parts are [B, T, n, D] without gaps."""
    block = blocks + tl.program_id(0) % num_blocks * BLOCK_FIELDS
    part = tl.load(block)
    is_q = tl.load(block + 1) != 0
    rotary = tl.load(block + 2) != 0
    scaled = tl.load(block + 3) != 0
    heads = tl.load(block + 5)
    row = tl.arange(0, BT * BH)
    place = tl.load(block + 4) + row % BH
    number = tl.program_id(0) // num_blocks * BT + row // BH
    valid = (number < num_tokens) & (place < heads)
    b = (number // tokens).to(tl.int64)
    t = (number % tokens).to(tl.int64)
    head = tl.load(sources + tl.load(block + 6) + place, mask=place < heads, other=0)

    x = tl.where(is_q, q, k)
    offset = b * tl.where(is_q, q_sb, k_sb) + t * tl.where(is_q, q_st, k_st)
    first, second = read_halves(
        x + offset + head.to(tl.int64) * tl.where(is_q, q_sh, k_sh), valid, D
    )
    # The loads stand together, so that none waits for another's numbers.
    if cos is not None:
        c, s = read_tables(cos, sin, b * table_sb + t * table_st, valid & rotary, D)
    if factor is not None:
        f = tl.load(factor + b * factor_sb + t * factor_st, mask=valid & scaled, other=1.0)
    first, second = widen(first, second)
    if q_weight is not None:
        inverse = inverse_rms(first, second, eps, D)[:, None]
        w_first, w_second = read_weight(tl.where(is_q, q_weight, k_weight), D)
        first, second = first * inverse * w_first, second * inverse * w_second
    if cos is not None:
        c, s = widen(c, s)
        first, second = first * c - second * s, second * c + first * s
    if factor is not None:
        f = f.to(tl.float32)[:, None]
        first, second = first * f, second * f
    o = choose(part, o0, o1, o2, o3)
    write_halves(o + (number.to(tl.int64) * heads + place) * D, first, second, valid, D)


@triton.jit(do_not_specialize=RUN_TIME_COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def gather_gradients(
    q: tl.tensor,
    k: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    factor: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    dy0: tl.tensor,
    dy1: tl.tensor,
    dy2: tl.tensor,
    dy3: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
    dw: tl.tensor,
    source_starts: tl.tensor,
    readers: tl.tensor,
    num_q_heads: tl.tensor,
    num_k_heads: tl.tensor,
    num_tokens: tl.tensor,
    tokens: tl.tensor,
    q_sb: tl.tensor,
    q_st: tl.tensor,
    q_sh: tl.tensor,
    k_sb: tl.tensor,
    k_st: tl.tensor,
    k_sh: tl.tensor,
    dy0_sb: tl.tensor,
    dy0_st: tl.tensor,
    dy0_sh: tl.tensor,
    dy1_sb: tl.tensor,
    dy1_st: tl.tensor,
    dy1_sh: tl.tensor,
    dy2_sb: tl.tensor,
    dy2_st: tl.tensor,
    dy2_sh: tl.tensor,
    dy3_sb: tl.tensor,
    dy3_st: tl.tensor,
    dy3_sh: tl.tensor,
    table_sb: tl.tensor,
    table_st: tl.tensor,
    factor_sb: tl.tensor,
    factor_st: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
) -> None:
    """Gradients to BH source heads of BT of the B T tokens: dq [B, T, H, D] and dk [B, T, G, D] without gaps.

    dw [programs, D] takes this program's sum of the weight's gradient.
    """
    q_groups = tl.cdiv(num_q_heads, BH)
    groups = q_groups + tl.cdiv(num_k_heads, BH)
    group = tl.program_id(0) % groups
    is_q = group < q_groups
    heads = tl.where(is_q, num_q_heads, num_k_heads)
    start = tl.where(is_q, group, group - q_groups) * BH
    starts = source_starts + tl.where(is_q, 0, num_q_heads)
    number = tl.program_id(0) // groups * BT + tl.arange(0, BT)
    valid = number < num_tokens
    b = (number // tokens).to(tl.int64)
    t = (number % tokens).to(tl.int64)

    x = tl.where(is_q, q, k)
    x += b * tl.where(is_q, q_sb, k_sb) + t * tl.where(is_q, q_st, k_st)
    x_sh = tl.where(is_q, q_sh, k_sh).to(tl.int64)
    dx = tl.where(is_q, dq, dk) + number.to(tl.int64) * heads * D
    if cos is not None:
        c, s = read_tables(cos, sin, b * table_sb + t * table_st, valid, D)
    if factor is not None:
        f = tl.load(factor + b * factor_sb + t * factor_st, mask=valid, other=1.0).to(tl.float32)
    if q_weight is not None:
        weight = tl.where(is_q, q_weight, k_weight)
        dw_first = tl.zeros([BT, D // 2], dtype=tl.float32)
        dw_second = tl.zeros([BT, D // 2], dtype=tl.float32)
    for head in tl.range(start, tl.minimum(start + BH, heads)):
        if q_weight is not None:
            x_first, x_second = read_halves(x + head * x_sh, valid, D)
        first = tl.zeros([BT, D // 2], dtype=tl.float32)
        second = tl.zeros([BT, D // 2], dtype=tl.float32)
        for reader in tl.range(tl.load(starts + head), tl.load(starts + head + 1)):
            row = readers + reader * READER_FIELDS
            part = tl.load(row)
            dy = choose(part, dy0, dy1, dy2, dy3)
            dy += b * choose(part, dy0_sb, dy1_sb, dy2_sb, dy3_sb)
            dy += t * choose(part, dy0_st, dy1_st, dy2_st, dy3_st)
            dy += tl.load(row + 1).to(tl.int64) * choose(part, dy0_sh, dy1_sh, dy2_sh, dy3_sh)
            y_first, y_second = read_halves(dy, valid, D)
            y_first, y_second = widen(y_first, y_second)
            if factor is not None:
                here = tl.where(tl.load(row + 3) != 0, f, 1.0)[:, None]
                y_first, y_second = y_first * here, y_second * here
            if cos is not None:
                rotary = tl.load(row + 2) != 0
                turn, side = widen(c, s)
                turn, side = tl.where(rotary, turn, 1.0), tl.where(rotary, side, 0.0)
                y_first, y_second = (
                    y_first * turn + y_second * side,
                    y_second * turn - y_first * side,
                )
            first += y_first
            second += y_second
        if q_weight is not None:
            x_first, x_second = widen(x_first, x_second)
            inverse = inverse_rms(x_first, x_second, eps, D)[:, None]
            x_first, x_second = x_first * inverse, x_second * inverse
            dw_first += first * x_first
            dw_second += second * x_second
            w_first, w_second = read_weight(weight, D)
            first, second = first * w_first, second * w_second
            along = tl.sum(first * x_first + second * x_second, axis=1)[:, None] / D
            first, second = (
                (first - x_first * along) * inverse,
                (second - x_second * along) * inverse,
            )
        write_halves(dx + head * D, first, second, valid, D)
    if q_weight is not None:
        half = tl.arange(0, D // 2)
        out = dw + tl.program_id(0).to(tl.int64) * D
        tl.store(out + half, tl.sum(dw_first, axis=0))
        tl.store(out + half + D // 2, tl.sum(dw_second, axis=0))
