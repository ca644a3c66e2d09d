"""Points to head maps and back, neighbours, and bounds that nothing can meet."""

from __future__ import annotations

import math
from random import Random
from typing import get_args

import pytest

from archsearch.config import ConstraintConfig, CostConfig, Metric, SeedConfig
from archsearch.cost import cache_bytes
from archsearch.errors import ConfigError
from archsearch.headmap import HeadMap, ModelShape, Operator
from archsearch.search.seeds import seed_maps
from archsearch.search.space import (
    Point,
    RankedSpace,
    analytic_costs,
    check_constraints,
    random_map,
)
from tests.search.fakes import SCORES, SHAPE, score_tables

SPACE = RankedSpace(SHAPE, SCORES)
COST = CostConfig(context=1024)


@pytest.mark.parametrize(
    ("method", "mix"), [("causal", 0.0), ("replacement_kl", 1.0), ("blend", 0.5)]
)
def test_the_ends_of_mix_are_the_seeds_of_that_method(method: str, mix: float) -> None:
    config = SeedConfig.model_validate({"methods": [method], "fa_shares": [0.25, 0.5]})
    for seed in seed_maps(SHAPE, SCORES, config, 0):
        count = len(seed.head_map.full_heads())
        assert SPACE.decode(Point(count, mix)) == seed.head_map
        assert SPACE.decode(SPACE.encode(seed.head_map)) == seed.head_map


@pytest.mark.parametrize("count", [0, 1, 7, 16])
def test_decode_keeps_the_number_of_heads(count: int) -> None:
    for point in (Point(count, 0.3, -0.7, 0.4), Point(count, 1.0, 1.0, 1.0)):
        assert len(SPACE.decode(point).full_heads()) == count


def test_full_grouping_takes_whole_kv_groups() -> None:
    head_map = SPACE.decode(Point(8, 0.5, 0.0, 1.0))
    kept = [sum(head in head_map.full_heads() for head in group) for group in SHAPE.groups()]
    assert sorted(kept) == [0, 0, 0, 0, 2, 2, 2, 2]


def test_grouping_by_equal_scores_does_not_interleave_groups() -> None:
    zero = score_tables([[0.0] * 4 for _ in range(4)], 2)
    space = RankedSpace(SHAPE, {"causal": zero, "replacement_kl": zero})
    head_map = space.decode(Point(4, 0.5, 0.0, 1.0))
    assert sum(len(head_map.kv_heads(layer, Operator.FULL)) for layer in range(4)) == 2


def test_tilt_moves_heads_to_later_or_earlier_layers() -> None:
    late = SPACE.decode(Point(8, 0.5, 1.0)).full_heads()
    early = SPACE.decode(Point(8, 0.5, -1.0)).full_heads()
    assert sum(layer for layer, _ in late) > sum(layer for layer, _ in early)


def test_one_layer_and_one_head() -> None:
    shape = ModelShape("llama", 1, 1, 1, 8)
    one = score_tables([[1.0]], 1)
    space = RankedSpace(shape, {"causal": one, "replacement_kl": one})
    assert space.decode(Point(1, 0.5, 1.0, 1.0)).layers == ("F",)
    assert space.encode(HeadMap.uniform(shape, Operator.GDN)).fa_heads == 0


def test_nearest_moves_fa_heads_first_and_then_flips() -> None:
    point, used = Point(4, 0.0), set[tuple[str, ...]]()
    for expected in (4, 3, 5, 2, 6):
        found = SPACE.nearest(point, lambda m: m.layers not in used, Random(0))
        assert len(found.full_heads()) == expected
        used.add(found.layers)
    used |= {SPACE.decode(Point(count, 0.0)).layers for count in range(17)}
    flipped = SPACE.nearest(point, lambda m: m.layers not in used, Random(0))
    assert flipped.layers not in used
    assert len(flipped.full_heads() ^ SPACE.decode(point).full_heads()) == 1


def test_nearest_says_when_nothing_is_left() -> None:
    with pytest.raises(ConfigError, match="no head map is left"):
        SPACE.nearest(Point(4, 0.0), lambda m: False, Random(0))


def test_a_bound_on_the_share_narrows_the_range() -> None:
    bound = ConstraintConfig(metric="fa_share", min=0.1, max=0.5)
    assert RankedSpace(SHAPE, SCORES, [bound]).fa_range() == (2, 8)


@pytest.mark.parametrize("bounds", [({"min": 0.5}, {"max": 0.3}), ({"min": 0.51, "max": 0.52},)])
def test_bounds_on_the_share_that_no_number_of_heads_meets(
    bounds: tuple[dict[str, float], ...],
) -> None:
    constraints = [ConstraintConfig.model_validate({"metric": "fa_share", **b}) for b in bounds]
    with pytest.raises(ConfigError, match=r"multiples of 0\.0625"):
        check_constraints(constraints, SHAPE, COST)


