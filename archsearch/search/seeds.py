"""Baseline head maps that are evaluated before the sampler proposes anything. No torch.

Every selector turns a share of full-attention heads into the set of heads that keep full attention;
SELECTORS names them. A map that two methods agree on appears once, with both names.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config import SeedConfig
from ..headmap import Head, HeadMap, ModelShape, Operator

Table = Sequence[Sequence[float]]
"""A score a head as [layers][heads]; higher means that the head needs full attention more."""


@dataclass(frozen=True)
class Seed:
    """A baseline head map and the method that chose it; also names the methods that chose it too."""

    method: str
    head_map: HeadMap
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """What a selector gets: the geometry, the score tables, the share of FA heads, and a generator."""

    shape: ModelShape
    scores: Mapping[str, Table]
    fa_share: float
    rng: random.Random

    @property
    def num_full(self) -> int:
        """Heads to keep as full attention."""
        return num_full_heads(self.shape, self.fa_share)


Selector = Callable[[Request], frozenset[Head]]


def num_full_heads(shape: ModelShape, fa_share: float) -> int:
    """FA heads at a share: the nearest whole number (halves go up), at least one."""
    return max(1, _nearest(fa_share * shape.total_heads))


def seed_maps(
    shape: ModelShape, scores: Mapping[str, Table], config: SeedConfig, seed: int
) -> list[Seed]:
    """The distinct head maps of every method of config.methods at every share of config.fa_shares.

    scores holds the tables `causal` and `replacement_kl`, as far as the methods need them. all_full and
    all_gdn have no share and appear once. Raises ValueError on a missing, misshapen or non-finite table.
    """
    found: dict[HeadMap, Seed] = {}
    for method in config.methods:
        if method in UNIFORM:
            _insert(found, Seed(method, HeadMap.uniform(shape, UNIFORM[method])))
            continue
        for share in config.fa_shares:
            for number in range(config.random_maps if method == "random" else 1):
                # A string seed is hashed with SHA-512, so the draw is the same in every process.
                rng = random.Random(f"{seed}/{method}/{share}" + (f"/{number}" if number else ""))
                full = SELECTORS[method](Request(shape, scores, share, rng))
                _insert(found, Seed(method, HeadMap.from_full_heads(shape, full)))
    return list(found.values())


def top_heads(table: Table, count: int) -> list[Head]:
    """The `count` heads that score highest, best first.

    Ties go to the lower head index first and to the lower layer second: tied heads (a causal score is
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


def _causal(request: Request) -> frozenset[Head]:
    return frozenset(top_heads(_table(request, "causal"), request.num_full))


def _causal_per_layer(request: Request) -> frozenset[Head]:
    """The best head of each layer first, then the best of the rest ("constrained global", arXiv 2606.20097).

    With fewer heads to give than layers, the layers with the best first heads get one each.
    """
    table = _table(request, "causal")
    firsts = [
        [value if head == _argmax(row) else -math.inf for head, value in enumerate(row)]
        for row in table
    ]
    leaders = top_heads(firsts, min(request.num_full, request.shape.num_layers))
    chosen = set(leaders)
    others = (head for head in top_heads(table, request.shape.total_heads) if head not in chosen)
    missing = request.num_full - len(leaders)
    return frozenset(leaders + [head for head, _ in zip(others, range(missing), strict=False)])


def _replacement_kl(request: Request) -> frozenset[Head]:
    return frozenset(top_heads(_table(request, "replacement_kl"), request.num_full))


def _blend(request: Request) -> frozenset[Head]:
    """The highest mean of the ranks by causal score and by single-replacement KL."""
    causal = ranks(_table(request, "causal"))
    damage = ranks(_table(request, "replacement_kl"))
    shape = request.shape
    mean = [
        [(causal[layer, head] + damage[layer, head]) / 2 for head in range(shape.num_heads)]
        for layer in range(shape.num_layers)
    ]
    return frozenset(top_heads(mean, request.num_full))


def _even_layers(request: Request) -> frozenset[Head]:
    """Whole layers, evenly spaced; the nearest whole number of layers to the share, at least one."""
    shape = request.shape
    count = max(1, _nearest(request.fa_share * shape.num_layers))
    layers = [int((index + 0.5) * shape.num_layers / count) for index in range(count)]
    return frozenset((layer, head) for layer in layers for head in range(shape.num_heads))


def _random(request: Request) -> frozenset[Head]:
    return frozenset(request.rng.sample(request.shape.heads(), request.num_full))


SELECTORS: dict[str, Selector] = {
    "causal": _causal,
    "causal_per_layer": _causal_per_layer,
    "replacement_kl": _replacement_kl,
    "blend": _blend,
    "even_layers": _even_layers,
    "random": _random,
}

UNIFORM: dict[str, Operator] = {"all_full": Operator.FULL, "all_gdn": Operator.GDN}


def _insert(found: dict[HeadMap, Seed], seed: Seed) -> None:
    """Adds a seed, or its method's name to the seed that has the same map."""
    first = found.get(seed.head_map)
    if first is None:
        found[seed.head_map] = seed
    elif seed.method not in (first.method, *first.also):
        found[seed.head_map] = replace(first, also=(*first.also, seed.method))


def _table(request: Request, name: str) -> Table:
    """The score table of that name, checked against the geometry."""
    if name not in request.scores:
        raise ValueError(f"seeds: no {name} scores; there are {sorted(request.scores)}")
    table = request.scores[name]
    shape = request.shape
    if len(table) != shape.num_layers or any(len(row) != shape.num_heads for row in table):
        raise ValueError(f"seeds: {name} scores are not {shape.num_layers} x {shape.num_heads}")
    if not all(math.isfinite(value) for row in table for value in row):
        raise ValueError(f"seeds: {name} scores hold a value that is not finite")
    return table


def _items(table: Table) -> list[tuple[Head, float]]:
    return [
        ((layer, head), value) for layer, row in enumerate(table) for head, value in enumerate(row)
    ]


def _argmax(row: Sequence[float]) -> int:
    return max(range(len(row)), key=lambda head: (row[head], -head))


def _nearest(value: float) -> int:
    return math.floor(value + 0.5)
