"""Maps of a study: good ones of one size around the front and the selectors, others at all shares, none twice."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from archsearch.config import CostConfig
from archsearch.cost import cache_bytes
from archsearch.errors import ConfigError
from archsearch.fidelity.predictors import CACHE, FA_SHARE, predictors_of, sum_of
from archsearch.fidelity.records import Group, Subject
from archsearch.fidelity.subjects import choose_subjects
from archsearch.headmap import HeadMap, ModelShape
from archsearch.search.front import Candidate
from archsearch.search.seeds import ScoreTables
from archsearch.search.space import random_map

SHAPE = ModelShape("qwen3", num_layers=6, num_heads=8, num_kv_heads=4, head_dim=16)
RNG = Random(11)


def drawn_tables() -> ScoreTables:
    def draw(width: int) -> list[list[float]]:
        return [[RNG.random() for _ in range(width)] for _ in range(6)]

    return ScoreTables(draw(8), draw(4))


SCORES = {"causal": drawn_tables(), "replacement_kl": drawn_tables()}


def front_of(*counts: int) -> list[Candidate]:
    maps = [random_map(SHAPE, RNG, count, count) for count in counts]
    return [Candidate(number, "search", {}, found) for number, found in enumerate(maps)]


FRONT = front_of(0, 3, 6, 7, 20, 30, 48)


def choose(good: int = 8, mixed: int = 4, **options: Any) -> list[Subject]:
    counts: dict[Group, int] = {"good": good, "mixed": mixed}
    arguments: dict[str, Any] = {"share": 0.125, "shares": (0.5, 0.25), "seed": 3}
    front = options.pop("front", FRONT)
    return choose_subjects(SHAPE, SCORES, front, counts=counts, **(arguments | options))


def test_as_many_of_each_group_as_asked_and_none_twice() -> None:
    subjects = choose(good=20, mixed=10)
    assert Counter(s.group for s in subjects) == {"good": 20, "mixed": 10}
    assert len({s.head_map for s in subjects}) == 30
    assert all(s.head_map.fa_share < 1 for s in subjects)


def test_good_maps_have_one_size_and_come_from_front_selectors_and_swaps() -> None:
    good = [s for s in choose(good=12) if s.group == "good"]
    assert {len(s.head_map.full_heads()) for s in good} == {6}
    origins = [s.origin for s in good]
    assert origins[0] == "front #2", "the front's own of that size comes first"
    assert "front #3, now of 6 FA heads" in origins
    assert {"replacement_kl", "causal"} <= set(origins)
    assert sum("swapped" in origin for origin in origins) == 6


def test_a_map_that_is_brought_to_size_loses_its_least_needed_head() -> None:
    fitted = next(s for s in choose(good=12) if s.origin.startswith("front #3"))
    before = FRONT[3].head_map.full_heads()
    (lost,) = before - fitted.head_map.full_heads()
    assert fitted.head_map.full_heads() < before

    def rank(head: tuple[int, int]) -> float:
        def below(table: ScoreTables) -> int:
            value = table.heads[head[0]][head[1]]
            return sum(other < value for row in table.heads for other in row)

        return sum(map(below, SCORES.values()))

    assert rank(lost) == min(map(rank, before))


def test_swaps_stay_near_the_map_that_they_start_from() -> None:
    subjects = choose(good=16)
    bases = {s.origin: s.head_map for s in subjects}
    swaps = [s for s in subjects if "swapped" in s.origin]
    assert swaps
    for subject in swaps:
        origin, _, size = subject.origin.rpartition(", ")
        moved = bases[origin].full_heads() - subject.head_map.full_heads()
        assert len(moved) == int(size.split()[0]) <= 2


def test_mixed_maps_are_the_fronts_extremes_first() -> None:
    mixed = [s for s in choose(mixed=3) if s.group == "mixed"]
    assert [s.head_map.fa_share for s in mixed] == [0, 30 / 48, 20 / 48]


def test_without_a_front_the_selectors_do() -> None:
    subjects = choose(good=6, mixed=8, front=[])
    mixed = [s for s in subjects if s.group == "mixed"]
    assert {round(s.head_map.fa_share, 3) for s in mixed} >= {0.5, 0.25, 0.125}
    assert not any("front" in s.origin for s in subjects)


def test_more_maps_keep_the_ones_before() -> None:
    few = choose(good=6, mixed=3)
    many = choose(good=14, mixed=7, kept=few)
    assert many[: len(few)] == few
    assert Counter(s.group for s in many) == {"good": 14, "mixed": 7}
    assert choose(good=2, mixed=1, kept=few) == few
    assert choose(good=6, mixed=3) == few, "the same each time"


def test_too_many_maps_are_refused() -> None:
    small = ModelShape("qwen3", num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    one = {"causal": ScoreTables([[0.1, 0.2]], [[0.2]])}
    counts: dict[Group, int] = {"good": 9, "mixed": 0}
    with pytest.raises(ConfigError, match="--maps: 7 good maps too many for 2 heads"):
        choose_subjects(small, one, [], share=0.5, counts=counts, shares=(0.5,), seed=0)


def test_without_scores_there_is_nothing_to_choose_by() -> None:
    counts: dict[Group, int] = {"good": 2, "mixed": 0}
    with pytest.raises(ConfigError, match="archsearch score"):
        choose_subjects(SHAPE, {}, FRONT, share=0.125, counts=counts, shares=(0.5,), seed=0)


def test_predictors_sum_over_the_heads_that_are_lost() -> None:
    head_map, cost = random_map(SHAPE, RNG, 10, 10), CostConfig(context=512)
    tables = {name: table.heads for name, table in SCORES.items()}
    found = predictors_of(head_map, tables, cost)
    lost = [head for head in SHAPE.heads() if head not in head_map.full_heads()]
    for name, table in tables.items():
        assert found[sum_of(name)] == pytest.approx(sum(table[la][h] for la, h in lost))
    assert found[FA_SHARE] == -10 / 48
    assert found[CACHE] == -cache_bytes(head_map, 512)
    better = HeadMap.from_full_heads(SHAPE, [*head_map.full_heads(), lost[0]])
    after = predictors_of(better, tables, cost)
    assert all(after[name] <= value for name, value in found.items())
