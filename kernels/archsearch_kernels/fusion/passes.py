"""Triton kernels of the fusion, both bound by memory; kernel.py launches them, heads.py makes their table.

Per head: y = a u with u = gamma * x / rms(x) + bias and a = factor * sigmoid(z). Backward, with s = sigmoid(z):
    du = a dy,  dz = du u (1 - s),  dgamma = sum over tokens of du * x / rms,  dbias = sum over tokens of du,
    dx = (gamma du - x mean(gamma du x) / rms^2) / rms.
A program takes one head and a few tokens; backward, several such tiles one after the other, which share one partial sum.

Dimension names: D head_dim, BT tokens in a tile.
"""

# Triton's decorator has no types, and a kernel is one function.
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0915

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(8)
"""Columns of the table in heads.py."""

RUN_TIME_COUNTS = ["num_heads", "num_rows", "num_tokens", "tokens"]
"""Integers for which Triton must not compile again when they become 1 or a multiple of 16."""
UNALIGNED = ["table"]
"""Pointers that are read a number at a time, for which Triton must not compile again when they are not aligned."""


@triton.jit
def inverse_rms(x: tl.tensor, is_normed: tl.tensor, eps: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """1 / rms of each row, a column; ones where nothing is normed."""
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    return tl.where(is_normed, inverse, 1.0)[:, None]


@triton.jit
def read_row(
    vectors: tl.tensor, row: tl.tensor, instead: tl.constexpr, D: tl.constexpr
) -> tl.tensor:
    """A row [1, D] of gamma or bias in fp32, `instead` where the head has none."""
    x = tl.load(vectors + row * D + tl.arange(0, D), mask=row >= 0, other=instead)
    return x.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=RUN_TIME_COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def fuse(
    full: tl.tensor,
    linear: tl.tensor,
    gamma: tl.tensor,
    bias: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    num_heads: tl.tensor,
    num_tokens: tl.tensor,
    tokens: tl.tensor,
    full_sb: tl.tensor,
    full_st: tl.tensor,
    full_sh: tl.tensor,
    linear_sb: tl.tensor,
    linear_st: tl.tensor,
    linear_sh: tl.tensor,
    gate_sb: tl.tensor,
    gate_st: tl.tensor,
    gate_sh: tl.tensor,
    eps: tl.tensor,
    factor: tl.tensor,
    D: tl.constexpr,
    BT: tl.constexpr,
) -> None:
    """One head for BT of the B T tokens; out is [B, T, H, D] without gaps."""
    head = tl.program_id(0) % num_heads
    entry = table + head * FIELDS
    in_full = tl.load(entry) != 0
    place = tl.load(entry + 1).to(tl.int64)
    is_normed = tl.load(entry + 2) != 0
    row = tl.load(entry + 3)
    gate_head = tl.load(entry + 4).to(tl.int64)
    number = tl.program_id(0) // num_heads * BT + tl.arange(0, BT)
    valid = (number < num_tokens)[:, None]
    b = (number // tokens).to(tl.int64)
    t = (number % tokens).to(tl.int64)
    d = tl.arange(0, D)[None, :]

    at = b * tl.where(in_full, full_sb, linear_sb) + t * tl.where(in_full, full_st, linear_st)
    at += place * tl.where(in_full, full_sh, linear_sh)
    x = tl.load(tl.where(in_full, full, linear) + at[:, None] + d, mask=valid, other=0.0)
    # The loads stand together, so that none waits for another's numbers.
    if gate is not None:
        at = b * gate_sb + t * gate_st + gate_head * gate_sh
        z = tl.load(gate + at[:, None] + d, mask=valid & (gate_head >= 0), other=0.0)
    x = x.to(tl.float32)
    x *= inverse_rms(x, is_normed, eps, D)
    if gamma is not None:
        x *= read_row(gamma, row, 1.0, D)
    if bias is not None:
        x += read_row(bias, row, 0.0, D)
    if gate is not None:
        x *= tl.where(gate_head >= 0, factor * tl.sigmoid(z.to(tl.float32)), 1.0)
    at = (number.to(tl.int64) * num_heads + head) * D
    tl.store(out + at[:, None] + d, x.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=RUN_TIME_COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def part_gradients(
    full: tl.tensor,
    linear: tl.tensor,
    gamma: tl.tensor,
    bias: tl.tensor,
    gate: tl.tensor,
    dy: tl.tensor,
    d_full: tl.tensor,
    d_linear: tl.tensor,
    d_gamma: tl.tensor,
    d_bias: tl.tensor,
    d_gate: tl.tensor,
    table: tl.tensor,
    num_heads: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    tokens: tl.tensor,
    full_sb: tl.tensor,
    full_st: tl.tensor,
    full_sh: tl.tensor,
    linear_sb: tl.tensor,
    linear_st: tl.tensor,
    linear_sh: tl.tensor,
    gate_sb: tl.tensor,
    gate_st: tl.tensor,
    gate_sh: tl.tensor,
    dy_sb: tl.tensor,
    dy_st: tl.tensor,
    d_full_sb: tl.tensor,
    d_full_st: tl.tensor,
    d_full_sh: tl.tensor,
    d_linear_sb: tl.tensor,
    d_linear_st: tl.tensor,
    d_linear_sh: tl.tensor,
    d_gate_sb: tl.tensor,
    d_gate_st: tl.tensor,
    d_gate_sh: tl.tensor,
    eps: tl.tensor,
    factor: tl.tensor,
    D: tl.constexpr,
    BT: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Gradients of one head for TILES times BT of the B T tokens; dy is [B, T, H D], rows of any strides.

    d_gamma and d_bias [groups of tiles, R, D] take this program's sums, in the head's row.
    """
    head = tl.program_id(0) % num_heads
    group = tl.program_id(0) // num_heads
    entry = table + head * FIELDS
    in_full = tl.load(entry) != 0
    place = tl.load(entry + 1).to(tl.int64)
    is_normed = tl.load(entry + 2) != 0
    row = tl.load(entry + 3)
    gate_head = tl.load(entry + 4).to(tl.int64)
    is_gated = gate_head >= 0
    d = tl.arange(0, D)[None, :]
    x_in = tl.where(in_full, full, linear) + place * tl.where(in_full, full_sh, linear_sh)
    x_sb = tl.where(in_full, full_sb, linear_sb)
    x_st = tl.where(in_full, full_st, linear_st)
    dx_out = tl.where(in_full, d_full, d_linear)
    dx_out += place * tl.where(in_full, d_full_sh, d_linear_sh)
    dx_sb = tl.where(in_full, d_full_sb, d_linear_sb)
    dx_st = tl.where(in_full, d_full_st, d_linear_st)
    if gamma is not None:
        gamma_sum = tl.zeros([BT, D], dtype=tl.float32)
    if bias is not None:
        bias_sum = tl.zeros([BT, D], dtype=tl.float32)

    for tile in tl.range(0, TILES):
        number = (group * TILES + tile) * BT + tl.arange(0, BT)
        valid = (number < num_tokens)[:, None]
        b = (number // tokens).to(tl.int64)
        t = (number % tokens).to(tl.int64)
        x = tl.load(x_in + (b * x_sb + t * x_st)[:, None] + d, mask=valid, other=0.0)
        at = b * dy_sb + t * dy_st + head * D
        du = tl.load(dy + at[:, None] + d, mask=valid, other=0.0)
        if gate is not None:
            at = b * gate_sb + t * gate_st + gate_head * gate_sh
            z = tl.load(gate + at[:, None] + d, mask=valid & is_gated, other=0.0)
        x = x.to(tl.float32)
        du = du.to(tl.float32)
        inverse = inverse_rms(x, is_normed, eps, D)
        x *= inverse
        if gate is not None:
            u = x
            if gamma is not None:
                u *= read_row(gamma, row, 1.0, D)
            if bias is not None:
                u += read_row(bias, row, 0.0, D)
            s = tl.sigmoid(z.to(tl.float32))
            du *= tl.where(is_gated, factor * s, 1.0)
            dz = (du * u * (1.0 - s)).to(d_gate.dtype.element_ty)
            at = b * d_gate_sb + t * d_gate_st + gate_head * d_gate_sh
            tl.store(d_gate + at[:, None] + d, dz, mask=valid & is_gated)
        if bias is not None:
            bias_sum += du
        if gamma is not None:
            gamma_sum += du * x
            du *= read_row(gamma, row, 1.0, D)
        along = tl.sum(du * x, axis=1)[:, None] / D
        dx = tl.where(is_normed, (du - x * along) * inverse, du)
        dx = dx.to(dx_out.dtype.element_ty)
        tl.store(dx_out + (b * dx_sb + t * dx_st)[:, None] + d, dx, mask=valid)

    at = (group.to(tl.int64) * num_rows + row) * D + tl.arange(0, D)
    if gamma is not None:
        tl.store(d_gamma + at, tl.sum(gamma_sum, axis=0), mask=row >= 0)
    if bias is not None:
        tl.store(d_bias + at, tl.sum(bias_sum, axis=0), mask=row >= 0)
