"""How sequences are cut into segments: pure tables, no GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from archsearch_kernels.gdn.schedule import (
    CHUNK,
    FEWEST_CHUNKS,
    MOST_CHUNKS,
    Rows,
    choose_chunks_per_segment,
    cut_rows,
    schedule_of,
    segment_rows,
)


def test_rows_cover_every_token_once_in_order() -> None:
    spans = [(0, 0, 300), (0, 300, 300), (0, 300, 301), (1, 0, 129)]
    rows, first_rows, num_chunks = segment_rows(spans, 2)
    assert first_rows == [0, 3, 4, 5, 7]
    for (batch, start, end), (first, stop) in zip(spans, pairwise(first_rows), strict=True):
        mine = rows[first:stop]
        assert [row[1] for row in mine] == [batch] * len(mine)
        assert (mine[0][2], mine[-1][3]) == (start, end)
        assert all(one[3] == other[2] for one, other in pairwise(mine))
        assert [row[5] for row in mine] == list(range(len(mine)))
        assert [row[6] for row in mine] == [0] * (len(mine) - 1) + [1]
    ends = [row[4] + -(-(row[3] - row[2]) // CHUNK) for row in rows]
    assert ends == [row[4] for row in rows[1:]] + [num_chunks]


@pytest.mark.parametrize(
    ("chunks", "places", "expected"),
    [
        ([64] * 8, 9, 64),  # as many sequences as fit: not cut
        ([512], 9, 57),
        ([256, 256], 9, 64),
        ([512], 1, 512),
        ([512], 0, 512),
        ([512], 1000, FEWEST_CHUNKS),
        ([10**5], 1, MOST_CHUNKS),
        ([0, 0], 5, 1),
        ([], 5, 1),
    ],
)
def test_segments_fill_the_places(chunks: list[int], places: int, expected: int) -> None:
    length = choose_chunks_per_segment(chunks, places)
    assert length == expected


def test_parts_hold_every_row_and_chunk_once() -> None:
    first_chunks = [0, 2, 4, 4, 7, 8]
    assert list(cut_rows(first_chunks, 1)) == [Rows(0, 5, 0, 8)]
    assert list(cut_rows(first_chunks, 2)) == [Rows(0, 2, 0, 4), Rows(2, 3, 4, 4)]
    assert list(cut_rows(first_chunks, 9)) == [
        Rows(i, 1, first_chunks[i], n) for i, n in enumerate((2, 2, 0, 3, 1))
    ]


def test_parts_make_segments_shorter() -> None:
    whole = schedule_of(1, 4096, None, 2, None, 1, torch.device("cpu"))
    parts = schedule_of(1, 4096, None, 2, None, 2, torch.device("cpu"))
    assert (whole.num_segments, len(whole.parts), whole.most_chunks) == (2, 1, 64)
    assert (parts.num_segments, len(parts.parts), parts.most_chunks) == (4, 2, 32)