def test_bounds_together_are_refused_just_where_no_map_meets_them() -> None:
    rng = Random(3)
    shape = ModelShape("llama", 2, 4, 2, 8)
    heads = shape.heads()
    maps = [
        HeadMap.from_full_heads(shape, [h for i, h in enumerate(heads) if bits >> i & 1])
        for bits in range(256)
    ]
    refused = 0
    for _ in range(300):
        cost = CostConfig(context=rng.choice((1, 8, 16, 64)))
        values = sorted({analytic_costs(m, cost)["cache_bytes"] for m in maps})
        low, share = rng.choice(values) + rng.choice((0, 1)), rng.randrange(8) / 8
        bounds = [
            ConstraintConfig(metric="cache_bytes", min=min(low, values[-1])),
            ConstraintConfig(metric="cache_bytes", max=max(values[0], low + rng.choice((0, 200)))),
            ConstraintConfig(metric="fa_share", min=share, max=share + 1 / 8),
        ]
        zero = score_tables([[0.0] * 4] * 2, 2)
        space = RankedSpace(shape, {"causal": zero, "replacement_kl": zero}, bounds, cost)
        if any(space.affordable(m) for m in maps):
            check_constraints(bounds, shape, cost)
            continue
        refused += 1
        with pytest.raises(ConfigError, match=r"nearest feasible|is above max") as caught:
            check_constraints(bounds, shape, cost)
        if "nearest" in str(caught.value):
            near = str(caught.value).partition("feasible: ")[2].split(" and ")
            inside = {
                f"{analytic_costs(m, cost)['cache_bytes']:.10g}"
                for m in maps
                if share <= m.fa_share <= share + 1 / 8
            }
            assert set(near) <= inside
    assert 50 < refused < 250


@pytest.mark.parametrize("limit", [{"min": math.nan}, {"max": math.nan}])
def test_a_bound_that_is_no_number_is_refused(limit: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="not a number"):
        check_constraints(
            [ConstraintConfig.model_validate({"metric": "cache_bytes", **limit})], SHAPE, COST
        )


def test_affordable_looks_at_costs_only() -> None:
    budget = cache_bytes(HeadMap.uniform(SHAPE, Operator.FULL), 1024) - 1
    bounds = [
        ConstraintConfig(metric="cache_bytes", max=budget),
        ConstraintConfig(metric="kl", max=0),
    ]
    space = RankedSpace(SHAPE, SCORES, bounds, COST)
    assert not space.affordable(HeadMap.uniform(SHAPE, Operator.FULL))
    assert space.affordable(HeadMap.uniform(SHAPE, Operator.GDN))


def test_the_feasible_range_of_cache_bytes_is_exact() -> None:
    rng = Random(1)
    shape = ModelShape("llama", 2, 4, 2, 8)
    for context in (8, 16, 64, 1024):
        cost = CostConfig(context=context)
        maps = [random_map(shape, rng, 0, 8) for _ in range(300)]
        values = [analytic_costs(m, cost)["cache_bytes"] for m in maps]
        check_constraints([ConstraintConfig(metric="cache_bytes", max=min(values))], shape, cost)
        with pytest.raises(ConfigError) as caught:
            check_constraints([ConstraintConfig(metric="cache_bytes", max=1)], shape, cost)
        assert f"smallest feasible value is {min(values):.10g}" in str(caught.value)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ({"metric": "kl", "max": -1}, "max: no head map has kl -1 or less; the smallest"),
        ({"metric": "fa_share", "min": 2}, "min: no head map has fa_share 2 or more; the largest"),
        ({"metric": "kl", "min": 2, "max": 1}, "min 2 is above max 1"),
        ({"metric": "general_nll", "max": -1}, "no head map has general_nll -1 or less"),
        ({"metric": "niah_multivalue_match", "min": 2}, "the largest feasible value is 1"),
    ],
)
def test_impossible_constraints_are_named(bound: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_constraints([ConstraintConfig.model_validate(bound)], SHAPE, COST)


@pytest.mark.parametrize("metric", get_args(Metric))
def test_every_metric_has_a_range(metric: str) -> None:
    bound = ConstraintConfig.model_validate({"metric": metric, "min": -math.inf, "max": math.inf})
    check_constraints([bound], SHAPE, COST)


def test_misshapen_scores_are_refused() -> None:
    one = score_tables([[1.0]], 1)
    for scores in ({}, {"causal": one, "replacement_kl": one}):
        with pytest.raises(ValueError, match="causal scores"):
            RankedSpace(SHAPE, scores)
