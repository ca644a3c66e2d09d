"""Reads a run directory into the records that a report draws. Works on unfinished runs too. No torch."""

from __future__ import annotations

from typing import Any

import optuna

from ..config import RunConfig
from ..errors import ConfigError
from ..headmap import ModelShape
from ..rundir import RunDir
from ..search.front import CONTROL, SEARCH, Fronts
from ..search.front import Candidate as Finished
from ..search.study import RungStudy, open_storage, study_name
from .records import Candidate, Failure, Group, Objective, Rung, RunSummary


def read_summary(run_dir: RunDir) -> RunSummary:
    """All that was evaluated so far, rung by rung.

    Raises ConfigError where the directory is no run, or has no evaluated candidate yet.
    """
    config = run_dir.load_config()
    rungs, failures = _read_rungs(run_dir, config)
    if not rungs:
        raise ConfigError(f"{run_dir.path}: no candidate has been evaluated yet")
    has_stages = (run_dir / "stages.json").exists()
    stages = run_dir.read_json("stages.json")["stages"] if has_stages else []
    return RunSummary(
        name=config.name,
        config=config.model_dump(mode="json", by_alias=True),
        objectives=tuple(
            Objective(o.metric, o.direction == "minimize") for o in config.search.objectives
        ),
        rungs=tuple(rungs),
        failures=tuple(failures),
        stages=tuple(stages),
    )


def _read_rungs(run_dir: RunDir, config: RunConfig) -> tuple[list[Rung], list[Failure]]:
    if config.search.storage is None and not (run_dir / "study.db").exists():
        return [], []
    facts: dict[str, Any] = run_dir.read_json("teacher.json")
    shape = ModelShape(**facts["model"])
    storage = open_storage(config.search.storage or run_dir.storage)
    known = set(optuna.get_all_study_names(storage))
    rungs, failures = [], []
    for tokens in config.search.proxy_tokens:
        studies = []
        for control in (False, True):
            name = study_name(config, tokens, control=control)
            if name in known:
                study = optuna.load_study(study_name=name, storage=storage)
                studies.append(RungStudy(study, storage, shape))
        failures += [
            Failure(f.candidate, f.method, tokens, f.reason)
            for study in studies
            for f in study.failures()
        ]
        constrained = bool(config.search.constraints)
        found = [study.candidates(constrained=constrained) for study in studies]
        if any(found):
            rungs.append(_rung(config, tokens, [c for part in found for c in part]))
    return rungs, failures


def _rung(config: RunConfig, tokens: int, finished: list[Finished]) -> Rung:
    control = [c for c in finished if _group(c) == "random"]
    searched = [c for c in finished if _group(c) != "random"]
    fronts = Fronts.of(config.search.objectives, searched, control, tokens)
    on_front = {c.candidate for c in fronts.points}
    volumes = fronts.hypervolumes()
    if not control:
        del volumes["random"]
    candidates = tuple(
        Candidate(
            candidate=c.candidate,
            method=c.source,
            group=_group(c),
            head_map=c.head_map,
            metrics=dict(c.metrics),
            proxy_tokens=tokens,
            also=c.also,
            on_front=_group(c) != "random" and c.candidate in on_front,
        )
        for c in finished
    )
    return Rung(tokens, candidates, volumes, fronts.scale.reference)


def _group(c: Finished) -> Group:
    if c.source == SEARCH:
        return "search"
    return "random" if c.source == CONTROL else "seed"
