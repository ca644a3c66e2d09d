"""Reads a run directory into the records that a report draws. Works on unfinished runs too. No torch."""

from __future__ import annotations

from typing import Any

from ..config import RunConfig
from ..errors import ConfigError
from ..fidelity.records import read_study
from ..headmap import ModelShape
from ..rundir import RunDir
from ..search.front import CONTROL, SEARCH
from ..search.front import Candidate as Finished
from ..search.outcome import RungOutcome, SearchOutcome, read_outcome
from ..search.retention import read_retention
from ..timings import read_timings
from .records import Candidate, Failure, Group, Objective, Rung, RunSummary
from .score_records import read_score_files


def read_summary(run_dir: RunDir) -> RunSummary:
    """All that was evaluated so far, rung by rung, and the scores of heads.

    Raises ConfigError where the directory is no run, has neither of them yet, or holds damaged files.
    """
    config = run_dir.load_config()
    rungs, outcome = _read_rungs(run_dir, config)
    scores = read_score_files(run_dir)
    if not rungs and not scores:
        raise ConfigError(
            f"{run_dir.path}: no candidate has been evaluated yet, and no heads are scored"
        )
    stages, methods = read_timings(run_dir)
    return RunSummary(
        name=config.name,
        config=config.model_dump(mode="json", by_alias=True),
        objectives=tuple(
            Objective(o.metric, o.direction == "minimize") for o in config.search.objectives
        ),
        rungs=tuple(rungs),
        failures=tuple(_failures(outcome)),
        pruned=tuple(_pruned(outcome)),
        stops=tuple(outcome.stops()),
        met=tuple(outcome.last.met()) if rungs else (),
        unmet=outcome.last.unmet if rungs else None,
        stages=tuple(stages),
        methods=tuple(methods),
        scores=scores,
        shape=rungs[0].candidates[0].head_map.model if rungs else None,
        retention=read_retention(run_dir),
        fidelity=read_study(run_dir),
    )


def _read_rungs(run_dir: RunDir, config: RunConfig) -> tuple[list[Rung], SearchOutcome]:
    if config.search.storage is None and not (run_dir / "study.db").exists():
        return [], SearchOutcome([])
    facts: dict[str, Any] = run_dir.read_json("teacher.json")
    shape = ModelShape(**facts["model"])
    outcome = read_outcome(config, run_dir, shape)
    return [_rung(rung) for rung in outcome.rungs if rung.search or rung.control], outcome


def _failures(outcome: SearchOutcome) -> list[Failure]:
    return [
        Failure(f.candidate, f.method, rung.proxy_tokens, f.reason)
        for rung in outcome.rungs
        for f in rung.failures
    ]


def _pruned(outcome: SearchOutcome) -> list[Failure]:
    return [
        Failure(row.candidate, row.method, rung.proxy_tokens, row.reason)
        for rung in outcome.rungs
        for row in (*rung.pruned[0], *rung.pruned[1])
    ]


def _rung(rung: RungOutcome) -> Rung:
    fronts = rung.fronts
    on_front = {c.candidate for c in fronts.points}
    volumes = fronts.hypervolumes()
    if not rung.control:
        del volumes["random"]
    candidates = tuple(
        Candidate(
            candidate=c.candidate,
            method=c.source,
            group=_group(c),
            head_map=c.head_map,
            metrics=dict(c.metrics),
            proxy_tokens=rung.proxy_tokens,
            also=c.also,
            intervals=c.intervals,
            on_front=_group(c) != "random" and c.candidate in on_front,
            feasible=c.feasible,
        )
        for c in (*rung.search, *rung.control)
    )
    return Rung(rung.proxy_tokens, candidates, volumes, fronts.scale.reference, rung.confidence)


def _group(c: Finished) -> Group:
    if c.source == SEARCH:
        return "search"
    return "random" if c.source == CONTROL else "seed"
