"""Searches of one teacher that differ in how they propose head maps: what they evaluated, and how long that took."""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..changes import describe_changes, differences
from ..config import RunConfig
from ..errors import ConfigError
from ..rundir import RESUMABLE, SCORES, RunDir, score_file
from ..search.front import Candidate
from ..search.storage import open_storage, storage_url
from ..search.study import RungStudy, find_study, study_name
from ..search.trial import RETRIEVAL_FILE, STARTS_FILE, SUPERNET_FILE, TRAIN_FILE
from .bench_folder import read_shape

HELDOUT_FILES = "*heldout*.npy"
"""Whatever a search was measured on: held-out text, other texts, those of the final stage."""
MAY_DIFFER = (
    "name",
    "search.sampler",
    "search.representation",
    "search.random_control",
    "search.storage",
    # Their files are compared.
    "supernet.",
    "scoring.",
    *RESUMABLE,
)
"""Fields of the config in which searches that are compared may differ."""


@dataclass(frozen=True)
class Evaluation:
    """One try of a candidate: who supplied it, seconds of its worker times that worker's share of a GPU, and its result."""

    source: str
    seconds: float
    candidate: Candidate | None


@dataclass(frozen=True)
class Rung:
    """All tries of the search, seeds included, and of its random control after so many tokens, in the order of their ends."""

    tokens: int
    search: tuple[Evaluation, ...]
    control: tuple[Evaluation, ...]

    @property
    def candidates(self) -> list[Candidate]:
        """The search's results."""
        return [e.candidate for e in self.search if e.candidate is not None]


@dataclass(frozen=True)
class Search:
    """A search that is done. name says what it searched with."""

    name: str
    run: RunDir
    config: RunConfig
    rungs: tuple[Rung, ...]


def read_searches(paths: Sequence[Path]) -> list[Search]:
    """The searches of run directories. Raises ConfigError where one is not done, or not to be compared with the first."""
    runs = [RunDir(path) for path in paths]
    for run in runs:
        run.require_search("trials.json")
        if run.load_config().search.storage is None:
            run.require_search("study.db")
    for run in runs[1:]:
        check_same(runs[0], run)
    searches = [_read_search(run) for run in runs]
    for place, search in enumerate(searches):
        if search.name in {other.name for other in searches[:place]}:
            raise ConfigError(
                f"{search.run.path}: also searched with {search.name}; allowed: one run of each sampler and representation"
            )
    return searches


def check_same(first: RunDir, other: RunDir) -> None:
    """Raises ConfigError unless two runs searched the same: teacher, supernet, text, scores, objectives, proxies."""
    wanted = "allowed: runs of one teacher, supernet, text, objectives and proxies (`archsearch run --reuse`)"
    teachers = [run.read_json("teacher.json")["fingerprint"] for run in (first, other)]
    if teachers[0] != teachers[1]:
        raise ConfigError(f"{other.path}: another teacher than {first.path}'s; {wanted}")
    configs = [run.load_config().model_dump(mode="json", by_alias=True) for run in (first, other)]
    changes = {
        field: values
        for field, values in differences(configs[0], configs[1]).items()
        if not field.startswith(MAY_DIFFER)
    }
    if changes:
        said = describe_changes(changes)
        raise ConfigError(f"{other.path}: has another config than {first.path} ({said}); {wanted}")
    for name in _made_of(first, other):
        pair = first / name, other / name
        if not all(path.exists() for path in pair) or not filecmp.cmp(*pair, shallow=False):
            raise ConfigError(f"{pair[1]}: not the same as {pair[0]}; {wanted}")


def _made_of(first: RunDir, other: RunDir) -> list[str]:
    """Files that either run's figures depend on; of scores only those that both have, since some may be made later."""
    either = {
        path.name
        for run in (first, other)
        for pattern in (SUPERNET_FILE, TRAIN_FILE, STARTS_FILE, RETRIEVAL_FILE, HELDOUT_FILES)
        for path in run.path.glob(pattern)
    }
    scores = [f"{SCORES}/{path.name}" for path in (first / SCORES).glob("*.json")]
    both = [name for name in (score_file("causal"), *scores) if (other / name).exists()]
    return sorted(either) + sorted(both)


def _read_search(run: RunDir) -> Search:
    config, shape = run.load_config(), read_shape(run)
    storage = open_storage(storage_url(config, run))
    rungs = []
    for tokens in config.search.lengths:
        names = (study_name(config, tokens), study_name(config, tokens, control=True))
        search, control = (find_study(storage, name, shape) for name in names)
        if search is not None:
            tries = [
                () if study is None else _evaluations(study, config) for study in (search, control)
            ]
            rungs.append(Rung(tokens, *tries))
    if not any(rung.candidates for rung in rungs):
        raise ConfigError(
            f"{run.path}: its search has no results; allowed: runs whose search has some"
        )
    name = f"{config.search.sampler}, {config.search.representation}"
    return Search(name, run, config, tuple(rung for rung in rungs if rung.candidates))


def _evaluations(study: RungStudy, config: RunConfig) -> tuple[Evaluation, ...]:
    """Tries whose worker died have no seconds of their own, and add none."""
    constrained = bool(config.search.constraints)
    found = {c.trial: c for c in study.candidates(constrained=constrained)}
    tries = [(t.datetime_complete, t) for own in study.attempts().values() for t in own]
    ended = sorted(
        ((end, t) for end, t in tries if end), key=lambda pair: (pair[0], pair[1].number)
    )
    share = config.execution.gpus_per_worker or 1.0
    return tuple(
        Evaluation(
            trial.user_attrs["method"],
            share * trial.user_attrs.get("spent", {}).get("seconds", 0.0),
            found.get(trial.number),
        )
        for _, trial in ended
    )
