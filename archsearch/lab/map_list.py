"""A fixed list of head maps like those that a search visits, for measuring thousands of them. No torch.

| family | share | what |
|---|---|---|
| random | 0.2 | single heads, uniformly |
| groups | 0.1 | whole KV groups, uniformly |
| ranked | 0.4 | the top of a blend of scores: random weights, group by group or not, tilted across depth, noisy |
| mutated | 0.3 | an earlier ranked or mutated map with 1 to 8 heads swapped, added or taken away |

Sizes are spread evenly over the logarithm of the FA share, from 1/64 to 1. Map 0 is all FA, map 1 all GDN. Until they are
used up, a quarter of the ranked maps are those of the search's own selectors at SEED_SHARES (family "seed"). The family
of each map is drawn by itself, so that every prefix and every n-th map are fair samples. Map i depends on the
seed, the scores and the maps before it, not on how many are asked for. Without scores the families random, groups and mutated
share what ranked has, and mutated starts from any earlier map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ..config import CostConfig, SeedConfig, SeedMethod
from ..headmap import HeadMap, ModelShape
from ..search.seeds import SELECTORS, ScoreTables, Table, ranks, seed_maps

FAMILIES = ("uniform", "random", "groups", "seed", "ranked", "mutated")
"""Names of families; a list has their places here."""
WEIGHTS = {"random": 0.2, "groups": 0.1, "ranked": 0.4, "mutated": 0.3}
LEAST_SHARE = 1 / 64
SEED_SHARES = (0.5, 0.25, 0.125, 0.0625)
SEED_PART = 0.25
"""Share of ranked maps that are selectors', while there are any."""
MOST_MOVED = 8
TRIES = 2_000
"""Draws of one map before there is taken to be no further one."""

Full = frozenset[int]
"""Full-attention heads, as layer * heads of a layer + head."""


@dataclass(frozen=True)
class MapList:
    """N head maps: full_NLH says which heads are full attention, family_N is the place in FAMILIES."""

    full_NLH: NDArray[np.bool_]
    family_N: NDArray[np.uint8]


def draw_maps(
    shape: ModelShape,
    scores: Mapping[str, ScoreTables],
    count: int,
    seed: int,
    cost: CostConfig = CostConfig(),  # noqa: B008 - frozen
) -> MapList:
    """The first `count` maps of the list, all different.

    scores: tables by method, any of them or none. Raises ValueError where a table is misshapen, or where the model has
    too few maps.
    """
    drawer = _Drawer(shape, scores, seed, cost)
    total = shape.total_heads
    found: dict[Full, str] = {frozenset(range(total)): "uniform", frozenset(): "uniform"}
    for index in range(len(found), count):
        full, family = drawer.draw(Random(f"{seed}/map/{index}"), found)
        found[full] = family
        if family in ("seed", "ranked", "mutated") or not scores:
            drawer.bases.append(full)
    full_NH = np.zeros((len(found), total), dtype=np.bool_)
    for row, full in zip(full_NH, found, strict=True):
        row[sorted(full)] = True
    families = np.array([FAMILIES.index(family) for family in found.values()], dtype=np.uint8)
    full_NLH = full_NH.reshape(-1, shape.num_layers, shape.num_heads)
    return MapList(full_NLH[:count], families[:count])


def head_map_of(shape: ModelShape, full_LH: NDArray[np.bool_]) -> HeadMap:
    """The head map of one row of a list."""
    return HeadMap.from_full_heads(
        shape, [(int(layer), int(head)) for layer, head in np.argwhere(full_LH)]
    )


