"""When a search begins nothing more: minutes, tokens, patience; named, kept over calls, and the same in each."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from archsearch.execution.serial import SerialExecutor
from archsearch.headmap import HeadMap
from archsearch.report.summary import read_summary
from archsearch.report.tables import hypervolume_table
from archsearch.rundir import RunDir
from archsearch.search import stopping
from archsearch.search.driver import run_search
from archsearch.search.front import CONTROL, Candidate, Scale, pareto_front
from archsearch.search.proposals.base import Evaluated
from archsearch.search.stopping import (
    candidate_tokens,
    hypervolume_gain,
    patience_limit,
    standing,
)
from tests.search.fakes import (
    SCORES,
    SHAPE,
    FakeClock,
    FakeWorker,
    fake_config,
    fake_search,
    read_log,
)

TOKENS = {"proxy_tokens": [0, 100, 300], "halving": {"keep": 0.5, "floor": 1, "bands": 2}}


def evaluated(number: int, kl: float, cost: float, *violations: float) -> Evaluated:
    head_map = HeadMap.from_full_heads(SHAPE, SHAPE.heads()[:number])
    return Evaluated(number, head_map, (kl, cost), violations)


def test_gain_is_the_difference_of_two_hypervolumes() -> None:
    rng, config = Random(3), fake_config().search
    for last in (1, 4, 9):
        history = [evaluated(n, rng.random(), rng.random(), rng.random() - 0.7) for n in range(16)]
        history.insert(5, Evaluated(99, history[0].head_map, None))
        candidates = [
            Candidate(
                e.candidate,
                "search",
                {"kl": e.values[0], "cache_bytes": e.values[1]},
                e.head_map,
                max(e.violations) <= 0,
            )
            for e in history
            if e.values is not None
        ]
        scale = Scale.of(config.objectives, candidates)
        known = {e.candidate for e in history[:-last]}
        early = [c for c in candidates if c.candidate in known]
        expected = scale.hypervolume(candidates) - scale.hypervolume(early)
        assert hypervolume_gain(config, history, last) == pytest.approx(expected)
        if pareto_front(candidates, scale) == pareto_front(early, scale):
            assert hypervolume_gain(config, history, last) == 0


def test_patience_waits_for_the_seeds_and_for_something_feasible() -> None:
    limit = patience_limit(fake_config(patience=3).search, num_seeds=2)
    best = [evaluated(0, 0.0, 0.0, -1.0)]
    worse = [evaluated(number, 1.0, 1.0, -1.0) for number in range(1, 6)]
    assert [bool(limit((best + worse)[:n])) for n in range(7)] == [False] * 5 + [True] * 2
    assert not limit([evaluated(number, 1.0, 1.0, 2.0) for number in range(9)])
    better = evaluated(6, -1.0, 1.0, -1.0)
    assert not limit([*best, *worse, better])
    assert patience_limit(fake_config(patience=3, min_gain=0.9).search, 2)([*best, *worse, better])


def test_patience_ends_a_search_the_same_way_in_every_call(tmp_path: Path) -> None:
    options = {"trials": 60, "patience": 4, "random_control": True}
    said: list[str] = []
    outcome = fake_search(fake_config(**options), tmp_path, said=said)
    rung = outcome.rungs[0]
    assert rung.stop is not None
    assert (rung.stop.begun, rung.stop.wanted) == (len(rung.search), 60)
    assert 8 <= len(rung.search) < 60
    assert len(rung.control) == len(rung.search)
    line = f"search stopped at 0 tokens by search.patience 4, no gain in hypervolume above 0: {len(rung.search)} of 60 candidates"
    assert outcome.stops() == [line]
    assert outcome.lines[-1] == (
        f"untrained: {len(rung.search)} of 60 head maps, then search.patience 4, no gain in hypervolume above 0"
    )
    written = json.loads((tmp_path / "trials.json").read_text())["rungs"][0]
    assert written["stopped"] == line.removeprefix("search stopped at 0 tokens by ")
    # The control has as many, which is no end of its own.
    assert rung.control_stop == rung.stop
    calls = read_log(tmp_path / "calls.jsonl")
    again = fake_search(fake_config(**options), tmp_path)
    assert again.lines == outcome.lines
    assert read_log(tmp_path / "calls.jsonl") == calls
    other = fake_search(fake_config(**options), tmp_path / "other")
    assert other.lines == outcome.lines
    patient = fake_search(fake_config(**{**options, "patience": 6}), tmp_path)
    assert len(patient.rungs[0].search) >= len(rung.search) + 2


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("most", [600, 1500, 2500])
def test_tokens_are_never_more_than_allowed(tmp_path: Path, most: int, control: bool) -> None:
    config = fake_config(trials=20, max_tokens=most, random_control=control, **TOKENS)
    config = config.model_copy(
        update={"distill": config.distill.model_copy(update={"decay_share": 1.0})}
    )
    outcome = fake_search(config, tmp_path, worker=CountingWorker)
    calls = [call for call in read_log(tmp_path / "calls.jsonl") if call["proxy_tokens"]]
    spent = sum(CountingWorker.price(call) for call in calls)
    assert spent <= most
    assert spent > 0.5 * most
    for before, after in zip(outcome.rungs, outcome.rungs[1:], strict=False):
        reached = {c.candidate for c in after.search} | {r.candidate for r in after.pruned[0]}
        assert reached == {c.candidate for c in before.search}
        cut = [row for row in after.pruned[0] if row.reason == f"search.max_tokens {most}"]
        assert bool(cut) == (after.stop is not None)
    assert most > 2000 or any(rung.stop for rung in outcome.rungs)
    assert fake_search(config, tmp_path, worker=CountingWorker).lines == outcome.lines
    assert len(read_log(tmp_path / "calls.jsonl")) == len(calls) + 20 * (1 + control)


@pytest.mark.parametrize(("share", "later"), [(1.0, 200), (0.5, 300), (0.2, 240)])
def test_a_later_proxy_is_priced_by_what_it_trains(share: float, later: int) -> None:
    config = fake_config(proxy_tokens=[0, 200, 400])
    distill = config.distill.model_copy(update={"decay_share": share})
    config = config.model_copy(update={"distill": distill})
    assert [candidate_tokens(config, rung) for rung in range(3)] == [0, 200, later]


class CountingWorker(FakeWorker):
    """Says what it spent as a worker does that goes on from its last proxy."""

    def __call__(self, spec: Any) -> Any:
        from dataclasses import replace

        result = super().__call__(spec)
        return replace(result, tokens=self.price(spec.to_json()))

    @staticmethod
    def price(call: dict[str, Any]) -> int:
        before = {0: 0, 100: 0, 300: 100}[call["proxy_tokens"]]
        return int(call["proxy_tokens"]) - before


def test_minutes_are_shared_by_the_proxies_and_counted_over_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(monkeypatch, now=1000.0)

    class Breaking(clock.worker(lambda _: 6)):
        def __call__(self, spec: Any) -> Any:
            if spec.candidate == 3 and broken:
                clock.now += 6
                raise KeyboardInterrupt
            return super().__call__(spec)

    broken = True
    config = fake_config(trials=50, max_minutes=3.0, **TOKENS)
    with pytest.raises(KeyboardInterrupt):
        fake_search(config, tmp_path, worker=Breaking)
    broken = False
    clock.now += 7200  # Nothing ran meanwhile.
    outcome = fake_search(config, tmp_path, worker=Breaking)
    # One minute a proxy at 6 s a candidate; the interrupted try cost 6 s.
    assert len(outcome.rungs[0].search) == 9
    assert [rung.stop for rung in outcome.rungs[1:]] == [None, None]
    first = outcome.rungs[0]
    assert str(first.stop) == "search.max_minutes 3: 9 of 50 candidates"
    assert outcome.failed == 0
    count = len(read_log(tmp_path / "calls.jsonl"))
    assert fake_search(config, tmp_path, worker=Breaking).lines == outcome.lines
    assert len(read_log(tmp_path / "calls.jsonl")) == count
    longer = fake_search(
        fake_config(trials=50, max_minutes=30.0, **TOKENS), tmp_path, worker=Breaking
    )
    assert len(longer.rungs[0].search) > 9
    counts = Counter(
        (c["candidate"], c["proxy_tokens"]) for c in read_log(tmp_path / "calls.jsonl")
    )
    assert max(counts.values()) == 1


def test_a_control_that_ends_for_itself_is_named_beside_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = FakeClock(monkeypatch).worker(lambda spec: 60 if spec.method == CONTROL else 1)

    config = fake_config(trials=20, max_minutes=3.0, random_control=True)
    outcome = fake_search(config, tmp_path, worker=slow)
    rung = outcome.rungs[0]
    assert (len(rung.search), rung.stop) == (20, None)
    assert len(rung.control) == 3
    stop = "search.max_minutes 3: 3 of 20 candidates"
    assert outcome.stops() == [f"random control stopped at 0 tokens by {stop}"]
    assert outcome.lines[-1] == (
        "untrained: all 20 head maps; random control: 3 of 20, then search.max_minutes 3"
    )
    written = json.loads((tmp_path / "trials.json").read_text())["rungs"][0]
    assert (written["stopped"], written["control_stopped"]) == (None, stop)
    (tmp_path / "teacher.json").write_text(json.dumps({"model": asdict(SHAPE)}))
    said = hypervolume_table(read_summary(RunDir(tmp_path))).note
    assert f"The random control stopped at 0 tokens by {stop}." in said
    assert "The search stopped" not in said


def test_what_time_cuts_off_at_a_later_proxy_is_named_and_may_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = FakeClock(monkeypatch).worker(lambda spec: 30 if spec.proxy_tokens else 1)

    config = fake_config(trials=20, max_minutes=3.0, **TOKENS)
    outcome = fake_search(config, tmp_path, worker=slow)
    second = outcome.rungs[1]
    cut = [row.candidate for row in second.pruned[0] if row.reason == "search.max_minutes 3"]
    assert cut
    assert second.stop is not None
    assert {c.candidate for c in second.search}.isdisjoint(cut)
    assert len(second.search) + len(second.pruned[0]) == 20
    longer = fake_search(fake_config(trials=20, max_minutes=30.0, **TOKENS), tmp_path, worker=slow)
    assert {c.candidate for c in longer.rungs[1].search} >= {*cut}
    assert not {row.candidate for row in longer.rungs[1].pruned[0]} & {*cut}
    assert longer.rungs[1].stop is None


def test_where_nobody_may_go_on_the_last_front_that_is_there_stays(tmp_path: Path) -> None:
    config = fake_config(trials=12, max_tokens=10, proxy_tokens=[0, 100])
    outcome = fake_search(config, tmp_path)
    assert outcome.tokens == 0
    assert outcome.fronts.points
    pareto = json.loads((tmp_path / "pareto.json").read_text())
    assert (pareto["proxy_tokens"], len(pareto["points"])) == (0, len(outcome.fronts.points))
    *_, first, second, front = outcome.lines
    assert first == "untrained: all 12 head maps"
    assert second.startswith("100 tokens: 0 of ")
    assert second.endswith(" head maps, then search.max_tokens 10")
    assert front == "no result at 100 tokens: the front is from before (untrained)"


def test_what_a_search_shows_of_itself_is_what_it_ends_with(tmp_path: Path) -> None:
    shown: list[str] = []

    class Seen:
        def begin(self, part: str) -> None:
            shown.append(part)

        def tell(self, said: Any, ends: float | None = None) -> None:
            self.said, self.ends = said, ends

        def __call__(self, done: int, total: int) -> None:
            assert self.ends is not None
            left = round((self.ends - stopping.time.monotonic()) / 60)
            shown.append(f"{done} of {total}, {self.said()}, {left} min left")

    config = fake_config(proxy_tokens=[0, 100], final={"tokens": 300}, max_minutes=9.0)
    folder, seen = tmp_path / "a", Seen()
    with RunDir(folder) as run_dir:
        log = {"log": str(folder / "calls.jsonl")}
        outcome = run_search(
            config,
            run_dir,
            SHAPE,
            SCORES,
            seen,
            watch=seen,
            make_executor=lambda: SerialExecutor(FakeWorker, log),
        )
    parts = [text for text in shown if text.endswith(":")]
    assert parts == [
        "proxy 1 of 2, untrained:",
        "proxy 2 of 2, 100 tokens:",
        "final stage, 300 tokens:",
    ]
    for number, rung in enumerate(outcome.rungs):
        volume = rung.fronts.hypervolumes()["front"]
        count = len(rung.search)
        said = f"{count} of {count}, hypervolume {volume:.4f}, {3 * (number + 1)} min left"
        assert said in shown


def test_with_one_objective_the_best_feasible_value_is_shown() -> None:
    lower = fake_config(objectives=[{"metric": "kl", "direction": "minimize"}]).search
    higher = fake_config(objectives=[{"metric": "fa_share", "direction": "maximize"}]).search
    history = [
        evaluated(n, kl, 0.0, out) for n, kl, out in ((0, 1.0, 1.0), (1, 2.0, 0.0), (2, 3.0, -1))
    ]
    assert standing(lower, history) == "kl 2 at best"
    assert standing(higher, history) == "fa_share 3 at best"
    assert standing(higher, history[:1]) == "nothing feasible yet"


def test_what_failed_at_a_later_proxy_is_in_the_last_lines(tmp_path: Path) -> None:
    options = {"proxy_tokens": [0, 100], "final": {"tokens": 300}, "max_retries": 0}

    class Failing(FakeWorker):
        def __call__(self, spec: Any) -> Any:
            if spec.proxy_tokens:
                raise ValueError("broken")
            return super().__call__(spec)

    outcome = fake_search(fake_config(**options), tmp_path, worker=Failing)
    count = len(outcome.rungs[1].failures)
    assert count > 1
    assert outcome.lines[2:] == [
        "untrained: all 8 head maps",
        f"100 tokens: all {count} head maps, {count} failed",
        "the final 300 tokens: none",
        "no result at 100 tokens, the final 300 tokens: the front is from before (untrained)",
    ]
