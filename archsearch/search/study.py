"""One Optuna study a rung: opening it safely, writing trials in steps that survive a kill, reading them back."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from ..changes import describe_changes, differences
from ..config import RunConfig
from ..errors import ConfigError
from ..headmap import HeadMap, ModelShape
from ..passwords import shown_config
from ..rundir import RESUMABLE, RunDir
from .front import SEARCH, Candidate
from .ownership import check_owner, mark_begun, take_ownership
from .promotion import Pruned
from .proposals.base import Evaluated
from .samplers import VIOLATIONS, record_violations, recorded_violations
from .stopping import Stop
from .storage import (
    holds_studies,
    keep_password,
    open_storage,
    storage_faults,
    storage_url,
)

ORPHANED = "orphaned"
INTERRUPTED = "interrupted"
OUTSIDE = "not its fault"
UNCOUNTED = (ORPHANED, INTERRUPTED, OUTSIDE)
"""Reasons, or how they begin, of a try that ended for no reason of its candidate's: it does not count."""
PRUNED_AFTER = "pruned_after"
"""User attribute of a trial that was never begun: the tokens after which its candidate did not go on."""
STOPPED, SECONDS = "stopped", "seconds"
"""User attributes of a study: its Stop, and of the first one the seconds that the search has taken, by rung and group."""


@dataclass(frozen=True)
class Failure:
    """A candidate that has no result after its last try."""

    candidate: int
    method: str
    reason: str


@dataclass(frozen=True)
class OpenTrial:
    """A trial that runs, with what is written of it so far."""

    trial_id: int
    number: int
    params: Mapping[str, Any]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class PrunedRow:
    """A candidate that did not get as far as a rung, and why."""

    candidate: int
    method: str
    reason: str


def study_name(config: RunConfig, tokens: int, *, control: bool = False) -> str:
    """The name of a rung's study, or of its random control's."""
    return f"{config.name}{'-random' if control else ''}@{tokens}"


def open_study(storage: BaseStorage, name: str, config: RunConfig, run_dir: RunDir) -> optuna.Study:
    """Creates or loads a study for the run directory, which is locked.

    Raises ConfigError where it belongs to another run directory, or to a search with another config.
    """
    study = claim_study(storage, name, config, run_dir)
    mark_begun(run_dir)
    objectives, described = config.search.objectives, shown_config(config)
    stored = study.user_attrs.get("config")
    if stored is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names([objective.metric for objective in objectives])
        study.set_user_attr("config", described)
        return study
    changes = {
        key: pair
        for key, pair in differences(_as_read_now(stored), described).items()
        if not key.startswith((*RESUMABLE, "search.storage"))
    }
    if changes:
        raise ConfigError(
            f"study {name} exists and was made with another config ({describe_changes(changes)}). Choose another `name`, or "
            "another search.storage; the old study stays as it is"
        )
    return study


def claim_study(
    storage: BaseStorage, name: str, config: RunConfig, run_dir: RunDir
) -> optuna.Study:
    """The study of that name, which belongs to this run directory from here on. Raises ConfigError where it is another's."""
    options: dict[str, Any] = {
        "study_name": name,
        "storage": storage,
        # It never proposes: search.proposals does.
        "sampler": optuna.samplers.RandomSampler(seed=0),
    }
    directions = [objective.direction for objective in config.search.objectives]
    try:
        study = optuna.create_study(directions=directions, **options)
        is_new = True
    except DuplicatedStudyError:
        study, is_new = optuna.load_study(**options), False
    take_ownership(study, run_dir, config, is_new=is_new)
    return study


def claim_first_study(config: RunConfig, run_dir: RunDir) -> None:
    """Takes the run's place in a storage that other runs may use too, before any work; the run directory is locked.

    Raises ConfigError where the study is another run's, EnvironmentFault where the storage cannot be written.
    """
    if config.search.storage is None:
        return
    url = storage_url(config, run_dir)
    name = study_name(config, config.search.lengths[0])
    with storage_faults(url):
        claim_study(open_storage(url), name, config, run_dir)
    keep_password(config, run_dir)


