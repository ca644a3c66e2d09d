"""The search as a whole, with made-up metrics: counts, retries, kills, resumption, determinism, rungs."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from archsearch.config import ConstraintConfig
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.execution.ray_executor import RayExecutor
from archsearch.headmap import HeadMap
from archsearch.rundir import RunDir
from archsearch.search.driver import run_search
from archsearch.search.outcome import SearchOutcome, read_outcome
from tests.search.fakes import (
    SCORES,
    SHAPE,
    FakeWorker,
    fake_config,
    fake_search,
    going_on,
    killed_searches,
    read_log,
)


def trials_of(folder: Path, name: str = "fake@0") -> list[optuna.trial.FrozenTrial]:
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}")
    return optuna.load_study(study_name=name, storage=storage).get_trials()


def front_of(outcome: SearchOutcome) -> list[tuple[int, tuple[str, ...], float]]:
    return [(c.candidate, c.head_map.layers, c.metrics["kl"]) for c in outcome.fronts.points]


def assert_exact(outcome: SearchOutcome, folder: Path, trials: int) -> None:
    """Every candidate ended once, no head map was evaluated for two of them, nothing is left open."""
    found = [c.candidate for c in outcome.rungs[0].search]
    failed = [f.candidate for f in outcome.rungs[0].failures]
    assert sorted(found + failed) == list(range(trials))
    maps = {t.user_attrs["candidate"]: t.user_attrs["head_map"] for t in trials_of(folder)}
    assert len(set(maps.values())) == trials
    assert all(trial.state.is_finished() for trial in trials_of(folder))


def test_seeds_come_first_and_no_map_comes_twice(tmp_path: Path) -> None:
    outcome = fake_search(fake_config(), tmp_path)
    assert_exact(outcome, tmp_path, 8)
    assert [c.source for c in outcome.rungs[0].search] == [
        *("all_full", "all_gdn", "causal", "random"),
        *["search"] * 4,
    ]
    assert outcome.failed == 0
    assert max(len(trial.params) for trial in trials_of(tmp_path)) == 4


def test_what_is_written(tmp_path: Path) -> None:
    outcome = fake_search(fake_config(), tmp_path)
    pareto = json.loads((tmp_path / "pareto.json").read_text())
    assert pareto["schema"] == 1
    assert [o["metric"] for o in pareto["objectives"]] == ["kl", "cache_bytes"]
    assert pareto["hypervolume"] >= pareto["seeds"]["hypervolume"] > 0
    for point in pareto["points"]:
        saved = HeadMap.load(tmp_path / f"front/{point['candidate']}.json")
        assert saved == HeadMap.from_json(point["head_map"])
    rung = json.loads((tmp_path / "trials.json").read_text())["rungs"][0]
    assert len(rung["candidates"]) == 8
    assert sum(c["on_front"] for c in rung["candidates"]) == len(pareto["points"])
    assert "hypervolume: front" in outcome.summary


def test_failures_are_retried_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    faults = {
        "2": ["raise"],
        "4": ["raise", "raise"],
        "5": ["nan"],
        "6": ["missing"],
        "7": ["pruned"],
    }
    outcome = fake_search(fake_config(max_retries=1), tmp_path, said=said, faults=faults)
    assert_exact(outcome, tmp_path, 8)
    assert {f.candidate: f.reason for f in outcome.rungs[0].failures} == {
        4: "ValueError: broken",
        5: "non-finite: kl",
        6: "the worker left out kl",
        7: "worse than half of its rung",
    }
    assert outcome.failed == 4
    calls = Counter(call["candidate"] for call in read_log(tmp_path / "calls.jsonl"))
    assert {number for number, count in calls.items() if count == 2} == {2, 4}
    assert "candidate 2 (causal) failed: ValueError: broken; it is tried again" in said
    (retry,) = [t for t in trials_of(tmp_path) if t.user_attrs["candidate"] == 2 and t.values]
    first = trials_of(tmp_path)[retry.user_attrs["retry_of"]]
    assert (first.state, first.user_attrs["reason"]) == (TrialState.FAIL, "ValueError: broken")
    assert retry.user_attrs["head_map"] == first.user_attrs["head_map"]
    assert [t.state for t in trials_of(tmp_path)].count(TrialState.PRUNED) == 1
    kept = [json.loads(path.read_text()) for path in (tmp_path / "failed").iterdir()]
    assert {replay["spec"]["candidate"] for replay in kept} == {2, 4, 5, 6, 7}


def test_a_failed_map_is_never_on_the_front(tmp_path: Path) -> None:
    outcome = fake_search(fake_config(), tmp_path, faults={"0": ["nan"], "1": ["nan"]})
    assert not {0, 1} & {c.candidate for c in outcome.fronts.points}


def test_out_of_memory_is_tried_once_more_without_retries(tmp_path: Path) -> None:
    config = fake_config(max_retries=0)
    outcome = fake_search(config, tmp_path, faults={"3": ["memory"], "4": ["memory", "memory"]})
    assert_exact(outcome, tmp_path, 8)
    assert [f.candidate for f in outcome.rungs[0].failures] == [4]


def test_what_is_no_candidates_fault_ends_the_run_and_costs_no_try(tmp_path: Path) -> None:
    config, faults = fake_config(max_retries=0), {"3": ["gone", "gone"], "5": ["nan"]}
    for _ in range(2):
        with pytest.raises(
            EnvironmentFault, match=r"^candidate 3 \(random\): .*train\.npy.*again$"
        ):
            fake_search(config, tmp_path, faults=faults)
    assert all(trial.state.is_finished() for trial in trials_of(tmp_path))
    outcome = fake_search(config, tmp_path, faults=faults)
    assert_exact(outcome, tmp_path, 8)
    assert [f.candidate for f in outcome.rungs[0].failures] == [5]
    tries = [t for t in trials_of(tmp_path) if t.user_attrs["candidate"] == 3]
    assert [t.user_attrs.get("reason", "")[:13] for t in tries] == ["not its fault"] * 2 + [""]
    whole = fake_search(config, tmp_path / "whole", faults={"5": ["nan"]})
    assert front_of(outcome) == front_of(whole)


def test_memory_that_nothing_is_left_of_is_the_machines_fault(tmp_path: Path) -> None:
    """Two in a row may be large; those of an earlier call are tried again alone, since more may be free."""
    config = fake_config(max_retries=0)
    faults = {str(number): ["memory", "memory"] for number in (2, 3, 4)}
    with pytest.raises(EnvironmentFault, match=r"^candidates 2, 3, 4 ran out of memory one after"):
        fake_search(config, tmp_path, faults=faults)
    outcome = fake_search(config, tmp_path, faults=faults)
    assert_exact(outcome, tmp_path, 8)
    assert outcome.failed == 0


def test_same_seed_same_front_and_more_trials_extend_it(tmp_path: Path) -> None:
    first = fake_search(fake_config(), tmp_path / "a")
    second = fake_search(fake_config(), tmp_path / "b")
    assert front_of(first) == front_of(second)
    longer = fake_search(fake_config(trials=10), tmp_path / "a")
    assert_exact(longer, tmp_path / "a", 10)
    assert len(read_log(tmp_path / "a/calls.jsonl")) == 10
    again = fake_search(fake_config(trials=10), tmp_path / "a")
    assert len(read_log(tmp_path / "a/calls.jsonl")) == 10
    assert front_of(again) == front_of(longer)


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_kill_and_resume_reach_the_same_front(tmp_path: Path, sampler: str) -> None:
    search = {"sampler": sampler, "trials": 10}
    whole = fake_search(fake_config(**search), tmp_path / "whole")
    folder = tmp_path / "killed"
    # The worker dies, and in this process the driver with it: once in a seed, twice after the seeds.
    assert killed_searches(folder, search, (2, 6, 8)) == [-signal.SIGKILL] * 3
    said: list[str] = []
    resumed = fake_search(fake_config(**search), folder, said=said)
    assert said == ["fake@0: requeued after an interruption: candidate 8"]
    assert_exact(resumed, folder, 10)
    assert len(read_log(folder / "calls.jsonl")) == 10 + 3
    assert front_of(resumed) == front_of(whole)


@pytest.mark.parametrize("step", ["begin", "note", "end"])
@pytest.mark.parametrize("times", [2, 6])
def test_a_kill_between_two_writes_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, times: int
) -> None:
    """The driver stops dead right after one write: no clean-up runs, as after a SIGKILL."""
    config = fake_config(constraints=[{"metric": "kl", "max": 30.0}])
    whole = fake_search(config, tmp_path / "whole")
    stop_after(monkeypatch, step, times)
    with pytest.raises(Killed):
        fake_search(config, tmp_path / "killed")
    monkeypatch.undo()
    resumed = fake_search(config, tmp_path / "killed", said=[])
    found = [c.candidate for c in resumed.rungs[0].search]
    assert found == list(range(8))
    assert front_of(resumed) == front_of(whole)
    assert all(trial.state.is_finished() for trial in trials_of(tmp_path / "killed"))


class Killed(BaseException):
    """Stands for the end of the process."""


def stop_after(monkeypatch: pytest.MonkeyPatch, step: str, times: int) -> None:
    from archsearch.search.study import RungStudy

    real, calls = getattr(RungStudy, step), Counter[str]()

    def stopping(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        calls[step] += 1
        if calls[step] == times:
            raise Killed
        return result

    monkeypatch.setattr(RungStudy, step, stopping)
    close = RungStudy.close_open_trials

    def close_at_start_only(self: RungStudy, reason: str) -> Any:
        return [] if reason == "interrupted" else close(self, reason)

    monkeypatch.setattr(RungStudy, "close_open_trials", close_at_start_only)


def test_an_interrupted_driver_leaves_nothing_running(tmp_path: Path) -> None:
    class Interrupting(FakeWorker):
        def __call__(self, spec: Any) -> Any:
            if spec.candidate == 5:
                raise KeyboardInterrupt
            return super().__call__(spec)

    from archsearch.execution.serial import SerialExecutor

    config = fake_config()
    payload = {"log": str(tmp_path / "calls.jsonl")}
    with RunDir(tmp_path) as run_dir, pytest.raises(KeyboardInterrupt):
        run_search(
            config,
            run_dir,
            SHAPE,
            SCORES,
            make_executor=lambda: SerialExecutor(Interrupting, payload),
        )
    assert [t.user_attrs["reason"] for t in trials_of(tmp_path) if not t.values] == ["interrupted"]
    assert_exact(fake_search(config, tmp_path), tmp_path, 8)


def test_later_rungs_take_the_fronts_of_the_one_before(tmp_path: Path) -> None:
    config = fake_config(proxy_tokens=[0, 100], random_control=True)
    steps: list[tuple[int, int]] = []
    with RunDir(tmp_path) as run_dir:
        outcome = run_search(
            config,
            run_dir,
            SHAPE,
            SCORES,
            lambda done, total: steps.append((done, total)),
            make_executor=lambda: serial(tmp_path),
        )
    first, second = outcome.rungs
    promoted, control = going_on(first.fronts)
    assert [c.candidate for c in second.search] == [c.candidate for c in promoted]
    assert [c.candidate for c in second.control] == [c.candidate for c in control]
    assert len(first.control) == 8
    assert all(c.source == "random-control" for c in first.control)
    assert outcome.fronts.proxy_tokens == 100
    for before in promoted:
        (after,) = [c for c in second.search if c.candidate == before.candidate]
        assert after.head_map == before.head_map
        assert after.metrics["kl"] == pytest.approx(before.metrics["kl"] / 2)
    for found, rows in ((first.search, second.pruned[0]), (first.control, second.pruned[1])):
        on = {c.candidate for c in (promoted if found is first.search else control)}
        assert [row.candidate for row in rows] == [
            c.candidate for c in found if c.candidate not in on
        ]
        assert {row.reason for row in rows} <= {"on no front after 0 tokens"}
    groups = (first.search, first.control, promoted, control)
    assert steps == [(over + 1, len(group)) for group in groups for over in range(len(group))]
    assert {c["proxy_tokens"] for c in read_log(tmp_path / "calls.jsonl")} == {0, 100}
    read = read_outcome(config, RunDir(tmp_path), SHAPE)
    assert [rung.to_json() for rung in read.rungs] == [rung.to_json() for rung in outcome.rungs]


def halved(**more: Any) -> Any:
    options = {"keep": 0.5, "bands": 2, "floor": 1, "seeds": False}
    return fake_config(**{"trials": 16, "proxy_tokens": [0, 100, 300], "halving": options, **more})


def test_halving_goes_from_proxy_to_proxy_and_names_who_stays_behind(tmp_path: Path) -> None:
    outcome = fake_search(halved(), tmp_path)
    front = {c.candidate for c in outcome.rungs[1].fronts.points}
    assert [len(rung.search) for rung in outcome.rungs] == [16, 8, max(4, len(front))]
    assert front <= {c.candidate for c in outcome.rungs[2].search}
    assert outcome.failed == 0
    trials = json.loads((tmp_path / "trials.json").read_text())["rungs"]
    for before, after, tokens in zip(trials, trials[1:], (0, 100), strict=False):
        numbers = [row["candidate"] for row in (*after["candidates"], *after["pruned"])]
        assert sorted(numbers) == sorted(row["candidate"] for row in before["candidates"])
        assert all(row["reason"].startswith("halving: rank ") for row in after["pruned"])
        marks = [
            trial
            for trial in trials_of(tmp_path, f"fake@{after['proxy_tokens']}")
            if trial.state == TrialState.PRUNED
        ]
        assert [mark.user_attrs["pruned_after"] for mark in marks] == [tokens] * len(marks)
        assert [
            m.user_attrs["reason"] for m in sorted(marks, key=lambda m: m.user_attrs["candidate"])
        ] == [row["reason"] for row in after["pruned"]]
    before = trials_of(tmp_path, "fake@100")
    fake_search(halved(), tmp_path)
    assert trials_of(tmp_path, "fake@100") == before


def test_more_trials_may_bring_back_who_was_pruned(tmp_path: Path) -> None:
    first = fake_search(halved(), tmp_path)
    longer = fake_search(halved(trials=28), tmp_path)
    for rung in longer.rungs[1:]:
        went = {c.candidate for c in rung.search}
        assert not went & {row.candidate for row in rung.pruned[0]}
        assert went >= {c.candidate for c in first.rungs[longer.rungs.index(rung)].search}
    everyone = {c.candidate for c in longer.rungs[0].search}
    reached = {c.candidate for c in longer.rungs[1].search}
    assert reached | {row.candidate for row in longer.rungs[1].pruned[0]} == everyone
    calls = Counter((c["candidate"], c["proxy_tokens"]) for c in read_log(tmp_path / "calls.jsonl"))
    assert set(calls.values()) == {1}


def test_distillation_goes_on_from_the_rung_before(tmp_path: Path) -> None:
    fake_search(fake_config(proxy_tokens=[0, 100, 300]), tmp_path)
    calls = read_log(tmp_path / "calls.jsonl")
    assert all(call["parent"] is None for call in calls if call["proxy_tokens"] < 300)
    last = [call for call in calls if call["proxy_tokens"] == 300]
    assert len(last) > 2
    for call in last:
        weights = str(tmp_path / "trials" / f"{call['candidate']}-100.safetensors")
        assert call["parent"] == (weights if call["candidate"] else None)


def serial(folder: Path) -> Any:
    from archsearch.execution.serial import SerialExecutor

    return SerialExecutor(FakeWorker, {"log": str(folder / "calls.jsonl")})


def test_bounds_that_no_map_meets_are_named_with_the_nearest_value(tmp_path: Path) -> None:
    limits = [{"metric": "kl", "max": 1e-6}, {"metric": "fa_share", "max": 0.9}]
    outcome = fake_search(fake_config(constraints=limits), tmp_path)
    assert not outcome.fronts.points
    assert outcome.last.unmet is not None
    said = outcome.last.unmet
    count, values = len(outcome.last.search), [c.metrics for c in outcome.last.search]
    meets = [[row["kl"] <= 1e-6 for row in values], [row["fa_share"] <= 0.9 for row in values]]
    least = min(row["kl"] for row, met in zip(values, meets[1], strict=True) if met)
    share = min(row["fa_share"] for row, met in zip(values, meets[0], strict=True) if met)
    assert said == (
        f"no head map (untrained) meets search.constraints: kl at most 1e-06 met by {sum(meets[0])} of {count}, "
        f"the nearest that meets the others has {least:.4g}; fa_share at most 0.9 met by {sum(meets[1])} of {count}, "
        f"the nearest that meets the others has {share:.4g}"
    )
    assert said in outcome.summary
    later = fake_search(fake_config(constraints=limits, proxy_tokens=[0, 100]), tmp_path / "later")
    assert later.last.unmet == said
    assert later.lines[-1].startswith("no result at 100 tokens: none goes on from an empty front; ")


def test_the_only_bound_names_the_nearest_of_all_and_large_numbers_in_full(tmp_path: Path) -> None:
    last = fake_search(fake_config(), tmp_path).last
    kept = [replace(c, feasible=False) for c in last.search if c.source != "all_gdn"]
    least = min(c.metrics["cache_bytes"] for c in kept)
    bound = ConstraintConfig(metric="cache_bytes", max=1_000_000)
    assert least > 1_000_000
    found = replace(last, search=kept, constraints=(bound,)).unmet
    assert found is not None
    assert found.endswith(
        f": cache_bytes at most 1000000 met by 0 of {len(kept)}, the nearest has {least:.0f}"
    )


def test_constraints_keep_maps_off_the_front_and_out_of_the_search(tmp_path: Path) -> None:
    limits = [{"metric": "fa_share", "max": 0.5}, {"metric": "kl", "max": 12.0}]
    outcome = fake_search(fake_config(constraints=limits), tmp_path)
    by_number = {c.candidate: c for c in outcome.rungs[0].search}
    assert not by_number[0].feasible  # all_full is a baseline all the same
    assert all(c.metrics["fa_share"] <= 0.5 for c in by_number.values() if c.source == "search")
    for point in outcome.fronts.points:
        assert point.metrics["kl"] <= 12
        assert point.metrics["fa_share"] <= 0.5


BOUNDS = [
    [{"metric": "fa_share", "max": 0.25}],
    [{"metric": "cache_bytes", "max": 9_000_000}],
    [{"metric": "fa_share", "min": 0.2, "max": 0.6}, {"metric": "cache_bytes", "max": 12_000_000}],
]


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("objectives", [1, 2, 3])
def test_bounds_on_costs_are_met_before_anything_is_evaluated(
    tmp_path: Path, bounds: list[dict[str, Any]], objectives: int
) -> None:
    goals = [
        {"metric": "kl", "direction": "minimize"},
        {"metric": "cache_bytes", "direction": "minimize"},
        {"metric": "niah_multikey_match", "direction": "maximize"},
    ][:objectives]
    seeds = {"methods": ["all_full", "causal", "random"], "fa_shares": [0.75, 0.25]}
    said: list[str] = []
    outcome = fake_search(
        fake_config(constraints=bounds, objectives=goals, seeds=seeds, random_control=True),
        tmp_path,
        said=said,
    )
    for candidate in (*outcome.rungs[0].search, *outcome.rungs[0].control):
        if candidate.source != "all_full":
            assert candidate.feasible
            for bound in bounds:
                value = candidate.metrics[bound["metric"]]
                assert bound.get("min", 0) <= value <= bound["max"]
    assert len(outcome.rungs[0].search) == 8
    assert outcome.rungs[0].control
    assert outcome.fronts.points
    (line,) = said
    assert line.startswith("seeds left out, outside search.constraints: causal (")
    assert line.count("random (") >= 1


def test_a_proposal_that_is_known_or_too_costly_is_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from archsearch.search.proposals.base import Proposal
    from archsearch.search.proposals.ranked import RankedProposals

    def again(self: Any, candidate: int, history: Any, busy: Any) -> Proposal:
        return Proposal(history[0].head_map)

    monkeypatch.setattr(RankedProposals, "propose", again)
    with pytest.raises(AssertionError, match="proposed a second time"):
        fake_search(fake_config(), tmp_path / "a")
    limits = [{"metric": "fa_share", "max": 0.5}]
    with pytest.raises(AssertionError, match="proposed outside the bounds"):
        fake_search(fake_config(constraints=limits), tmp_path / "b")
    assert {trial.user_attrs["candidate"] for trial in trials_of(tmp_path / "a")} == {0, 1, 2, 3}


def test_more_trials_than_seeds_leave_room_for_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    outcome = fake_search(fake_config(trials=3), tmp_path, said=said)
    seeds = "search.trials 3: all are seeds, tpe proposes none; the last 1 seeds are left out"
    assert said == [seeds]
    assert len(outcome.rungs[0].search) == 3


def test_a_space_that_runs_out_of_maps_ends_with_a_clear_error(tmp_path: Path) -> None:
    limits = [{"metric": "fa_share", "max": 0.0}]
    with pytest.raises(ConfigError, match="no head map is left"):
        fake_search(fake_config(constraints=limits), tmp_path)
    assert all(trial.state.is_finished() for trial in trials_of(tmp_path))


@pytest.mark.parametrize("content", [b"not a database at all" * 60, b"truncated"])
def test_a_damaged_database_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    database = tmp_path / "study.db"
    if content == b"truncated":
        fake_search(fake_config(trials=4), tmp_path)
        content = database.read_bytes()[:9000]
    database.write_bytes(content)
    with pytest.raises(EnvironmentFault, match=r"study\.db: damaged or no SQLite database"):
        fake_search(fake_config(trials=4), tmp_path)
    assert database.read_bytes() == content


def test_a_reader_does_not_block_the_run(tmp_path: Path) -> None:
    import sqlite3

    fake_search(fake_config(trials=4), tmp_path)
    with sqlite3.connect(tmp_path / "study.db") as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM trials").fetchone()
        start = time.monotonic()
        fake_search(fake_config(trials=6), tmp_path)
        assert time.monotonic() - start < 30
    reader.close()


def test_ray_worker_death_is_retried(tmp_path: Path, shared_ray: None) -> None:
    payload = {"log": str(tmp_path / "calls.jsonl"), "faults": {"2": ["die"], "6": ["die", "die"]}}
    config = fake_config()
    with RunDir(tmp_path) as run_dir:
        outcome = run_search(
            config,
            run_dir,
            SHAPE,
            SCORES,
            make_executor=lambda: RayExecutor(FakeWorker, payload, workers=2, threads=1),
        )
    assert_exact(outcome, tmp_path, 8)
    assert [(f.candidate, f.reason) for f in outcome.rungs[0].failures] == [(6, "worker died")]
