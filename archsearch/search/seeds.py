"""Baseline head maps that are evaluated before the sampler proposes anything. No torch.

Every selector turns a share of full-attention heads into the set of heads that keep full attention;
SELECTORS names them and the scores that each reads. A map that two methods agree on appears once, with both names.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ..config import CostConfig, ScoreMethod, SearchConfig, SeedConfig, SeedMethod
from ..cost import cache_bytes, kv_cache_bytes, state_bytes
from ..errors import ConfigError
from ..headmap import Head, HeadMap, ModelShape, Operator
from ..rundir import RunDir, score_file
from .program import Budget, shares_of_total, solve
from .ranking import Table, best_of_each_layer, mean_ranks, ranks, top_heads

__all__ = [
    "DRAWN",
    "SELECTORS",
    "UNIFORM",
    "Request",
    "ScoreTables",
    "Seed",
    "Selector",
    "Table",
    "most_seeds",
    "most_seeds_of_search",
    "needed_by_seeds",
    "num_full_heads",
    "ranks",
    "read_scores",
    "seed_maps",
    "seeds_of_search",
    "top_heads",
    "within_share",
]


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
    """What a selector gets: the geometry, the scores that it reads in its row's order, the share of FA heads,
    a generator, and where bytes are counted."""

    shape: ModelShape
    scores: tuple[ScoreTables, ...]
    fa_share: float
    rng: random.Random
    cost: CostConfig

    @property
    def num_full(self) -> int:
        """Heads to keep as full attention."""
        return num_full_heads(self.shape, self.fa_share)

    @property
    def num_full_groups(self) -> int:
        """KV groups to keep as full attention, where whole ones are chosen."""
        return _share_of(self.shape.num_layers * self.shape.num_kv_heads, self.fa_share)


@dataclass(frozen=True)
class Selector:
    """A way to choose heads, and the scores that it reads."""

    choose: Callable[[Request], frozenset[Head]]
    scores: tuple[ScoreMethod, ...] = ()


def num_full_heads(shape: ModelShape, fa_share: float) -> int:
    """FA heads at a share: the nearest whole number (halves go up), at least one."""
    return _share_of(shape.total_heads, fa_share)


def within_share(head_map: HeadMap, fa_share: float) -> bool:
    """Whether a map has no more FA heads than a seed at that share; a share of 0 allows none."""
    count = len(head_map.full_heads())
    return count == 0 or (fa_share > 0 and count <= num_full_heads(head_map.model, fa_share))


def seed_maps(
    shape: ModelShape,
    scores: Mapping[str, ScoreTables],
    config: SeedConfig,
    seed: int,
    cost: CostConfig = CostConfig(),  # noqa: B008 - frozen
) -> list[Seed]:
    """The distinct head maps of every method of config.methods at every share of config.fa_shares.

    scores holds the tables by scoring method, as far as the methods need them (needed_by_seeds). all_full and
    all_gdn have no share and appear once. cost says at what context bytes are counted. Raises ValueError on a missing,
    misshapen or non-finite table.
    """
    found: dict[HeadMap, Seed] = {}
    for method in config.methods:
        if method in UNIFORM:
            _insert(found, Seed(method, HeadMap.uniform(shape, UNIFORM[method])))
            continue
        selector = SELECTORS[method]
        tables = tuple(_tables(shape, scores, name) for name in selector.scores)
        for share in config.fa_shares:
            for number in range(config.random_maps if method in DRAWN else 1):
                # A string seed is hashed with SHA-512, so the draw is the same in every process.
                rng = random.Random(f"{seed}/{method}/{share}" + (f"/{number}" if number else ""))
                full = selector.choose(Request(shape, tables, share, rng, cost))
                _insert(found, Seed(method, HeadMap.from_full_heads(shape, full)))
    return list(found.values())


def seeds_of_search(
    shape: ModelShape,
    scores: Mapping[str, ScoreTables],
    config: SearchConfig,
    seed: int,
    cost: CostConfig = CostConfig(),  # noqa: B008 - frozen
) -> list[Seed]:
    """The seeds of a search: those of seed_maps and, with every_selector, of what else the scores that are there allow."""
    seeds = config.seeds
    found = {made.head_map: made for made in seed_maps(shape, scores, seeds, seed, cost)}
    for method, share in _more_seeds(seeds, scores) if seeds.every_selector else ():
        one = seeds.model_copy(update={"methods": (method,), "fa_shares": (share,)})
        for made in seed_maps(shape, scores, one, seed, cost):
            # A map that is there already takes no trial: it only gets another name.
            if made.head_map in found or len(found) < config.trials // 2:
                _insert(found, made)
    return list(found.values())


def _more_seeds(config: SeedConfig, scores: Collection[str]) -> list[tuple[SeedMethod, float]]:
    """Every selector that config does not name and that can be asked, at each share: the program first."""
    others = [
        method
        for method, selector in SELECTORS.items()
        if method not in config.methods and set(selector.scores) <= set(scores)
    ]
    wanted = [(method, share) for share in config.fa_shares for method in others]
    return sorted(wanted, key=lambda pair: pair[0] != "program")


def most_seeds(config: SeedConfig, methods: Iterable[SeedMethod] | None = None) -> int:
    """Head maps of these methods, or of config.methods, if no two were the same."""
    shares = len(config.fa_shares)
    return sum(
        1 if method in UNIFORM else shares * (config.random_maps if method in DRAWN else 1)
        for method in (config.methods if methods is None else methods)
    )


def most_seeds_of_search(config: SearchConfig, scored: Collection[ScoreMethod]) -> int:
    """The most that seeds_of_search can give with these scores."""
    seeds = config.seeds
    named = most_seeds(seeds)
    others = {method for method, _ in _more_seeds(seeds, scored)}
    more = named + most_seeds(seeds, others) if seeds.every_selector else named
    return max(named, min(more, config.trials // 2))


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
    """The best head of each layer first, then the best of the rest ("constrained global", arXiv 2606.20097)."""
    (scores,) = request.scores
    return frozenset(best_of_each_layer(scores.heads, request.num_full))


def _constrained_groups(request: Request) -> frozenset[Head]:
    """The same of whole KV groups."""
    (scores,) = request.scores
    return _heads_of(request.shape, best_of_each_layer(scores.groups, request.num_full_groups))


def _blend(request: Request) -> frozenset[Head]:
    """The heads of the highest mean rank over the scores."""
    mean = mean_ranks([scores.heads for scores in request.scores])
    return frozenset(top_heads(mean, request.num_full))


def _blend_groups(request: Request) -> frozenset[Head]:
    """The KV groups of the highest mean rank over the scores."""
    return _whole_groups(request, mean_ranks([scores.groups for scores in request.scores]))


def _even_layers(request: Request) -> frozenset[Head]:
    """Whole layers, evenly spaced."""
    num_layers = request.shape.num_layers
    count = _share_of(num_layers, request.fa_share)
    layers = [int((index + 0.5) * num_layers / count) for index in range(count)]
    return _whole_layers(request.shape, layers)


def _random(request: Request) -> frozenset[Head]:
    return frozenset(request.rng.sample(request.shape.heads(), request.num_full))


def _random_groups(request: Request) -> frozenset[Head]:
    groups = request.rng.sample(request.shape.groups(), request.num_full_groups)
    return frozenset(head for group in groups for head in group)


def _program(request: Request) -> frozenset[Head]:
    """Least damage that adds up, by single heads; a KV group that goes as a whole counts as it was measured."""
    heads, groups = shares_of_total([(scores.heads, scores.groups) for scores in request.scores])
    return solve(request.shape, heads, Budget(request.num_full), groups=groups)


def _program_groups(request: Request) -> frozenset[Head]:
    """Least damage of single heads that adds up, by whole KV groups."""
    heads, _ = shares_of_total([(scores.heads, scores.groups) for scores in request.scores])
    budget = Budget(request.num_full_groups * request.shape.group_size)
    return solve(request.shape, heads, budget, whole_groups=True)


def _program_bytes(request: Request) -> frozenset[Head]:
    """As _program, but with any number of heads whose cache is no larger than that of evenly spaced layers at the share."""
    heads, groups = shares_of_total([(scores.heads, scores.groups) for scores in request.scores])
    shape, cost = request.shape, request.cost
    layers = HeadMap.from_full_heads(shape, _even_layers(request))
    one = HeadMap.from_full_heads(shape, [(0, 0)])
    budget = Budget(
        max_bytes=cache_bytes(layers, cost.context, element_bytes=cost.element_bytes),
        kv_head_bytes=kv_cache_bytes(one, cost.context, element_bytes=cost.element_bytes),
        state_bytes=state_bytes(HeadMap.uniform(shape, Operator.GDN)) // shape.total_heads,
    )
    return solve(shape, heads, budget, groups=groups)


SELECTORS: dict[SeedMethod, Selector] = {
    "causal": Selector(_best_heads, ("causal",)),
    "causal_per_layer": Selector(_constrained, ("causal",)),
    "causal_per_layer_groups": Selector(_constrained_groups, ("causal",)),
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
    "program": Selector(_program, ("replacement_kl",)),
    "program_groups": Selector(_program_groups, ("replacement_kl",)),
    "program_bytes": Selector(_program_bytes, ("replacement_kl",)),
    "program_both": Selector(_program, ("replacement_kl", "replacement_nll")),
    "program_both_groups": Selector(_program_groups, ("replacement_kl", "replacement_nll")),
    "program_both_bytes": Selector(_program_bytes, ("replacement_kl", "replacement_nll")),
    "even_layers": Selector(_even_layers),
    "random": Selector(_random),
    "random_groups": Selector(_random_groups),
}
DRAWN = ("random", "random_groups")
"""Selectors that give config.random_maps maps at each share."""

UNIFORM: dict[str, Operator] = {"all_full": Operator.FULL, "all_gdn": Operator.GDN}


def _whole_groups(request: Request, table: Table) -> frozenset[Head]:
    """The heads of the best KV groups: the nearest whole number of groups to the share, at least one."""
    return _heads_of(request.shape, top_heads(table, request.num_full_groups))


def _heads_of(shape: ModelShape, kv_heads: Iterable[Head]) -> frozenset[Head]:
    """All query heads of KV heads, given as (layer, KV head)."""
    groups = shape.groups()
    return frozenset(
        head for layer, kv in kv_heads for head in groups[layer * shape.num_kv_heads + kv]
    )


def _whole_layers(shape: ModelShape, layers: Iterable[int]) -> frozenset[Head]:
    return frozenset((layer, head) for layer in layers for head in range(shape.num_heads))


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
