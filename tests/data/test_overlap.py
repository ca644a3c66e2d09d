"""Passages that two sets of rows share: found wherever they lie, and nothing else."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from archsearch.data import overlap
from archsearch.data.overlap import DISTINCT, WINDOW, shared_rows

LENGTH = 200


def random_rows(count: int, seed: int, *, length: int = LENGTH) -> NDArray[np.uint16]:
    return np.random.default_rng(seed).integers(50, size=(count, length), dtype=np.uint16)


def by_hand(text: NDArray[np.uint16], heldout: NDArray[np.uint16], window: int) -> set[int]:
    """Training rows with a window of some held-out row, by looking for every one of them."""

    def windows(row: NDArray[np.uint16]) -> set[tuple[int, ...]]:
        found = (tuple(row[i : i + window].tolist()) for i in range(len(row) - window + 1))
        return {part for part in found if len(set(part)) >= min(DISTINCT, window // 4)}

    known = set().union(*map(windows, heldout))
    return {number for number, row in enumerate(text) if windows(row) & known}


@pytest.mark.parametrize("start", [0, 17, LENGTH - WINDOW])
@pytest.mark.parametrize("other", [0, 50, LENGTH - WINDOW])
def test_a_passage_is_found_wherever_it_lies(start: int, other: int) -> None:
    text, heldout = random_rows(6, 0), random_rows(3, 1)
    assert shared_rows(text, heldout) == []
    text[4, start : start + WINDOW] = heldout[2, other : other + WINDOW]
    assert shared_rows(text, heldout) == [(4, 2)]
    text[4, start + WINDOW // 2] += 1
    assert shared_rows(text, heldout) == []


def test_agrees_with_a_search_by_hand() -> None:
    rng = np.random.default_rng(2)
    text, heldout = random_rows(40, 3, length=60), random_rows(5, 4, length=60)
    for _ in range(25):
        size = int(rng.integers(6, 14))
        row, at, other, place = (int(rng.integers(n)) for n in (40, 60 - size, 5, 60 - size))
        text[row, at : at + size] = heldout[other, place : place + size]
    found = shared_rows(text, heldout, window=10)
    assert {row for row, _ in found} == by_hand(text, heldout, 10)
    assert 5 < len(found) < 25
    assert [row for row, _ in found] == sorted(row for row, _ in found)


def test_loops_of_a_few_words_prove_nothing() -> None:
    loop = np.tile(np.arange(DISTINCT - 1, dtype=np.uint16), LENGTH)[:LENGTH]
    assert shared_rows(np.stack([loop, loop]), loop[None]) == []
    wider = np.tile(np.arange(DISTINCT, dtype=np.uint16), LENGTH)[:LENGTH]
    assert shared_rows(np.stack([loop, wider]), wider[None]) == [(1, 0)]


def test_short_rows_count_as_a_whole() -> None:
    text, heldout = random_rows(4, 5, length=20), random_rows(2, 6, length=20)
    text[3] = heldout[1]
    assert shared_rows(text, heldout) == [(3, 1)]
    text[3, 19] += 1
    assert shared_rows(text, heldout) == []


def test_nothing_shares_nothing() -> None:
    rows = random_rows(2, 7)
    assert shared_rows(rows[:0], rows) == shared_rows(rows, rows[:0]) == []


def test_equal_hashes_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same hash for everything, only passages that are equal in fact are left."""

    def same(rows: NDArray[np.uint16], _: object, window: int) -> NDArray[np.uint64]:
        return np.zeros((len(rows), rows.shape[1] - window + 1), dtype=np.uint64)

    monkeypatch.setattr(overlap, "_hashes", same)
    text, heldout = random_rows(3, 8, length=70), random_rows(2, 9, length=70)
    text[1] = heldout[1]
    assert shared_rows(text, heldout) == [(1, 1)]


def test_millions_of_tokens_take_seconds() -> None:
    rng = np.random.default_rng(10)
    text = rng.integers(49_152, size=(2048, 1024), dtype=np.uint16)
    heldout = rng.integers(49_152, size=(32, 1024), dtype=np.uint16)
    text[2000, 5:500] = heldout[31, 100:595]
    start = time.monotonic()
    assert shared_rows(text, heldout) == [(2000, 31)]
    # 0.5 s on two free cores; a search row by row would take minutes.
    assert time.monotonic() - start < 20
