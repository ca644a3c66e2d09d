"""Which heads the prologue writes: the parts that a layer's operators read, as tables on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import index
from typing import Literal

import torch
from torch import Tensor

MOST_PARTS = 4
"""Queries and keys of two operators: the kernels take so many output pointers."""

HEADS_A_PROGRAM = 4


@dataclass(frozen=True)
class Part:
    """One output [B, T, len(heads), D]: heads of q or k in the order given, each as often as it is named.

    rotary: rotated by its token's position. log_scale: multiplied by its token's factor. Raises ValueError for heads that are
    no sequence of whole numbers.
    """

    source: Literal["q", "k"]
    heads: Sequence[int]
    rotary: bool = False
    log_scale: bool = False

    def __post_init__(self) -> None:
        # Plans are found again by their parts, which a list could not be.
        object.__setattr__(self, "heads", _whole_numbers(self.heads))


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """Tables, int32 on one device; heads of k are numbered after those of q in source_starts.

    blocks [n, 8]: part, is q, rotary, log_scale, first place, heads of the part, first entry in sources, unused; a block is
    HEADS_A_PROGRAM heads of a part or what is left of it. sources: the source head of each output head, part after part.
    readers [m, 4]: part, place, rotary, log_scale; source head h is read by rows source_starts[h] to source_starts[h + 1].
    """

    parts: tuple[Part, ...]
    num_q_heads: int
    num_k_heads: int
    blocks: Tensor
    sources: Tensor
    source_starts: Tensor
    readers: Tensor
    needs_tables: bool
    needs_factor: bool
    """Whether a part is rotated, and whether one is log-scaled."""

    @property
    def num_groups(self) -> tuple[int, int]:
        """Programs of the backward pass for one tile of tokens, over q and over k."""
        q, k = (-(-count // HEADS_A_PROGRAM) for count in (self.num_q_heads, self.num_k_heads))
        return q, k


def _whole_numbers(heads: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(index(head) for head in heads)
    except TypeError as error:
        raise ValueError(f"heads {heads!r}: a sequence of whole numbers is possible") from error


def plan_heads(
    parts: Sequence[Part], num_q_heads: int, num_k_heads: int, device: torch.device | str
) -> HeadPlan:
    """The tables of these parts, built once for equal arguments. Raises ValueError for heads that are not there."""
    if not all(isinstance(part, Part) for part in parts):
        raise ValueError(f"parts {parts}: a sequence of Part is possible")
    return _plan_heads(tuple(parts), num_q_heads, num_k_heads, torch.device(device))


@lru_cache(maxsize=4096)
def _plan_heads(
    parts: tuple[Part, ...], num_q_heads: int, num_k_heads: int, device: torch.device
) -> HeadPlan:
    if not 0 < len(parts) <= MOST_PARTS:
        raise ValueError(f"{len(parts)} parts; 1 to {MOST_PARTS} are possible")
    for part in parts:
        if part.source not in ("q", "k"):
            raise ValueError(f"source {part.source!r}; allowed: q, k")
        count = num_q_heads if part.source == "q" else num_k_heads
        wrong = [head for head in part.heads if not 0 <= head < count]
        if wrong:
            raise ValueError(f"heads {wrong} of {part.source}, which has {count}")
    blocks, entry = [], 0
    readers: list[list[list[int]]] = [[] for _ in range(num_q_heads + num_k_heads)]
    for number, part in enumerate(parts):
        is_q, flags = part.source == "q", [int(part.rotary), int(part.log_scale)]
        for first in range(0, len(part.heads), HEADS_A_PROGRAM):
            blocks.append([number, int(is_q), *flags, first, len(part.heads), entry, 0])
        for place, head in enumerate(part.heads):
            readers[head if is_q else num_q_heads + head].append([number, place, *flags])
        entry += len(part.heads)

    def table(rows: Sequence[object], *columns: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, *columns)

    # Made under inference_mode, the tables could not serve a later backward pass.
    with torch.inference_mode(False):
        return HeadPlan(
            parts=parts,
            num_q_heads=num_q_heads,
            num_k_heads=num_k_heads,
            blocks=table(blocks, 8),
            sources=table([head for part in parts for head in part.heads]),
            source_starts=table([0, *accumulate(len(rows) for rows in readers)]),
            readers=table([row for rows in readers for row in rows], 4),
            needs_tables=any(part.rotary for part in parts),
            needs_factor=any(part.log_scale for part in parts),
        )
