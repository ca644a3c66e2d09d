"""Optuna's samplers by name, for the numbers of `ranked`. Each ask gets a fresh one, seeded from the run's seed and the candidate's number.

A sampler that kept one random stream would replay its first points when a run is resumed.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseGASampler,
    BaseSampler,
    GPSampler,
    NSGAIIISampler,
    NSGAIISampler,
    RandomSampler,
    TPESampler,
)
from optuna.trial import FrozenTrial, Trial

from ..errors import FieldFault

VIOLATIONS = "constraints"
"""User attribute with one number a constraint; a trial is feasible if it is there and none is positive."""

_SETS_CONSTRAINTS = hasattr(Trial, "set_constraint")
"""Optuna 5 keeps constraints in the trial; before, a sampler computes them by a function."""


def derive_seed(seed: int, *parts: object) -> int:
    """A 32-bit seed that depends on all arguments and is the same in every process."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def make_sampler(name: str, seed: int, *, trials: int, constrained: bool) -> BaseSampler:
    """A fresh sampler. trials is the length of the whole study. Raises KeyError on an unknown name."""
    options: dict[str, Any] = {"seed": seed}
    if constrained and not _SETS_CONSTRAINTS:
        options["constraints_func"] = recorded_violations
    return SAMPLERS[name](trials, options)


def _tpe(trials: int, options: dict[str, Any]) -> BaseSampler:
    # Seeds count as start-up trials; constant_liar keeps parallel asks apart.
    return TPESampler(n_startup_trials=min(10, max(1, trials // 4)), constant_liar=True, **options)


def _population(trials: int) -> int:
    """With the usual 50 a short study would end within its first, random generation."""
    return min(50, max(4, trials // 6))


def _nsga2(trials: int, options: dict[str, Any]) -> BaseSampler:
    return NSGAIISampler(population_size=_population(trials), **options)


def _nsga3(trials: int, options: dict[str, Any]) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return NSGAIIISampler(population_size=_population(trials), **options)


def require_packages(name: str) -> None:
    """Raises FieldFault where a sampler's packages are not installed."""
    wanted = ("scipy", "torch") if name == "gp" else ()
    if missing := [package for package in wanted if find_spec(package) is None]:
        raise FieldFault(
            f"search.sampler: gp needs {' and '.join(missing)}, which are not installed; "
            "allowed without: tpe, nsga2, nsga3, random, and guided with representation groups or free"
        )


class _QuietGP(GPSampler):
    """Without numpy's warning where one point is so good that Optuna has no weights for others to start from: it takes none."""

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """As GPSampler."""
        with np.errstate(invalid="ignore"):
            return super().sample_relative(study, trial, search_space)


def _gp(trials: int, options: dict[str, Any]) -> BaseSampler:
    require_packages("gp")
    # It says in the middle of a search that greenlet would make it faster, and at each proposal that it has converged.
    logging.getLogger("optuna._gp").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return _QuietGP(n_startup_trials=min(10, max(1, trials // 4)), **options)


def _random(trials: int, options: dict[str, Any]) -> BaseSampler:
    options.pop("constraints_func", None)
    return RandomSampler(**options)


SAMPLERS: dict[str, Callable[[int, dict[str, Any]], BaseSampler]] = {
    "tpe": _tpe,
    "nsga2": _nsga2,
    "nsga3": _nsga3,
    "gp": _gp,
    "random": _random,
}


def admit(study: optuna.Study, trial: Trial) -> None:
    """Tells a genetic sampler of a trial whose parameters were given, not sampled.

    It breeds only from trials of a generation, and gives one only to those that it samples itself.
    """
    if isinstance(study.sampler, BaseGASampler):
        frozen = study.get_trials(deepcopy=False)[trial.number]
        generation = study.sampler.get_trial_generation(study, frozen)
        # The first call fixes the parents and hands them out in another order than all later ones.
        study.sampler.get_parent_population(study, generation)


def distributions(low: int, high: int) -> dict[str, BaseDistribution]:
    """The parameters of space.Point for between low and high FA heads."""
    return {
        "fa_heads": IntDistribution(low, high),
        "mix": FloatDistribution(0, 1),
        "tilt": FloatDistribution(-1, 1),
        "grouping": FloatDistribution(0, 1),
    }


def record_violations(trial: Trial, names: list[str], values: list[float]) -> None:
    """Stores a trial's constraint values where this Optuna's samplers look for them, and for us."""
    trial.set_user_attr(VIOLATIONS, values)
    if _SETS_CONSTRAINTS:
        for name, value in zip(names, values, strict=True):
            trial.set_constraint(name, value)


def recorded_violations(trial: FrozenTrial) -> list[float]:
    """A trial's constraint values; infeasible where it ended before they were set."""
    values: list[float] = trial.user_attrs.get(VIOLATIONS, [1.0])
    return values


def quiet_optuna() -> None:
    """Leaves only Optuna's warnings: the driver reports each trial itself."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
