"""Passages that training text and held-out text have in common.

Every window of WINDOW tokens of every row is hashed: with x_j a random number for token j and B an odd constant, a
window at i has the hash sum_j x_(i+j) B^j modulo 2^64, which prefix sums give for all windows at once (Rabin and Karp's
fingerprint). Windows with equal hashes are then compared token by token.

Legend: N training rows, M held-out rows, T tokens a row, W windows of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 64
"""Tokens of the shortest passage that counts; rows that are shorter count as a whole."""
DISTINCT = 16
"""Least different tokens in a passage that counts: models repeat themselves, and loops of a word prove nothing."""

_BASE = 0x9E3779B97F4A7C15
_ROWS_AT_ONCE = 1 << 20


def shared_rows(
    text_NT: NDArray[Any], heldout_MT: NDArray[Any], *, window: int = WINDOW
) -> list[tuple[int, int]]:
    """Pairs (training row, held-out row) that have a passage of window tokens in common, one for each training row.

    Takes about a second for 4 million training tokens.
    """
    window = min(window, text_NT.shape[1], heldout_MT.shape[1])
    if not len(text_NT) or not len(heldout_MT) or not window:
        return []
    size = 1 + max(int(text_NT.max()), int(heldout_MT.max()))
    table = np.random.default_rng(0).integers(1 << 64, size=size, dtype=np.uint64)
    heldout_MW = _hashes(heldout_MT, table, window)
    telling_MW = _telling(heldout_MT, window)
    rows, offsets = np.nonzero(telling_MW)
    order = np.argsort(heldout_MW[rows, offsets], kind="stable")
    rows, offsets = rows[order], offsets[order]
    hashes = heldout_MW[rows, offsets]
    found: list[tuple[int, int]] = []
    for first, part_NT in _parts(text_NT):
        part_NW = _hashes(part_NT, table, window)
        for row in np.flatnonzero(np.isin(part_NW, hashes).any(axis=1)):
            hits = np.flatnonzero(np.isin(part_NW[row], hashes))
            pair = _first_equal(
                part_NT[row], part_NW[row], hits, heldout_MT, (hashes, rows, offsets), window
            )
            if pair is not None:
                found.append((first + int(row), pair))
    return found


def _parts(text_NT: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Rows in pieces whose hashes take little memory, each after the number of its first."""
    step = max(1, _ROWS_AT_ONCE // text_NT.shape[1])
    for first in range(0, len(text_NT), step):
        yield first, np.asarray(text_NT[first : first + step])


def _hashes(rows_NT: NDArray[Any], table: NDArray[np.uint64], window: int) -> NDArray[np.uint64]:
    """Hashes [N, W] of the windows that start at each token; overflow is the modulus."""
    length = rows_NT.shape[1]
    powers_T = _powers(_BASE, length)
    sums_NT = np.cumsum(table[rows_NT] * powers_T, axis=1, dtype=np.uint64)
    ends_NW = sums_NT[:, window - 1 :].copy()
    ends_NW[:, 1:] -= sums_NT[:, : length - window]
    # Shifts each window's powers to start at B^0: B is odd, so that it has an inverse modulo 2^64.
    inverse_W = _powers(pow(_BASE, -1, 1 << 64), length - window + 1)
    hashes_NW: NDArray[np.uint64] = ends_NW * inverse_W
    return hashes_NW


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    found = np.full(count, base, dtype=np.uint64)
    found[0] = 1
    return np.cumprod(found, dtype=np.uint64)


def _telling(rows_MT: NDArray[Any], window: int) -> NDArray[np.bool_]:
    """Which windows [M, W] have enough different tokens to mean something."""
    least = min(DISTINCT, max(1, window // 4))
    telling = []
    for row in rows_MT:
        sorted_Ww = np.sort(np.lib.stride_tricks.sliding_window_view(row, window), axis=1)
        telling.append(1 + (sorted_Ww[:, 1:] != sorted_Ww[:, :-1]).sum(axis=1) >= least)
    return np.stack(telling)


def _first_equal(
    row_T: NDArray[Any],
    hashes_W: NDArray[np.uint64],
    hits: NDArray[np.int64],
    heldout_MT: NDArray[Any],
    index: tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]],
    window: int,
) -> int | None:
    """The held-out row that has the first shared window of this training row, by the tokens and not their hashes alone."""
    hashes, rows, offsets = index
    for hit in hits:
        low, high = (
            int(np.searchsorted(hashes, hashes_W[hit], side)) for side in ("left", "right")
        )
        for place in range(low, high):
            other = heldout_MT[rows[place], offsets[place] : offsets[place] + window]
            if np.array_equal(row_T[hit : hit + window], other):
                return int(rows[place])
    return None
