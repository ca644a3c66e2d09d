"""Limits that change between two calls of a search: it goes on with higher ones, lower ones take nothing back."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archsearch.search.stopping import changed_limits, limits_of
from archsearch.search.study import find_study, open_storage
from tests.search.fakes import (
    CAUSAL,
    SCORES,
    SHAPE,
    FakeClock,
    FakeWorker,
    fake_config,
    fake_search,
    read_log,
    score_tables,
)

LOOSER = {
    "trials": ({"trials": 12}, 20),
    "patience": ({"trials": 60, "patience": 3}, 9),
    "min_gain": ({"trials": 30, "patience": 3, "min_gain": 0.9}, 0.0),
    "max_tokens": ({"trials": 20, "max_tokens": 3000, "proxy_tokens": [100, 300]}, 9000),
    "max_minutes": ({"trials": 20, "max_minutes": 1.0}, 9.0),
}


@pytest.mark.parametrize("limit", LOOSER)
def test_a_search_goes_on_with_a_higher_limit_also_after_its_final_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    slow = FakeClock(monkeypatch).worker(lambda spec: 6)

    options, higher = LOOSER[limit]
    options = {"final": {"tokens": 900, "max_points": 4}, **options}
    first = fake_search(fake_config(**options), tmp_path, worker=slow)
    assert first.last.proxy_tokens == 900
    said: list[str] = []
    config = fake_config(**{**options, limit: higher})
    more = fake_search(config, tmp_path, said=said, worker=slow)
    assert changed_limits(limits_of(fake_config(**options).search), config.search) == ([limit], [])
    for before, after in zip(first.rungs, more.rungs, strict=True):
        assert {c.candidate for c in before.search} <= {c.candidate for c in after.search}
    assert len(more.rungs[0].search) > len(first.rungs[0].search)
    calls = read_log(tmp_path / "calls.jsonl")
    counts = Counter((call["candidate"], call["proxy_tokens"]) for call in calls)
    assert set(counts.values()) == {1}
    maps = Counter(json.dumps(call["head_map"]) for call in calls if call["rung"] == 0)
    assert set(maps.values()) == {1}
    pareto = json.loads((tmp_path / "pareto.json").read_text())
    points = {point["candidate"] for point in pareto["points"]}
    assert points == {c.candidate for c in more.last.fronts.points}
    assert {int(path.stem) for path in (tmp_path / "front").iterdir()} == points


def test_a_lower_limit_takes_nothing_back(tmp_path: Path) -> None:
    options = {"trials": 12, "proxy_tokens": [100, 300]}
    first = fake_search(fake_config(**options), tmp_path)
    for limit in ({"trials": 5}, {"max_tokens": 600}, {"patience": 1, "min_gain": 0.9}):
        said: list[str] = []
        less = fake_search(fake_config(**{**options, **limit}), tmp_path, said=said)
        assert [len(r.search) for r in less.rungs] == [len(r.search) for r in first.rungs]
        assert less.fronts.points == first.fronts.points
        assert less.stops() == []
        expected = ["search.trials 5: 12 are begun already, and stay"] if "trials" in limit else []
        assert [line for line in said if "begun" in line] == expected
    more = {**options, "trials": 20, "max_tokens": 600}
    assert fake_search(fake_config(**more), tmp_path).stops()[0] == (
        "search stopped at 100 tokens by search.max_tokens 600: 12 of 20 candidates"
    )


class Stopped(FakeWorker):
    """Ctrl-C in the midst of a candidate."""

    def __call__(self, spec: Any) -> Any:
        if spec.candidate == 6:
            raise KeyboardInterrupt
        return super().__call__(spec)


def test_a_candidate_that_a_lower_limit_leaves_where_it_was_stopped_has_not_failed(
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fake_search(fake_config(trials=8), tmp_path, worker=Stopped)
    outcome = fake_search(fake_config(trials=5), tmp_path)
    assert (len(outcome.last.search), outcome.failed) == (6, 0)
    outcome = fake_search(fake_config(trials=8), tmp_path)
    assert (len(outcome.last.search), outcome.failed) == (8, 0)


def test_more_trials_and_more_scores_leave_the_seeds_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sources(trials: int) -> list[str]:
        outcome = fake_search(fake_config(trials=trials), tmp_path)
        assert len({c.head_map for c in outcome.rungs[0].search}) == trials
        return [c.source for c in outcome.rungs[0].search]

    first = sources(12)
    assert 4 < first.index("search") <= 6
    # As search.retention may have asked for them.
    monkeypatch.setitem(SCORES, "attribution", score_tables([row[::-1] for row in CAUSAL], 2))
    assert sources(30) == first + ["search"] * 18


def test_minutes_count_from_the_first_call_whatever_limit_that_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = FakeClock(monkeypatch).worker(lambda spec: 30)

    fake_search(fake_config(trials=6), tmp_path, worker=slow)
    limited = fake_search(fake_config(trials=20, max_minutes=5.0), tmp_path, worker=slow)
    assert len(limited.rungs[0].search) == 10
    # Each proxy gets its share of what is added, though the later one has used time already.
    options = {"trials": 40, "proxy_tokens": [0, 100]}
    for minutes, count in ((4.0, 4), (8.0, 8)):
        outcome = fake_search(
            fake_config(**options, max_minutes=minutes), tmp_path / "b", worker=slow
        )
        assert len(outcome.rungs[0].search) == count


def test_all_calls_together_keep_within_a_limit_that_later_proxies_have_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(monkeypatch)

    class Priced(clock.worker(lambda spec: 60 if spec.proxy_tokens else 6)):
        def __call__(self, spec: Any) -> Any:
            # The second proxy goes on from where the rate of the first had not fallen yet.
            price = {0: 0, 50: 50, 100: 100, 200: 160}[spec.proxy_tokens]
            return replace(super().__call__(spec), tokens=price)

    # Few candidates leave the first proxy's share to the second one.
    few: dict[str, Any] = {"trials": 5, "proxy_tokens": [0, 100]}
    used = clock.now
    for limit in (
        {"max_minutes": 4.0},
        {"max_tokens": 420, "proxy_tokens": [50, 200], "trials": 2},
    ):
        priced = "max_tokens" in limit
        folder = tmp_path / next(iter(limit))
        fake_search(fake_config(**few | limit), folder, worker=Priced)
        fake_search(fake_config(**few | limit | {"trials": 40}), folder, worker=Priced)
        if not priced:
            # What runs when the limit is reached may end.
            assert 4 * 60 <= clock.now - used < 5 * 60
        spent = sum(
            trial.user_attrs["spent"]["tokens"]
            for name in ("fake@50", "fake@200")
            if (study := find_study(open_storage(f"sqlite:///{folder}/study.db"), name, SHAPE))
            for trial in study.trials()
            if "spent" in trial.user_attrs
        )
        assert 320 < spent <= 420 or not priced
