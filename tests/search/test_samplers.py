"""The contract of every sampler: in range, the same for the same seed, and told about constraints."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import get_args

import optuna
import pytest

from archsearch.config import SearchConfig
from archsearch.errors import EnvironmentFault
from archsearch.search import samplers
from archsearch.search.proposals.choice import BIT_SAMPLERS
from archsearch.search.samplers import (
    SAMPLERS,
    admit,
    derive_seed,
    distributions,
    make_sampler,
    quiet_optuna,
    record_violations,
    recorded_violations,
)

SPACE = distributions(2, 30)
quiet_optuna()


# The slow one is tried once, below.
@pytest.fixture(params=sorted(SAMPLERS.keys() - {"gp"}))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fill(name: str, seed: int, trials: int = 14) -> list[dict[str, float]]:
    """Parameters of a study that prefers few FA heads and a mix of one half."""
    study = optuna.create_study(directions=["minimize", "minimize"])
    for number in range(trials):
        study.sampler = make_sampler(
            name, derive_seed(seed, number), trials=trials, constrained=True
        )
        trial = study.ask(SPACE)
        record_violations(trial, ["0:kl"], [trial.params["fa_heads"] - 20.0])
        study.tell(trial, [trial.params["fa_heads"], (trial.params["mix"] - 0.5) ** 2])
    return [trial.params for trial in study.trials]


def test_every_sampler_of_the_config_exists() -> None:
    named = set(get_args(SearchConfig.model_fields["sampler"].annotation))
    assert {*SAMPLERS, *BIT_SAMPLERS} == named


def test_a_sampler_chooses_what_it_can() -> None:
    for representation in ("ranked", "groups", "free"):
        allowed = SAMPLERS if representation == "ranked" else BIT_SAMPLERS
        for sampler in (*SAMPLERS, *BIT_SAMPLERS):
            data = {"representation": representation, "sampler": sampler}
            if sampler in allowed:
                SearchConfig.model_validate(data)
            else:
                with pytest.raises(ValueError, match="allowed"):
                    SearchConfig.model_validate(data)


def test_gp_chooses_within_range() -> None:
    points = fill("gp", 0, trials=6)
    assert len(points) == 6
    assert all(2 <= point["fa_heads"] <= 30 for point in points)


def test_gp_says_nothing_of_what_would_make_it_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[logging.LogRecord]()
    listener = logging.Handler()
    monkeypatch.setattr(listener, "emit", said.append)
    logging.getLogger("optuna").addHandler(listener)
    make_sampler("gp", 0, trials=8, constrained=False)
    monkeypatch.setitem(sys.modules, "greenlet", None)
    monkeypatch.delitem(sys.modules, "optuna._gp.batched_lbfgsb", raising=False)
    importlib.import_module("optuna._gp.batched_lbfgsb")
    logging.getLogger("optuna").removeHandler(listener)
    assert not said


def test_gp_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="scipy and torch, which are not installed"):
        make_sampler("gp", 0, trials=8, constrained=False)


def test_points_are_in_range_and_follow_the_seed(name: str) -> None:
    first = fill(name, 1)
    assert first == fill(name, 1)
    assert first != fill(name, 2)
    assert all(2 <= point["fa_heads"] <= 30 and 0 <= point["mix"] <= 1 for point in first)
    assert len({tuple(point.values()) for point in first}) > 10


def test_a_range_of_one_value_is_fine(name: str) -> None:
    study = optuna.create_study(directions=["minimize"])
    for number in range(6):
        study.sampler = make_sampler(name, number, trials=6, constrained=False)
        trial = study.ask(distributions(0, 0))
        assert trial.params["fa_heads"] == 0
        study.tell(trial, trial.params["mix"])


def test_seeds_of_a_genetic_sampler_are_parents() -> None:
    study = optuna.create_study(directions=["minimize", "minimize"])
    best = {"fa_heads": 7, "mix": 0.25, "tilt": 0.5, "grouping": 0.75}
    for number in range(8):
        study.sampler = make_sampler("nsga2", number, trials=24, constrained=False)
        given = number < 4
        if given:
            study.enqueue_trial(best)
        trial = study.ask(SPACE)
        if given:
            admit(study, trial)
        study.tell(trial, [0.0, 0.0])
    later = study.trials[4:]
    shared = [sum(trial.params[key] == best[key] for key in best) for trial in later]
    assert sum(shared) >= 8


def test_a_trial_without_constraint_values_is_infeasible() -> None:
    study = optuna.create_study()
    study.tell(study.ask(), 1.0)
    assert max(recorded_violations(study.trials[0])) > 0


def test_derived_seeds_differ_by_every_part() -> None:
    seeds = {derive_seed(1), derive_seed(1, 2), derive_seed(1, 2, "a"), derive_seed(12)}
    assert len(seeds) == 4
