"""The search space: four numbers that pick a head map, so that a study stays small whatever the model.

A head map is the top `fa_heads` heads of a ranking, and three numbers shape the ranking: how much it
follows causal scores or single-replacement KL, how it tilts over depth, and how far the heads of a KV
group move together, which is what saves cache under GQA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from ..config import ConstraintConfig, CostConfig, ScoreMethod
from ..cost import cache_bytes
from ..errors import ConfigError
from ..headmap import Head, HeadMap, ModelShape, Operator
from ..metrics import is_loss, is_share
from .seeds import ScoreTables, Table, ranks, top_heads

SPACE_SCORES: tuple[ScoreMethod, ScoreMethod] = ("causal", "replacement_kl")
"""The scores between which a point's mix lies."""

_TILTS = (0.0, -0.5, 0.5)
_STEPS = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Point:
    """A point of the space.

    fa_heads: heads that stay full attention. mix: 0 ranks by causal score, 1 by single-replacement KL.
    tilt: from -1 to 1, positive favours later layers. grouping: 1 ranks whole KV groups, 0 single heads.
    """

    fa_heads: int
    mix: float
    tilt: float = 0.0
    grouping: float = 0.0

    def params(self) -> dict[str, Any]:
        """The point as the parameters of an Optuna trial."""
        return asdict(self)


class RankedSpace:
    """Maps points to head maps for one model and its scores. Deterministic, no torch.

    scores holds the tables of SPACE_SCORES. Raises ValueError where one is missing or misshapen.
    """

    def __init__(
        self,
        shape: ModelShape,
        scores: Mapping[str, ScoreTables],
        constraints: Sequence[ConstraintConfig] = (),
        cost: CostConfig | None = None,
    ) -> None:
        self.shape = shape
        self.cost = cost or CostConfig()
        self.constraints = tuple(constraints)
        self._causal, self._damage = (self._ranks(scores, name) for name in SPACE_SCORES)

    def _ranks(self, scores: Mapping[str, ScoreTables], name: str) -> dict[Head, float]:
        table = scores[name].heads if name in scores else None
        if table is None or [len(row) for row in table] != [self.shape.num_heads] * len(table):
            raise ValueError(f"space: {name} scores are missing or not [layers][heads]")
        if len(table) != self.shape.num_layers:
            raise ValueError(f"space: {name} scores have {len(table)} layers")
        return ranks(table)

    def fa_range(self) -> tuple[int, int]:
        """The fewest and the most FA heads that the bounds on fa_share allow."""
        return full_head_range(self.constraints, self.shape)

    def decode(self, point: Point) -> HeadMap:
        """The head map of a point."""
        shape, total = self.shape, self.shape.total_heads
        table = [[0.0] * shape.num_heads for _ in range(shape.num_layers)]
        for layer, head in shape.heads():
            depth = layer / (shape.num_layers - 1) - 0.5 if shape.num_layers > 1 else 0.0
            rank = (1 - point.mix) * self._causal[layer, head]
            rank += point.mix * self._damage[layer, head]
            table[layer][head] = rank + point.tilt * depth * total
        if point.grouping:
            for group in shape.groups():
                mean = sum(table[layer][head] for layer, head in group) / len(group)
                for layer, head in group:
                    own = table[layer][head]
                    table[layer][head] = own + point.grouping * (mean - own)
        return HeadMap.from_full_heads(shape, self._top(table, point.fa_heads, point.grouping))

    def _top(self, table: Table, count: int, grouping: float) -> list[Head]:
        if grouping < 1:
            return top_heads(table, count)
        # Tied groups must not interleave, or each would keep its KV head for a part of its heads.
        groups = sorted(self.shape.groups(), key=lambda group: -table[group[0][0]][group[0][1]])
        return [head for group in groups for head in group][:count]

    def encode(self, head_map: HeadMap) -> Point:
        """The point of a coarse grid whose map shares most heads with head_map, exact where one does."""
        wanted = head_map.full_heads()
        grid = (
            Point(len(wanted), mix, tilt, grouping)
            for tilt in _TILTS
            for grouping in _STEPS
            for mix in _STEPS
        )
        best = max(grid, key=lambda point: len(wanted & self.decode(point).full_heads()))
        low, high = self.fa_range()
        return Point(min(max(best.fa_heads, low), high), best.mix, best.tilt, best.grouping)

    def affordable(self, head_map: HeadMap) -> bool:
        """Whether the map meets every bound that needs no evaluation."""
        costs = analytic_costs(head_map, self.cost)
        return all(
            violation(bound, costs[bound.metric]) <= 0
            for bound in self.constraints
            if bound.metric in costs
        )

    def nearest(self, point: Point, allowed: Callable[[HeadMap], bool], rng: Random) -> HeadMap:
        """The map nearest to point that allowed takes: by moving fa_heads, else by flipping heads.

        Raises ConfigError where none is found: the space is exhausted or the bounds leave nothing.
        """
        for candidate in self._neighbours(point, rng):
            if allowed(candidate):
                return candidate
        raise ConfigError(
            "search.trials: no head map is left that is new and meets search.constraints; "
            "lower trials or relax the constraints"
        )

    def _neighbours(self, point: Point, rng: Random) -> Iterator[HeadMap]:
        low, high = self.fa_range()
        for count in sorted(range(low, high + 1), key=lambda n: (abs(n - point.fa_heads), n)):
            yield self.decode(Point(count, point.mix, point.tilt, point.grouping))
        base, heads = self.decode(point), self.shape.heads()
        for flips in range(1, len(heads) + 1):
            for _ in range(8):
                yield flip(base, rng.sample(heads, flips))
        for _ in range(256):
            yield random_map(self.shape, rng, low, high)


