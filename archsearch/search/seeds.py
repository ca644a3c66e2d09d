"""Baseline head maps that are evaluated before the sampler proposes anything. No torch.

Every selector turns a share of full-attention heads into the set of heads that keep full attention;
SELECTORS names them and the scores that each reads. A map that two methods agree on appears once, with both names.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config import ScoreMethod, SeedConfig, SeedMethod
from ..errors import ConfigError
from ..headmap import Head, HeadMap, ModelShape, Operator
from ..rundir import RunDir, score_file

Table = Sequence[Sequence[float]]
"""A score a head as [layers][heads]; higher means that the head needs full attention more."""


@dataclass(frozen=True)
class ScoreTables:
    """What one scoring method says: a score a head, [layers][heads], and one a KV group, [layers][KV heads]."""

    heads: Table
    groups: Table


@dataclass(frozen=True)
class Seed:
    """A baseline head map and the method that chose it; also names the methods that chose it too."""

    method: str
    head_map: HeadMap
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """What a selector gets: the geometry, the scores that it reads in its row's order, the share of FA heads, and
    a generator."""

    shape: ModelShape
    scores: tuple[ScoreTables, ...]
    fa_share: float
    rng: random.Random

    @property
    def num_full(self) -> int:
        """Heads to keep as full attention."""
        return num_full_heads(self.shape, self.fa_share)


@dataclass(frozen=True)
class Selector:
    """A way to choose heads, and the scores that it reads."""

    choose: Callable[[Request], frozenset[Head]]
    scores: tuple[ScoreMethod, ...] = ()


def num_full_heads(shape: ModelShape, fa_share: float) -> int:
    """FA heads at a share: the nearest whole number (halves go up), at least one."""
    return _share_of(shape.total_heads, fa_share)


def seed_maps(
    shape: ModelShape, scores: Mapping[str, ScoreTables], config: SeedConfig, seed: int
) -> list[Seed]:
    """The distinct head maps of every method of config.methods at every share of config.fa_shares.

    scores holds the tables by scoring method, as far as the methods need them (needed_by_seeds). all_full and
    all_gdn have no share and appear once. Raises ValueError on a missing, misshapen or non-finite table.
    """
    found: dict[HeadMap, Seed] = {}
    for method in config.methods:
        if method in UNIFORM:
            _insert(found, Seed(method, HeadMap.uniform(shape, UNIFORM[method])))
            continue
        selector = SELECTORS[method]
        tables = tuple(_tables(shape, scores, name) for name in selector.scores)
        for share in config.fa_shares:
            for number in range(config.random_maps if method == "random" else 1):
                # A string seed is hashed with SHA-512, so the draw is the same in every process.
                rng = random.Random(f"{seed}/{method}/{share}" + (f"/{number}" if number else ""))
                full = selector.choose(Request(shape, tables, share, rng))
                _insert(found, Seed(method, HeadMap.from_full_heads(shape, full)))
    return list(found.values())


def needed_by_seeds(config: SeedConfig) -> set[ScoreMethod]:
    """The scoring methods whose tables config.methods need."""
    return {
        name
        for method in config.methods
        if method in SELECTORS
        for name in SELECTORS[method].scores
    }


def read_scores(run_dir: RunDir, methods: Iterable[ScoreMethod]) -> dict[str, ScoreTables]:
    """The tables of a run's scores files, by method. Raises ConfigError where a file is missing or damaged."""
    found: dict[str, ScoreTables] = {}
    for method in methods:
        data = run_dir.read_json(score_file(method))
        try:
            found[method] = ScoreTables(data["composite"], data["groups"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{run_dir / score_file(method)}: damaged ({error!r})") from error
    return found


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


def _best_heads(request: Request) -> frozenset[Head]:
    (scores,) = request.scores
    return frozenset(top_heads(scores.heads, request.num_full))


def _best_groups(request: Request) -> frozenset[Head]:
    (scores,) = request.scores
    return _whole_groups(request, scores.groups)


def _best_layers(request: Request) -> frozenset[Head]:
    """Whole layers by the mean score of their heads."""
    (scores,) = request.scores
    means = [[math.fsum(row) / len(row)] for row in scores.heads]
    count = _share_of(request.shape.num_layers, request.fa_share)
    return _whole_layers(request.shape, [layer for layer, _ in top_heads(means, count)])


def _constrained(request: Request) -> frozenset[Head]:
    """The best head of each layer first, then the best of the rest ("constrained global", arXiv 2606.20097).

    With fewer heads to give than layers, the layers with the best first heads get one each.
    """
    (scores,) = request.scores
    table = scores.heads
    firsts = [
        [value if head == _argmax(row) else -math.inf for head, value in enumerate(row)]
        for row in table
    ]
    leaders = top_heads(firsts, min(request.num_full, request.shape.num_layers))
    chosen = set(leaders)
    others = (head for head in top_heads(table, request.shape.total_heads) if head not in chosen)
    missing = request.num_full - len(leaders)
    return frozenset(leaders + [head for head, _ in zip(others, range(missing), strict=False)])


def _blend(request: Request) -> frozenset[Head]:
    """The heads of the highest mean rank over the scores."""
    mean = _mean_ranks([scores.heads for scores in request.scores])
    return frozenset(top_heads(mean, request.num_full))


def _blend_groups(request: Request) -> frozenset[Head]:
    """The KV groups of the highest mean rank over the scores."""
    return _whole_groups(request, _mean_ranks([scores.groups for scores in request.scores]))


def _even_layers(request: Request) -> frozenset[Head]:
    """Whole layers, evenly spaced."""
    num_layers = request.shape.num_layers
    count = _share_of(num_layers, request.fa_share)
    layers = [int((index + 0.5) * num_layers / count) for index in range(count)]
    return _whole_layers(request.shape, layers)


def _random(request: Request) -> frozenset[Head]:
    return frozenset(request.rng.sample(request.shape.heads(), request.num_full))


SELECTORS: dict[SeedMethod, Selector] = {
    "causal": Selector(_best_heads, ("causal",)),
    "causal_per_layer": Selector(_constrained, ("causal",)),
    "causal_groups": Selector(_best_groups, ("causal",)),
    "attribution": Selector(_best_heads, ("attribution",)),
    "attribution_groups": Selector(_best_groups, ("attribution",)),
    "retrieval_heads": Selector(_best_heads, ("retrieval_heads",)),
    "retrieval_heads_groups": Selector(_best_groups, ("retrieval_heads",)),
    # A gate is a KV head's: single heads of a group cannot be told apart.
    "duo_gates": Selector(_best_groups, ("duo_gates",)),
    "replacement_kl": Selector(_best_heads, ("replacement_kl",)),
    "replacement_kl_groups": Selector(_best_groups, ("replacement_kl",)),
    "replacement_nll": Selector(_best_heads, ("replacement_nll",)),
    "replacement_nll_groups": Selector(_best_groups, ("replacement_nll",)),
    "leave_one_in": Selector(_best_heads, ("leave_one_in",)),
    "leave_one_in_groups": Selector(_best_groups, ("leave_one_in",)),
    "restoration": Selector(_best_layers, ("restoration",)),
    "blend": Selector(_blend, ("causal", "replacement_kl")),
    "blend_groups": Selector(_blend_groups, ("causal", "replacement_kl")),
    "even_layers": Selector(_even_layers),
    "random": Selector(_random),
}

UNIFORM: dict[str, Operator] = {"all_full": Operator.FULL, "all_gdn": Operator.GDN}


def _whole_groups(request: Request, table: Table) -> frozenset[Head]:
    """The heads of the best KV groups: the nearest whole number of groups to the share, at least one."""
    shape = request.shape
    groups = shape.groups()
    best = top_heads(table, _share_of(len(groups), request.fa_share))
    return frozenset(head for layer, kv in best for head in groups[layer * shape.num_kv_heads + kv])


def _whole_layers(shape: ModelShape, layers: Iterable[int]) -> frozenset[Head]:
    return frozenset((layer, head) for layer in layers for head in range(shape.num_heads))


def _mean_ranks(tables: Sequence[Table]) -> Table:
    found = [ranks(table) for table in tables]
    return [
        [sum(rank[layer, index] for rank in found) / len(found) for index in range(len(row))]
        for layer, row in enumerate(tables[0])
    ]


def _share_of(count: int, share: float) -> int:
    """The nearest whole number to a share of count (halves go up), at least one."""
    return max(1, math.floor(share * count + 0.5))


def _insert(found: dict[HeadMap, Seed], seed: Seed) -> None:
    """Adds a seed, or its method's name to the seed that has the same map."""
    first = found.get(seed.head_map)
    if first is None:
        found[seed.head_map] = seed
    elif seed.method not in (first.method, *first.also):
        found[seed.head_map] = replace(first, also=(*first.also, seed.method))


def _tables(shape: ModelShape, scores: Mapping[str, ScoreTables], name: str) -> ScoreTables:
    """The tables of that name, checked against the geometry."""
    if name not in scores:
        raise ValueError(f"seeds: no {name} scores; there are {sorted(scores)}")
    found = scores[name]
    _check_table(name, found.heads, shape.num_layers, shape.num_heads)
    _check_table(f"{name} group", found.groups, shape.num_layers, shape.num_kv_heads)
    return found


def _check_table(name: str, table: Table, num_layers: int, width: int) -> None:
    if len(table) != num_layers or any(len(row) != width for row in table):
        raise ValueError(f"seeds: {name} scores are not {num_layers} x {width}")
    if not all(math.isfinite(value) for row in table for value in row):
        raise ValueError(f"seeds: {name} scores hold a value that is not finite")


def _items(table: Table) -> list[tuple[Head, float]]:
    return [
        ((layer, head), value) for layer, row in enumerate(table) for head, value in enumerate(row)
    ]


def _argmax(row: Sequence[float]) -> int:
    return max(range(len(row)), key=lambda head: (row[head], -head))