def check_studies(config: RunConfig, run_dir: RunDir) -> None:
    """Checks that what the storage has of this run's studies is its own; no tables are made in it.

    Raises ConfigError where it is another's, EnvironmentFault where it is damaged.
    """
    url = storage_url(config, run_dir)
    if not holds_studies(url):
        return
    with storage_faults(url):
        storage = open_storage(url)
        for tokens in config.search.lengths:
            for control in (False, True):
                with contextlib.suppress(KeyError):
                    name = study_name(config, tokens, control=control)
                    study = optuna.load_study(study_name=name, storage=storage)
                    check_owner(study, run_dir, config)


def _as_read_now(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored config with the defaults of fields that are new since; as it is where it is none of today's."""
    try:
        config = RunConfig.model_validate_json(json.dumps(stored))
    except ValueError:
        return stored
    read: dict[str, Any] = json.loads(config.model_dump_json(by_alias=True))
    return read


def find_study(storage: BaseStorage, name: str, shape: ModelShape) -> RungStudy | None:
    """A study that exists, for reading; None where there is none of that name."""
    try:
        return RungStudy(optuna.load_study(study_name=name, storage=storage), storage, shape)
    except KeyError:
        return None


class RungStudy:
    """A study together with the shape that its head maps belong to."""

    def __init__(self, study: optuna.Study, storage: BaseStorage, shape: ModelShape) -> None:
        self.study = study
        self.storage = storage
        self.shape = shape

    def trials(self) -> list[FrozenTrial]:
        """All trials, not to be changed."""
        return self.study.get_trials(deepcopy=False)

    def attempts(self) -> dict[int, list[FrozenTrial]]:
        """The trials of each candidate that was begun, oldest first."""
        found: dict[int, list[FrozenTrial]] = defaultdict(list)
        for trial in self.trials():
            if "candidate" in trial.user_attrs and PRUNED_AFTER not in trial.user_attrs:
                found[trial.user_attrs["candidate"]].append(trial)
        return dict(found)

    def remember(self, name: str, value: Any) -> None:
        """Sets a user attribute of the study, if it has another value."""
        if self.study.user_attrs.get(name) != value:
            self.study.set_user_attr(name, value)

    def first_config(self) -> RunConfig | None:
        """The config of the call that began the study; None where it cannot be read any more."""
        try:
            return RunConfig.model_validate_json(json.dumps(self.study.user_attrs.get("config")))
        except ValueError:
            return None

    def stop(self) -> Stop | None:
        """Why the study has fewer candidates than were wanted; None where it has all."""
        stored = self.study.user_attrs.get(STOPPED)
        return Stop(**stored) if stored else None

    def seconds(self) -> list[float]:
        """What the search has taken so far, by rung and group; only the first study of a search knows."""
        found = self.study.user_attrs.get(SECONDS, [])
        # Earlier versions kept the sum alone.
        return list(found) if isinstance(found, list) else [float(found)]

    def tokens(self) -> int:
        """Distillation tokens of all trials."""
        return sum(trial.user_attrs.get("spent", {}).get("tokens", 0) for trial in self.trials())

    def mark_pruned(self, pruned: Sequence[Pruned], tokens: int) -> None:
        """Writes down who does not get as far as this study, tokens being those of the one before.

        A candidate that has a trial here already, from a call that asked for more, keeps it.
        """
        marked = {t.user_attrs.get("candidate"): t for t in self.trials()}
        for one in pruned:
            own = one.candidate
            last = marked.get(own.candidate)
            if last is not None and (
                PRUNED_AFTER not in last.user_attrs or last.user_attrs["reason"] == one.reason
            ):
                continue
            attributes = {
                "candidate": own.candidate,
                "head_map": head_map_text(own.head_map),
                "method": own.source,
                "reason": one.reason,
                PRUNED_AFTER: tokens,
            }
            template = create_trial(state=TrialState.PRUNED, user_attrs=attributes)
            self.study._storage.create_new_trial(self.study._study_id, template)

    def pruned(self) -> list[PrunedRow]:
        """Candidates that did not get as far as this study."""
        begun, found = self.attempts().keys(), {}
        for trial in self.trials():
            attributes = trial.user_attrs
            if PRUNED_AFTER in attributes and attributes["candidate"] not in begun:
                number = attributes["candidate"]
                found[number] = PrunedRow(number, attributes["method"], attributes["reason"])
        return [found[number] for number in sorted(found)]

    def begin(
        self,
        attributes: Mapping[str, Any],
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
    ) -> OpenTrial:
        """Writes down a trial that runs, all of it at once: a kill leaves the whole of it or nothing."""
        template = create_trial(
            state=TrialState.RUNNING,
            params=dict(params),
            distributions={name: distributions[name] for name in params},
            user_attrs=dict(attributes),
        )
        storage = self.study._storage
        trial_id = storage.create_new_trial(self.study._study_id, template)
        number = storage.get_trial_number_from_id(trial_id)
        return OpenTrial(trial_id, number, dict(params), dict(attributes))

    def note(self, trial: OpenTrial, **attributes: Any) -> None:
        """Adds user attributes to a trial that runs."""
        for name, value in attributes.items():
            self.study._storage.set_trial_user_attr(trial.trial_id, name, value)
        trial.attributes.update(attributes)

    def note_violations(self, trial: OpenTrial, names: list[str], values: list[float]) -> None:
        """Adds the values of the constraints, for us and for Optuna's dashboard."""
        record_violations(optuna.trial.Trial(self.study, trial.trial_id), names, values)
        trial.attributes[VIOLATIONS] = values

    def end(
        self, trial: OpenTrial, state: TrialState, values: Sequence[float] | None = None
    ) -> None:
        """Ends a trial; what it is about has to be noted before."""
        self.study._storage.set_trial_state_values(trial.trial_id, state, values)

    def evaluated(self, tries: Sequence[FrozenTrial]) -> Evaluated:
        """What the tries of a candidate whose evaluation is over came to."""
        done = next((trial for trial in tries if trial.state == TrialState.COMPLETE), None)
        last = done or tries[-1]
        return Evaluated(
            last.user_attrs["candidate"],
            self.head_map(last),
            tuple(done.values) if done else None,
            tuple(last.user_attrs.get(VIOLATIONS, ())),
            last.params,
        )

    def close_open_trials(self, reason: str) -> list[FrozenTrial]:
        """Ends every trial that is not finished as FAIL; nothing runs any more. Returns them."""
        while any(trial.state == TrialState.WAITING for trial in self.trials()):
            self.study.ask()  # Turns the waiting one, which cannot be told, into a running one.
        left = [trial for trial in self.trials() if trial.state == TrialState.RUNNING]
        for trial in left:
            # Straight to the storage: building a Trial object would make the sampler propose anew.
            self.storage.set_trial_user_attr(trial._trial_id, "reason", reason)
            self.study.tell(trial.number, state=TrialState.FAIL)
        return left

    def head_map(self, trial: FrozenTrial) -> HeadMap:
        """The map that a trial evaluated."""
        return HeadMap(self.shape, tuple(trial.user_attrs["head_map"].split("/")))

    def candidates(self, *, constrained: bool) -> list[Candidate]:
        """Every candidate with a result."""
        found = []
        for number, trials in sorted(self.attempts().items()):
            done = [t for t in trials if t.state == TrialState.COMPLETE]
            if done:
                attributes = done[0].user_attrs
                feasible = not constrained or max(recorded_violations(done[0])) <= 0
                found.append(
                    Candidate(
                        number,
                        attributes.get("method", SEARCH),
                        attributes["metrics"],
                        self.head_map(done[0]),
                        feasible,
                        done[0].number,
                        tuple(attributes.get("also", ())),
                        attributes.get("intervals", {}),
                    )
                )
        return found

    def failures(self) -> list[Failure]:
        """Every candidate whose tries all failed or were pruned.

        None whose last try does not count: it is tried again, unless it has dropped out of the search since.
        """
        found = []
        for number, (*_, last) in sorted(self.attempts().items()):
            reason = last.user_attrs.get("reason", "unknown")
            ended = last.state in (TrialState.FAIL, TrialState.PRUNED)
            if ended and not reason.startswith(UNCOUNTED):
                found.append(Failure(number, last.user_attrs["method"], reason))
        return found


def head_map_text(head_map: HeadMap) -> str:
    """The form of a map in user attributes: its rows joined by slashes."""
    return "/".join(head_map.layers)


def describe_trials(trials: Sequence[FrozenTrial]) -> str:
    """Names trials for a message: candidates where they are known."""
    names = [
        f"candidate {t.user_attrs['candidate']}"
        if "candidate" in t.user_attrs
        else f"trial {t.number}"
        for t in trials
    ]
    return ", ".join(names)