def flip(head_map: HeadMap, heads: Sequence[Head]) -> HeadMap:
    """A copy in which the given heads change between FA and GDN."""
    full = head_map.full_heads()
    return HeadMap.from_full_heads(head_map.model, full ^ frozenset(heads))


def random_map(shape: ModelShape, rng: Random, low: int, high: int) -> HeadMap:
    """A random number of FA heads from low to high, at random places."""
    return HeadMap.from_full_heads(shape, rng.sample(shape.heads(), rng.randint(low, high)))


def analytic_costs(head_map: HeadMap, cost: CostConfig) -> dict[str, float]:
    """The metrics that follow from the map alone."""
    stored = cache_bytes(head_map, cost.context, element_bytes=cost.element_bytes)
    return {"fa_share": head_map.fa_share, "cache_bytes": float(stored)}


def full_head_range(constraints: Sequence[ConstraintConfig], shape: ModelShape) -> tuple[int, int]:
    """The fewest and the most FA heads that the bounds on fa_share allow; fewest above most where none."""
    total = shape.total_heads
    low, high = 0, total
    for bound in constraints:
        if bound.metric == "fa_share":
            # Within 0 and 1 first: an infinite bound is none.
            least, most = max(0.0, bound.min or 0), min(1.0, 1 if bound.max is None else bound.max)
            low = max(low, math.ceil(least * total - 1e-9))
            high = min(high, math.floor(most * total + 1e-9))
    return low, high


def violation(bound: ConstraintConfig, value: float) -> float:
    """How far value lies outside the bound; 0 or less is within it."""
    below = -math.inf if bound.min is None else bound.min - value
    above = -math.inf if bound.max is None else value - bound.max
    return max(below, above)


