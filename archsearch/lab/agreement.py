"""Agreement of two scores of the same heads: Spearman's rank correlation, and what their best heads share.

Legend: P pairs of a sub-probe, L layers, H query heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
from torch import Tensor

from ..scoring.composite import Evidence, composite, summarise
from ..scoring.head_scores import rows_of
from ..search.seeds import Table, ranks, top_heads

WHOLE, AMONG_TOP, SHARED = "composite", "composite, top 20%", "shared top 5%"

Bank = dict[str, dict[str, Tensor]]
"""Receiver effects [P, L, H] by capability and sub-probe."""
Agreement = dict[str, float]
"""What agreement() finds, by name."""


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's correlation; tied values share the mean of their ranks. 0 where all of one are tied.

    Raises ValueError for sequences of different lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values cannot be ranked together")
    x, y = (
        np.array([rank for _, rank in sorted(ranks([values]).items())])
        for values in (first, second)
    )
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else 0.0


def flat(table: Table) -> list[float]:
    """The scores of a table, layer by layer."""
    return [value for row in table for value in row]


def overlap(first: Table, second: Table, count: int) -> float:
    """Share of the `count` best heads of one table that are among those of the other."""
    return len(set(top_heads(first, count)) & set(top_heads(second, count))) / count


def tables_of(bank: Bank, threshold: float) -> dict[str, Table]:
    """The composite of receiver effects, and each capability's score alone."""
    parts = {
        name: summarise([Evidence(effects) for effects in probes.values()], threshold)
        for name, probes in bank.items()
    }
    tables: dict[str, Table] = {name: rows_of(part.score) for name, part in parts.items()}
    tables[WHOLE] = rows_of(composite(list(parts.values()))[0])
    return tables


def halves(bank: Bank, size: int, rng: Random) -> tuple[Bank, Bank]:
    """size random pairs of every sub-probe, and size others; half of them where a sub-probe has fewer than both.

    Sub-probes with a single pair are left out.
    """
    first: Bank = {name: {} for name in bank}
    second: Bank = {name: {} for name in bank}
    for name, probes in bank.items():
        for kind, effects_PLH in probes.items():
            count = min(size, len(effects_PLH) // 2)
            drawn = rng.sample(range(len(effects_PLH)), 2 * count)
            if count:
                first[name][kind] = effects_PLH[drawn[:count]]
                second[name][kind] = effects_PLH[drawn[count:]]
    return first, second


def agreement(
    first: Mapping[str, Table], second: Mapping[str, Table], top: set[int], best: int
) -> Agreement:
    """Spearman's correlation of each table and of the composite among the heads top, and the share of the best."""
    pairs = {name: (flat(first[name]), flat(second[name])) for name in first}
    found = {name: rank_correlation(a, b) for name, (a, b) in pairs.items()}
    a, b = pairs[WHOLE]
    found[AMONG_TOP] = rank_correlation([a[i] for i in top], [b[i] for i in top])
    found[SHARED] = overlap(first[WHOLE], second[WHOLE], best)
    return found