class _Drawer:
    """Draws one map after another; bases are what mutations start from."""

    def __init__(
        self, shape: ModelShape, scores: Mapping[str, ScoreTables], seed: int, cost: CostConfig
    ) -> None:
        self.shape = shape
        self.bases: list[Full] = []
        self._tables = [
            (
                _ranks(name, scores[name].heads, shape.num_layers, shape.num_heads),
                _ranks(f"{name} group", scores[name].groups, shape.num_layers, shape.num_kv_heads),
            )
            for name in sorted(scores)
        ]
        self._weights = {name: w for name, w in WEIGHTS.items() if scores or name != "ranked"}
        self._seeds = self._selectors(scores, seed, cost) if scores else []
        self._families: dict[str, Callable[[Random], Full]] = {
            "random": self._random,
            "groups": self._groups,
            "ranked": self._ranked,
            "mutated": self._mutated,
        }

    def draw(self, rng: Random, taken: Mapping[Full, str]) -> tuple[Full, str]:
        """A map that is not taken, and its family."""
        for _ in range(TRIES):
            (family,) = rng.choices(list(self._weights), list(self._weights.values()))
            if family == "mutated" and not self.bases:
                continue
            if family == "ranked" and self._seeds and rng.random() < SEED_PART:
                full, family = self._seeds.pop(), "seed"
            else:
                full = self._families[family](rng)
            if full not in taken:
                return full, family
        raise ValueError(
            f"--maps: after {len(taken)} head maps no new one came in {TRIES} draws; allowed: fewer"
        )

    def _selectors(
        self, scores: Mapping[str, ScoreTables], seed: int, cost: CostConfig
    ) -> list[Full]:
        """The maps of every selector whose scores are there, in a random order."""
        methods: list[SeedMethod] = [
            name
            for name in get_args(SeedMethod)
            if name in SELECTORS and set(SELECTORS[name].scores) <= set(scores)
        ]
        config = SeedConfig(methods=tuple(methods), fa_shares=SEED_SHARES)
        seeds = seed_maps(self.shape, scores, config, seed, cost)
        width = self.shape.num_heads
        maps = [
            frozenset(layer * width + head for layer, head in found.head_map.full_heads())
            for found in seeds
        ]
        Random(f"{seed}/selectors").shuffle(maps)
        return maps

    def _random(self, rng: Random) -> Full:
        total = self.shape.total_heads
        return frozenset(rng.sample(range(total), _size(rng, total)))

    def _groups(self, rng: Random) -> Full:
        size = self.shape.group_size
        total = self.shape.total_heads // size
        chosen = rng.sample(range(total), _size(rng, total))
        return frozenset(group * size + place for group in chosen for place in range(size))

    def _ranked(self, rng: Random) -> Full:
        """The best of a blend of scores."""
        chosen = rng.sample(self._tables, rng.randint(1, len(self._tables)))
        weights = [rng.expovariate(1) + 1e-9 for _ in chosen]
        grouping = rng.choices([0.0, 1.0, rng.random()], [4, 3, 3])[0]
        tilt = rng.gauss(0, 0.3) if rng.random() < 0.5 else 0.0
        noise = 0.0 if rng.random() < 0.25 else float(10 ** rng.uniform(-2, -0.3))
        heads = _blend([table for table, _ in chosen], weights)
        groups = _blend([table for _, table in chosen], weights)
        size, width = self.shape.group_size, self.shape.num_heads
        deepest = max(1, self.shape.num_layers - 1)
        noisy_groups = [value + noise * rng.gauss(0, 1) for value in groups]
        values = [
            (1 - grouping) * (value + noise * rng.gauss(0, 1))
            + grouping * noisy_groups[head // size]
            + tilt * (head // width / deepest - 0.5)
            for head, value in enumerate(heads)
        ]
        order = sorted(range(len(values)), key=lambda head: (-values[head], head))
        return frozenset(order[: _size(rng, len(values))])

    def _mutated(self, rng: Random) -> Full:
        """An earlier map with a few heads changed."""
        base = rng.choice(self.bases)
        move, count = rng.choice(("swap", "grow", "shrink")), rng.randint(1, MOST_MOVED)
        kept, others = sorted(base), sorted(set(range(self.shape.total_heads)) - base)
        if move == "swap":
            count = min(count, len(kept), len(others))
        gone = [] if move == "grow" else rng.sample(kept, min(count, len(kept)))
        come = [] if move == "shrink" else rng.sample(others, min(count, len(others)))
        return base.difference(gone).union(come)


def _size(rng: Random, total: int) -> int:
    """How many of total, by a share whose logarithm is uniform from LEAST_SHARE to 1."""
    share = math.exp(rng.random() * math.log(LEAST_SHARE))
    return max(1, math.floor(share * total + 0.5))


def _ranks(name: str, table: Table, num_layers: int, width: int) -> list[float]:
    """Ranks from 0 to 1, layer by layer."""
    if [len(row) for row in table] != [width] * num_layers:
        raise ValueError(f"{name} scores are not {num_layers} x {width}")
    found = ranks(table)
    top = max(1, num_layers * width - 1)
    return [found[layer, head] / top for layer in range(num_layers) for head in range(width)]


def _blend(tables: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [
        sum(weight * value for weight, value in zip(weights, values, strict=True)) / total
        for values in zip(*tables, strict=True)
    ]
