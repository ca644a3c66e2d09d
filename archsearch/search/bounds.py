"""Hard bounds that a head map meets or misses by itself, before anything is evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..config import ConstraintConfig, CostConfig
from ..headmap import HeadMap
from .space import analytic_costs, violation


def broken_bound(
    head_map: HeadMap, constraints: Sequence[ConstraintConfig], cost: CostConfig
) -> str | None:
    """The first bound on a cost that the map misses, in words; None where it meets all of them."""
    return broken_by(analytic_costs(head_map, cost), constraints) if constraints else None


def broken_by(metrics: Mapping[str, float], constraints: Sequence[ConstraintConfig]) -> str | None:
    """The first bound that these metrics miss, in words; bounds on other metrics are left out."""
    for bound in constraints:
        if bound.metric in metrics and violation(bound, metrics[bound.metric]) > 0:
            return f"{bound.metric} {metrics[bound.metric]:.6g}"
    return None
