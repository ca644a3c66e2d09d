"""Readings of many maps at several lengths, as a replay of successive halving takes them: of a search that pruned none, of
students of the comparison of selectors, of a study of proxies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..errors import ConfigError
from ..headmap import HeadMap, Operator
from ..rundir import RunDir
from ..search.front import SEARCH, Candidate
from ..search.outcome import read_outcome
from ..search.space import analytic_costs
from .bench_folder import read_shape
from .fidelity_targets import read_file
from .ledger import VALUES, Ledger
from .selection_maps import deciding, retrieval_columns, retrieval_nll
from .student_worker import TEACHER

RETRIEVAL = "retrieval_nll"
"""The mean answer NLL over the retrieval prompts that the teacher answers (selection_maps)."""
MOST_LENGTHS = 3

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Readings:
    """Maps that have a reading at every length: rungs[i] holds all of them at config.search.proxy_tokens[i], in one order."""

    name: str
    config: RunConfig
    rungs: tuple[tuple[Candidate, ...], ...]
    left_out: int = 0
    """Maps without a reading at some length."""

    @property
    def metrics(self) -> set[str]:
        """Names of the metrics that every reading has."""
        return set.intersection(*(set(c.metrics) for rung in self.rungs for c in rung))


def read_run(run: RunDir, config: RunConfig) -> Readings:
    """The candidates of a search, without its random control. config: the run's.

    Raises ConfigError where the search did not read every candidate at every length, or has not come to its end.
    """
    lengths, halving = config.search.proxy_tokens, config.search.halving
    if len(lengths) < 2 or halving is None or halving.keep < 1:
        raise ConfigError(
            f"{run.path}: not every candidate was read at several lengths; allowed: runs with two or three "
            "search.proxy_tokens and search.halving.keep 1"
        )
    rungs = read_outcome(config, run, read_shape(run)).rungs[: len(lengths)]
    if len(rungs) < len(lengths) or not rungs[-1].search:
        raise ConfigError(f"{run.path}: no candidates at {lengths[-1]:,} tokens yet")
    full = HeadMap.uniform(read_shape(run), Operator.FULL)
    # The all-FA map is the teacher.
    teacher = next((c.metrics for c in rungs[0].search if c.head_map == full), None)
    found = [{c.candidate: c for c in rung.search} for rung in rungs]
    return _complete(f"{config.name}, seed {config.seed}", config, found, teacher)


def read_ledger(path: Path, config: RunConfig, lengths: Sequence[int] = ()) -> Readings:
    """The students of the first seed in a ledger of archsearch.lab.selection; config says costs, forks and who goes on.

    No map counts as a seed of a search. Raises ConfigError where there are none, or students of several settings.
    """
    rows = [row | {"of": key.split("/")[:2]} for key, row in Ledger(path).rows().items()]
    rows = [row for row in rows if VALUES in row]
    if len({row["of"][0] for row in rows}) != 1:
        raise ConfigError(f"{path}: students of {len({row['of'][0] for row in rows})} settings")
    teacher = next((row[VALUES] for row in rows if row["of"][1] == TEACHER), None)
    found: dict[HeadMap, dict[int, Metrics]] = {}
    for row in rows:
        if row["of"][1] != TEACHER and row["seed"] == 0:
            found.setdefault(HeadMap.from_json(row["map"]), {})[row["tokens"]] = row[VALUES]
    return _readings(str(path), config, found, lengths, teacher)


def read_fidelity(path: Path, config: RunConfig, lengths: Sequence[int] = ()) -> Readings:
    """The maps of a study of proxies, its first seed; config says costs and who goes on. No map counts as a seed of a search.

    Raises ConfigError where there is no study.
    """
    study = read_file(path)
    runs = [(subject.head_map, study.of(subject)) for subject in study.subjects]
    found = {
        head_map: {reading.tokens: reading.metrics for reading in own.readings}
        for head_map, own in runs
        if own is not None
    }
    settings = study.settings
    as_trials = set(lengths) <= {0, *settings.proxies}
    share = settings.proxy_decay_share if as_trials else settings.decay_share
    distill = config.distill.model_copy(update={"decay_share": share})
    config = config.model_copy(update={"distill": distill})
    return _readings(str(path), config, found, lengths, None)


def _readings(
    source: str,
    config: RunConfig,
    found: Mapping[HeadMap, Mapping[int, Metrics]],
    lengths: Sequence[int],
    teacher: Metrics | None,
) -> Readings:
    """Readings of maps by tokens, at these lengths or at all that there are."""
    known = sorted({tokens for own in found.values() for tokens in own})
    chosen = tuple(sorted(set(lengths))) or tuple(known)
    if not 2 <= len(chosen) <= MOST_LENGTHS or not set(chosen) <= set(known):
        there = ", ".join(f"{tokens:,}" for tokens in known) or "none"
        raise ConfigError(f"{source}: allowed --lengths: two or three of {there}")
    final = config.search.final.model_copy(update={"tokens": None})
    search = config.search.model_copy(update={"proxy_tokens": chosen, "final": final})
    config = config.model_copy(update={"search": search})
    rungs = [
        {
            number: Candidate(
                number, SEARCH, {**own[tokens], **analytic_costs(head_map, config.cost)}, head_map
            )
            for number, (head_map, own) in enumerate(found.items())
            if tokens in own
        }
        for tokens in chosen
    ]
    return _complete(config.name, config, rungs, teacher)


def _complete(
    name: str,
    config: RunConfig,
    rungs: Sequence[Mapping[int, Candidate]],
    teacher: Metrics | None,
) -> Readings:
    """Those that have a reading at every length, with RETRIEVAL among their metrics where prompts decide it."""
    numbers = sorted(set.intersection(*(set(rung) for rung in rungs)))
    if not numbers:
        raise ConfigError(f"{name}: no map has a reading at every length")
    columns = retrieval_columns(rungs[0][numbers[0]].metrics)
    columns = columns if teacher is None else deciding(columns, teacher)
    full = tuple(tuple(_with_retrieval(rung[n], columns) for n in numbers) for rung in rungs)
    left_out = len(set.union(*(set(rung) for rung in rungs))) - len(numbers)
    return Readings(name, config, full, left_out)


def _with_retrieval(candidate: Candidate, columns: Sequence[str]) -> Candidate:
    mean = retrieval_nll(candidate.metrics, columns)
    added: dict[str, Any] = {} if mean is None else {RETRIEVAL: mean}
    return replace(candidate, metrics={**candidate.metrics, **added})
