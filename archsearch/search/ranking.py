"""Orders of heads, or of KV groups, by a table of scores. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..headmap import Head

Table = Sequence[Sequence[float]]
"""A score a head as [layers][heads]; higher means that the head needs full attention more."""


def top_heads(table: Table, count: int) -> list[Head]:
    """The `count` heads (or KV groups) that score highest, best first, as (layer, index).

    Ties go to the lower index first and to the lower layer second: tied heads (a causal score is
    exactly zero for many) so spread over the layers instead of filling the first ones.
    """
    ranked = sorted((-value, head, layer) for (layer, head), value in _items(table))
    return [(layer, head) for _, head, layer in ranked[:count]]


def ranks(table: Table) -> dict[Head, float]:
    """Rank of each head, 0 the lowest score; tied heads share the mean of their ranks."""
    ordered = sorted(_items(table), key=lambda item: item[1])
    result: dict[Head, float] = {}
    start = 0
    while start < len(ordered):
        stop = start
        while stop < len(ordered) and ordered[stop][1] == ordered[start][1]:
            stop += 1
        for head, _ in ordered[start:stop]:
            result[head] = (start + stop - 1) / 2
        start = stop
    return result


def best_of_each_layer(table: Table, count: int) -> list[Head]:
    """The best entry of each layer, then the best of the rest.

    With fewer to give than layers, the layers with the best first entries get one each.
    """
    firsts = [
        [value if index == _argmax(row) else -math.inf for index, value in enumerate(row)]
        for row in table
    ]
    leaders = top_heads(firsts, min(count, len(table)))
    chosen, total = set(leaders), sum(map(len, table))
    others = [entry for entry in top_heads(table, total) if entry not in chosen]
    return leaders + others[: count - len(leaders)]


def mean_ranks(tables: Sequence[Table]) -> Table:
    """The mean of the ranks that the tables give to each head."""
    found = [ranks(table) for table in tables]
    return [
        [sum(rank[layer, index] for rank in found) / len(found) for index in range(len(row))]
        for layer, row in enumerate(tables[0])
    ]


def _items(table: Table) -> list[tuple[Head, float]]:
    return [
        ((layer, head), value) for layer, row in enumerate(table) for head, value in enumerate(row)
    ]


def _argmax(row: Sequence[float]) -> int:
    return max(range(len(row)), key=lambda head: (row[head], -head))
