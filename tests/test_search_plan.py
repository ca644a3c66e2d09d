"""What a plan says of a search: how many head maps, what is done of them, what ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archsearch.config import RunConfig
from archsearch.ignored import ignored_options
from archsearch.rundir import RunDir
from archsearch.search_plan import (
    SearchDone,
    planned_rungs,
    search_done,
    search_forwards,
    search_lines,
    seconds_left,
)
from tests.search.fakes import SHAPE, fake_config, fake_search

HALVED = {"proxy_tokens": [0, 100, 300], "halving": {"keep": 0.5, "floor": 1, "bands": 2}}
WHOLE = {
    **HALVED,
    "trials": 20,
    "random_control": True,
    "representation": "free",
    "sampler": "guided",
    "final": {"tokens": 900, "max_points": 3},
}


def lines(config: RunConfig, done: SearchDone = SearchDone()) -> list[str]:  # noqa: B008
    return search_lines(config, planned_rungs(config, done), done)


def test_the_lines_name_who_proposes_where_they_are_measured_and_what_ends_it() -> None:
    limits = {"max_minutes": 2.0, "patience": 9, "min_gain": 0.01, "max_tokens": 5000}
    assert lines(fake_config(**WHOLE, **limits)) == [
        "20 head maps, up to 10 of them seeds, the others free by guided, and as many random ones",
        "untrained for 40, 100 tokens for about 20 (halving, keep 0.5), 300 tokens for about 8 (search.max_tokens, "
        "of 10; halving, keep 0.5), final stage: 900 tokens for 2 (search.max_tokens, of 8); 1 ray worker(s)",
        "ends earlier after 2 minutes, or 5,000 tokens of distillation, or 9 head maps without a gain in hypervolume "
        "above 0.01",
    ]
    assert len(lines(fake_config())) == 2


def test_what_is_done_is_counted_and_not_estimated_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {**HALVED, "trials": 12}
    place = RunDir(tmp_path)
    assert search_done(fake_config(**options), place, SHAPE) == SearchDone()
    assert not (tmp_path / "study.db").exists()
    place.mark_done("scores")
    outcome = fake_search(fake_config(**options), tmp_path)
    config = fake_config(**options | {"trials": 20, "max_minutes": 3.0})
    done = search_done(config, place, SHAPE)
    assert [rung.count for rung in done.rungs] == [len(rung.search) for rung in outcome.rungs]
    assert done.rungs[1].tokens == 100 * len(outcome.rungs[1].search)
    assert 0 < done.seconds < 180
    assert seconds_left(config, done) == 180 - done.seconds
    rungs = planned_rungs(config, done)
    assert rungs[0].left == 8
    assert search_forwards(config, rungs) < search_forwards(config, planned_rungs(config))
    said = lines(config, done)
    assert said[1].startswith("untrained for 20 (12 done), 100 tokens for about 10 (halving, keep")
    assert said[2].startswith("ends earlier after 3 minutes (0.0 are over)")
    same = fake_config(**options)
    assert [rung.left for rung in planned_rungs(same, done)] == [0, 0, 0]


@pytest.mark.parametrize("most", [700, 1500, 4000])
def test_tokens_that_a_plan_counts_are_those_that_a_search_may_spend(
    tmp_path: Path, most: int
) -> None:
    config = fake_config(trials=20, max_tokens=most, **HALVED)
    outcome = fake_search(config, tmp_path)
    for planned, rung in zip(planned_rungs(config), outcome.rungs, strict=True):
        # Halving may take some more than its share: a floor of each band, the front, the seeds.
        assert planned.count <= len(rung.search) <= 2 * planned.count + 2


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"trials": 4}, "search.trials: 4, and search.seeds.methods are up to 4 head maps"),
        (
            {"proxy_tokens": [100], "max_tokens": 250},
            "search.max_tokens: 250 pays for 2 head maps of up to 4 seeds at 100 tokens of distillation; 1 of it",
        ),
        (
            {"proxy_tokens": [0, 100], "max_tokens": 10},
            "search.max_tokens: 10 pays for 0 head maps at 100 tokens of distillation",
        ),
        ({"proxy_tokens": [0, 100], "max_tokens": 10_000}, None),
        ({"trials": 5}, None),
    ],
)
def test_limits_that_leave_too_little_are_named(search: dict[str, Any], said: str | None) -> None:
    found = [row for row in ignored_options(fake_config(**search)) if row.startswith("search.")]
    assert [row[: len(said or "")] for row in found] == ([said] if said else [])