def check_constraints(
    constraints: Sequence[ConstraintConfig], shape: ModelShape, cost: CostConfig
) -> None:
    """Raises ConfigError where no head map can meet a bound; says the nearest value that one can."""
    for index, bound in enumerate(constraints):
        field = f"search.constraints[{index}]"
        if any(limit is not None and math.isnan(limit) for limit in (bound.min, bound.max)):
            raise ConfigError(f"{field}: min or max is not a number")
        if bound.min is not None and bound.max is not None and bound.min > bound.max:
            raise ConfigError(f"{field}: min {bound.min:g} is above max {bound.max:g}")
        low, high = _range_of(bound.metric, shape, cost)
        if bound.max is not None and bound.max < low:
            raise ConfigError(
                f"{field}.max: no head map has {bound.metric} {bound.max:.10g} or less; "
                f"the smallest feasible value is {low:.10g}"
            )
        if bound.min is not None and bound.min > high:
            raise ConfigError(
                f"{field}.min: no head map has {bound.metric} {bound.min:.10g} or more; "
                f"the largest feasible value is {high:.10g}"
            )
    fewest, most = full_head_range(constraints, shape)
    if fewest > most:
        raise ConfigError(
            f"search.constraints: no head map meets every bound on fa_share; with {shape.total_heads} "
            f"heads its values are multiples of {1 / shape.total_heads:.10g}"
        )
    for metric in dict.fromkeys(bound.metric for bound in constraints):
        low, high = _bounds_on(metric, constraints)
        if low > high:
            raise ConfigError(
                f"search.constraints: no head map meets every bound on {metric}: "
                f"min {low:.10g} is above max {high:.10g}"
            )
    _check_cache(constraints, shape, cost, range(fewest, most + 1))


def _bounds_on(metric: str, constraints: Sequence[ConstraintConfig]) -> tuple[float, float]:
    """The largest min and the smallest max on a metric."""
    bounds = [bound for bound in constraints if bound.metric == metric]
    low = max((b.min for b in bounds if b.min is not None), default=-math.inf)
    return low, min((b.max for b in bounds if b.max is not None), default=math.inf)


def _check_cache(
    constraints: Sequence[ConstraintConfig], shape: ModelShape, cost: CostConfig, counts: range
) -> None:
    """Raises ConfigError where no map of as many FA heads as counts allows meets the bounds on cache_bytes.

    cache_bytes is a constant a GDN head and another a KV group with an FA head; n FA heads can lie in any
    number of groups from n / group_size to n.
    """
    low, high = _bounds_on("cache_bytes", constraints)
    total, num_groups = shape.total_heads, shape.num_layers * shape.num_kv_heads
    none, one = (
        int(analytic_costs(HeadMap.from_full_heads(shape, heads), cost)["cache_bytes"])
        for heads in ([], [(0, 0)])
    )
    state = none // total
    group = one - (none - state)
    below, above = -math.inf, math.inf
    for count in counts:
        rest = state * (total - count)
        fewest, most = -(-count // shape.group_size), min(count, num_groups)
        # The least number of groups that reaches low, as far as count heads can.
        needed = max(fewest, math.ceil((low - rest) / group)) if low > -math.inf else fewest
        if needed <= most and rest + needed * group <= high:
            return
        if needed <= most:
            above = min(above, rest + needed * group)
        if needed > fewest:
            below = max(below, rest + min(needed - 1, most) * group)
    nearest = " and ".join(f"{value:.10g}" for value in (below, above) if math.isfinite(value))
    raise ConfigError(
        f"search.constraints: no head map with {counts[0]} to {counts[-1]} of {total} FA heads meets every "
        f"bound on cache_bytes; the nearest feasible: {nearest}"
    )


def _range_of(metric: str, shape: ModelShape, cost: CostConfig) -> tuple[float, float]:
    """The values that a metric can take."""
    if metric == "cache_bytes":
        return _cache_range(shape, cost)
    if is_share(metric):
        return 0, 1
    return (0, math.inf) if is_loss(metric) else (-math.inf, math.inf)


def _cache_range(shape: ModelShape, cost: CostConfig) -> tuple[float, float]:
    """The smallest and the largest cache_bytes of any map of FA and GDN heads.

    The cost is a sum over KV groups, and within a group it is extreme for no, one or all FA heads.
    """
    one_each = [group[0] for group in shape.groups()]
    maps = [
        HeadMap.uniform(shape, Operator.GDN),
        HeadMap.uniform(shape, Operator.FULL),
        HeadMap.from_full_heads(shape, one_each),
    ]
    values = [analytic_costs(head_map, cost)["cache_bytes"] for head_map in maps]
    return min(values), max(values)
