"""Who goes on to the next proxy: ranks, hypervolume, the floor of each cost band, bounds; none is lost."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest

from archsearch.config import HalvingConfig, SearchConfig
from archsearch.errors import ConfigError
from archsearch.headmap import HeadMap, Operator
from archsearch.search.front import CONTROL, Candidate, Fronts, Scale, pareto_front
from archsearch.search.promotion import Promotion, cost_bands, halve, pareto_ranks, promote
from tests.search.fakes import SHAPE, fake_config

MAP = HeadMap.uniform(SHAPE, Operator.GDN)
METRICS = ["kl", "cache_bytes", "niah_multikey_nll"]


def search_config(objectives: int = 2, **search: Any) -> SearchConfig:
    goals = [{"metric": name, "direction": "minimize"} for name in METRICS[:objectives]]
    return fake_config(objectives=goals, **search).search


def draw(count: int, seed: int, source: str = "search", **more: Any) -> list[Candidate]:
    """Points whose quality falls with their cost, and some noise."""
    rng, found = Random(seed), []
    for number in range(count):
        cost = rng.choice(range(1, 40)) / 40
        metrics = {
            "cache_bytes": cost,
            "fa_share": cost,
            "kl": (1 - cost) ** 2 + rng.random(),
            "niah_multikey_nll": rng.random(),
        }
        found.append(Candidate(number, source, metrics, MAP, **more))
    return found


def numbers(candidates: Any) -> list[int]:
    return [c.candidate for c in candidates]


@pytest.mark.parametrize("objectives", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_share_goes_on_lowest_ranks_first_and_none_is_lost(objectives: int, seed: int) -> None:
    config = search_config(objectives)
    candidates = draw(61, seed)
    scale = Scale.of(config.objectives, candidates)
    found = halve(config, HalvingConfig(keep=0.4, floor=0), scale, candidates)
    assert len(found.chosen) == math.ceil(0.4 * 61)
    assert sorted(numbers(found.chosen) + [p.candidate.candidate for p in found.pruned]) == [
        *range(61)
    ]
    ranks = pareto_ranks(scale, candidates)
    worst = max(ranks[number] for number in numbers(found.chosen))
    assert all(ranks[p.candidate.candidate] >= worst for p in found.pruned)
    assert numbers(found.chosen) == sorted(
        numbers(found.chosen), key=lambda n: (ranks[n], numbers(found.chosen).index(n))
    )
    front = set(numbers(pareto_front(candidates, scale)))
    assert front <= {number for number, rank in ranks.items() if rank == 0}


@pytest.mark.parametrize("objectives", [1, 2, 3])
@pytest.mark.parametrize("floor", [0, 2])
def test_from_the_second_proxy_on_the_front_is_whole(objectives: int, floor: int) -> None:
    config = search_config(
        objectives, proxy_tokens=[50, 100], halving={"keep": 0.05, "floor": floor}
    )
    candidates = draw(60, 7)
    first, second = (
        promote(config, Fronts.of(config.objectives, candidates, [], tokens), candidates, [])[0]
        for tokens in (50, 100)
    )
    front = pareto_front(candidates, Scale.of(config.objectives, candidates))
    assert {*numbers(front)} <= {*numbers(second.chosen)}
    # Beyond them nothing but what the floor gives.
    assert {*numbers(second.chosen)} == {*numbers(front), *numbers(first.chosen)}
    assert len(second.pruned) + len(second.chosen) == 60
    if objectives > 1:
        assert len(second.chosen) > len(first.chosen)
    options = HalvingConfig(keep=0.05, floor=floor, front=False)
    without = config.model_copy(update={"halving": options})
    fronts = Fronts.of(config.objectives, candidates, [], 100)
    assert promote(without, fronts, candidates, [])[0] == first


def test_a_front_that_misses_a_bound_is_cut() -> None:
    bounds = [{"metric": "kl", "max": 0.0}]
    config = search_config(proxy_tokens=[0, 100], constraints=bounds, halving={"keep": 0.1})
    candidates = draw(60, 2, feasible=False)
    fronts = Fronts.of(config.objectives, candidates, [], 100)
    assert len(promote(config, fronts, candidates, [])[0].chosen) == 8


def test_of_the_rank_that_does_not_fit_the_largest_volume_is_kept() -> None:
    config = search_config()
    angles = np.linspace(0, np.pi / 2, 12)
    candidates = [
        Candidate(i, "search", {"kl": 1 - math.sin(a), "cache_bytes": 1 - math.cos(a)}, MAP)
        for i, a in enumerate(angles)
    ]
    scale = Scale.of(config.objectives, candidates)
    found = halve(config, HalvingConfig(keep=0.25, floor=0), scale, candidates)
    assert set(pareto_ranks(scale, candidates).values()) == {0}
    # Greedy one by one, by brute force.
    chosen: list[Candidate] = []
    for _ in range(3):
        left = [c for c in candidates if c not in chosen]
        chosen.append(max(left, key=lambda c: scale.hypervolume([*chosen, c])))
    assert numbers(found.chosen) == numbers(chosen)


@pytest.mark.parametrize("bands", [1, 3, 5])
def test_every_cost_band_keeps_its_best(bands: int) -> None:
    config = search_config()
    candidates = draw(80, 5)
    # Cheap ones are all bad: by rank alone none of them would go on.
    candidates = [
        Candidate(
            c.candidate,
            c.source,
            {**c.metrics, "kl": c.metrics["kl"] + 50 * (c.metrics["cache_bytes"] < 0.5)},
            MAP,
        )
        for c in candidates
    ]
    scale = Scale.of(config.objectives, candidates)
    options = HalvingConfig(keep=0.1, bands=bands, floor=3)
    found = halve(config, options, scale, candidates)
    places = cost_bands(config, candidates, bands)
    counts = np.bincount([places[number] for number in numbers(found.chosen)], minlength=bands)
    assert len(counts) == bands
    assert (counts >= 3).all()
    assert len(found.chosen) == max(8, 3 * bands)
    ranks = pareto_ranks(scale, candidates)
    for band in range(bands):
        own = sorted(ranks[n] for n, place in places.items() if place == band)
        kept = sorted(ranks[n] for n in numbers(found.chosen) if places[n] == band)
        assert kept == own[: len(kept)]


def test_bands_are_quantiles_and_equal_costs_share_one() -> None:
    config = search_config()
    values = [1.0] * 10 + [2.0] * 2 + [5.0] * 3 + [9.0]
    candidates = [
        Candidate(i, "search", {"kl": 0.0, "cache_bytes": value}, MAP)
        for i, value in enumerate(values)
    ]
    places = cost_bands(config, candidates, 4)
    assert len({(values[n], place) for n, place in places.items()}) == 4
    assert sorted(set(places.values())) == [*range(len(set(places.values())))]
    assert [places[0], places[15]] == [0, max(places.values())]
    free = fake_config(objectives=[{"metric": "kl", "direction": "minimize"}]).search
    assert set(cost_bands(free, candidates, 4).values()) == {0}


def test_bounds_on_costs_are_final_and_others_may_still_be_met() -> None:
    bounds = [{"metric": "fa_share", "max": 0.5}, {"metric": "kl", "max": 0.1}]
    config = search_config(constraints=bounds)
    candidates = draw(40, 2, feasible=False)
    scale = Scale.of(config.objectives, candidates)
    found = halve(config, HalvingConfig(keep=0.5), scale, candidates)
    assert found.chosen
    assert all(c.metrics["fa_share"] <= 0.5 for c in found.chosen)
    reasons = {p.candidate.candidate: p.reason for p in found.pruned}
    for c in candidates:
        if c.metrics["fa_share"] > 0.5:
            assert reasons[c.candidate].startswith("outside search.constraints: fa_share 0.")


def test_feasible_ones_rank_before_all_others() -> None:
    config = search_config(constraints=[{"metric": "kl", "max": 0.3}])
    good = [
        Candidate(c.candidate, c.source, c.metrics, MAP, c.metrics["kl"] <= 0.3)
        for c in draw(60, 4)
    ]
    ranks = pareto_ranks(Scale.of(config.objectives, good), good)
    inside = [ranks[c.candidate] for c in good if c.feasible]
    outside = [ranks[c.candidate] for c in good if not c.feasible]
    assert inside
    assert max(inside) < min(outside)


def both(config: SearchConfig) -> tuple[Fronts, tuple[Promotion, Promotion]]:
    search = [*draw(10, 1, "causal"), *draw(40, 2)[10:]]
    control = draw(30, 3, CONTROL)
    fronts = Fronts.of(config.objectives, search, control, 100)
    return fronts, promote(config, fronts, search, control)


def test_the_front_of_the_seeds_goes_on_beyond_the_share() -> None:
    options = {"keep": 0.1, "floor": 0, "front": False}
    fronts, (with_seeds, control) = both(search_config(halving=options))
    _, (without, _) = both(search_config(halving={**options, "seeds": False}))
    assert numbers(without.chosen) == numbers(with_seeds.chosen)[: len(without.chosen)]
    assert {*numbers(fronts.seeds), *numbers(without.chosen)} == {*numbers(with_seeds.chosen)}
    assert len(without.chosen) == 4
    assert len(control.chosen) == 3


@pytest.mark.parametrize("most", [None, 2])
def test_fronts_go_on_where_nothing_is_halved(most: int | None) -> None:
    fronts, (search, control) = both(search_config(max_promoted=most))
    points, seeds, drawn = (
        front if most is None or len(front) <= most else fronts.scale.spread(front, most)
        for front in (fronts.points, fronts.seeds, fronts.control)
    )
    assert sorted(numbers(search.chosen)) == sorted({*numbers(points), *numbers(seeds)})
    assert sorted(numbers(control.chosen)) == sorted(numbers(drawn))
    assert len(search.chosen) + len(search.pruned) == 40
    reasons = {p.reason for p in (*search.pruned, *control.pruned)}
    expected = {"on no front after 100 tokens"}
    if most:
        expected.add(
            "on the front after 100 tokens, but search.max_promoted 2 others add more hypervolume"
        )
    assert reasons == expected


def test_a_cut_takes_the_last_and_says_why() -> None:
    _, (search, _) = both(search_config(halving={}))
    cut = search.only({c.candidate for c in search.chosen[:3]}, "search.max_tokens")
    assert cut.chosen == search.chosen[:3]
    assert [p.candidate for p in cut.pruned if p.reason == "search.max_tokens"] == [
        *search.chosen[3:]
    ]


def test_both_rules_at_once_are_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="max_promoted and halving both"):
        fake_config(halving={}, max_promoted=3)
