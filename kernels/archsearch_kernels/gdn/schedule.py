"""How the forward kernels cut sequences into segments that run at the same time.

One segment a sequence is the least work; more of them fill the device when there are few sequences and heads, at the price
of a second pass over every segment but the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""Tokens in a chunk."""

FEWEST_CHUNKS = 16
MOST_CHUNKS = 1024
"""Bounds of a segment: shorter ones do not pay for their second pass, longer ones do not fit one load of their decays."""


class Rows(NamedTuple):
    """Neighbouring rows of a table of segments, and their chunks."""

    first: int
    num_rows: int
    first_chunk: int
    num_chunks: int


@dataclass(frozen=True)
class Schedule:
    """Tables on the device, int32, and their sizes; parts: the rows that the backward pass goes through at a time.

    segments [rows, 8]: sequence, batch row, first token, end, first chunk, position in its sequence, 1 if its last, unused.
    first_rows [sequences + 1]: the rows at which sequences begin.
    """

    segments: Tensor
    first_rows: Tensor
    num_segments: int
    num_sequences: int
    num_chunks: int
    chunks_per_segment: int
    parts: tuple[Rows, ...]

    @property
    def most_chunks(self) -> int:
        """Chunks of the longest part."""
        return max(part.num_chunks for part in self.parts)

    @property
    def is_cut(self) -> bool:
        return self.num_segments > self.num_sequences


def choose_chunks_per_segment(chunks: Sequence[int], places: int) -> int:
    """The shortest segment with which `places` segments at once are enough; never more segments than needed.

    chunks: those of each sequence. places: how many segments of all heads run at the same time.
    """
    length = max(FEWEST_CHUNKS, -(-sum(chunks) // max(places, 1)))
    longest = max(chunks, default=0)
    while length < longest and sum(-(-count // length) for count in chunks) > places:
        length += 1
    return max(1, min(length, longest, MOST_CHUNKS))


def segment_rows(
    spans: Sequence[tuple[int, int, int]], chunks_per_segment: int
) -> tuple[list[list[int]], list[int], int]:
    """The table's rows, the rows at which sequences begin, and the number of chunks.

    spans: batch row, first token and end of each sequence. An empty sequence keeps a row, since its state passes through.
    """
    rows: list[list[int]] = []
    first_rows, chunk, tokens = [0], 0, chunks_per_segment * CHUNK
    for sequence, (batch, start, end) in enumerate(spans):
        begins = range(start, max(end, start + 1), tokens)
        for position, token in enumerate(begins):
            stop = min(token + tokens, end)
            is_last = int(position == len(begins) - 1)
            rows.append([sequence, batch, token, stop, chunk, position, is_last, 0])
            chunk += -(-(stop - token) // CHUNK)
        first_rows.append(len(rows))
    return rows, first_rows, chunk


def cut_rows(first_chunks: Sequence[int], num_parts: int) -> Iterator[Rows]:
    """Rows of a table in at most num_parts equal parts; first_chunks: that of each row, and the number of all."""
    num_rows = len(first_chunks) - 1
    bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
    for first, stop in pairwise(bounds):
        if stop > first:
            chunks = first_chunks[stop] - first_chunks[first]
            yield Rows(first, stop - first, first_chunks[first], chunks)


def schedule_of(
    batch: int,
    tokens: int,
    cu_seqlens: Tensor | None,
    places: int,
    chunks_per_segment: int | None,
    num_parts: int,
    device: torch.device,
) -> Schedule:
    """The schedule of B sequences of T tokens, or of the packed sequences of one row; kept for the next call.

    Reading new cu_seqlens waits for the device once, which their layers share; every time for those made in inference mode.
    """
    bounds = None
    if cu_seqlens is not None and cu_seqlens.is_inference():
        # Nobody counts the changes of such a tensor.
        bounds = tuple(cu_seqlens.tolist())
    elif cu_seqlens is not None:
        bounds = _bounds_of(cu_seqlens, cu_seqlens._version)
    return _schedule(batch, tokens, bounds, places, chunks_per_segment, num_parts, device)


@lru_cache(maxsize=8)
def _bounds_of(cu_seqlens: Tensor, version: int) -> tuple[int, ...]:
    return tuple(cu_seqlens.tolist())


@lru_cache(maxsize=64)
def _schedule(
    batch: int,
    tokens: int,
    bounds: tuple[int, ...] | None,
    places: int,
    chunks_per_segment: int | None,
    num_parts: int,
    device: torch.device,
) -> Schedule:
    if bounds is None:
        spans = [(row, 0, tokens) for row in range(batch)]
    else:
        ascending = all(start <= end for start, end in pairwise(bounds))
        if batch != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or not ascending:
            raise ValueError(
                f"cu_seqlens must ascend from 0 to T={tokens} with B=1; got {list(bounds)}, B={batch}"
            )
        spans = [(0, start, end) for start, end in pairwise(bounds)]
    if chunks_per_segment is None:
        chunks = [-(-(end - start) // CHUNK) for _, start, end in spans]
        chunks_per_segment = choose_chunks_per_segment(chunks, places * num_parts)
    rows, first_rows, num_chunks = segment_rows(spans, chunks_per_segment)
    return Schedule(
        segments=torch.tensor(rows, dtype=torch.int32, device=device),
        first_rows=torch.tensor(first_rows, dtype=torch.int32, device=device),
        num_segments=len(rows),
        num_sequences=len(spans),
        num_chunks=num_chunks,
        chunks_per_segment=chunks_per_segment,
        parts=tuple(cut_rows([row[4] for row in rows] + [num_chunks], num_parts)),
    )
