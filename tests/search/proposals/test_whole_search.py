"""Bits through the whole driver: counted, resumed after kills to the same front, stored as one user attribute."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import optuna
import pytest

from archsearch.execution.ray_executor import RayExecutor
from archsearch.rundir import RunDir
from archsearch.search.driver import run_search
from archsearch.search.outcome import SearchOutcome
from tests.search.fakes import SCORES, SHAPE, FakeWorker, fake_config, fake_search, killed_searches

TRIALS = 24


@pytest.fixture(params=[("free", "guided"), ("groups", "guided"), ("free", "random")], ids="-".join)
def search(request: pytest.FixtureRequest) -> dict[str, Any]:
    representation, sampler = request.param
    return {"representation": representation, "sampler": sampler, "trials": TRIALS}


def front_of(outcome: SearchOutcome) -> list[tuple[int, tuple[str, ...]]]:
    return [(c.candidate, c.head_map.layers) for c in outcome.fronts.points]


def maps_of(folder: Path) -> list[str]:
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}")
    trials = optuna.load_study(study_name="fake@0", storage=storage).get_trials()
    assert all(not trial.params for trial in trials)
    done = [trial for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE]
    return [trial.user_attrs["head_map"] for trial in done]


def test_killed_and_resumed_it_finds_the_same_front(tmp_path: Path, search: dict[str, Any]) -> None:
    whole = fake_search(fake_config(**search), tmp_path / "whole")
    folder = tmp_path / "killed"
    # The worker dies, and in this process the driver with it: in a seed, and among proposals.
    assert killed_searches(folder, search, (2, 11, 20)) == [-signal.SIGKILL] * 3
    resumed = fake_search(fake_config(**search), folder, said=[])
    assert front_of(resumed) == front_of(whole)
    assert len(set(maps_of(folder))) == len(maps_of(folder)) == TRIALS


@pytest.mark.usefixtures("shared_ray")
def test_several_workers_never_evaluate_a_map_twice(tmp_path: Path) -> None:
    config = fake_config(representation="free", sampler="guided", trials=TRIALS)
    payload = {"log": str(tmp_path / "calls.jsonl")}
    with RunDir(tmp_path) as run_dir:
        run_dir.freeze_config(config)
        outcome = run_search(
            config,
            run_dir,
            SHAPE,
            SCORES,
            make_executor=lambda: RayExecutor(FakeWorker, payload, workers=2, threads=1),
        )
    assert len(outcome.rungs[0].search) == TRIALS
    assert len(set(maps_of(tmp_path))) == TRIALS
