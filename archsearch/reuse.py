"""What a run takes of another run of the same teacher instead of making it: text, twins and scores.

A stage is taken where the fields that make it are equal, and with it only what was made from the same: twins that were
trained need the text, scores the text and the twins that they read.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .changes import describe_changes, differences
from .config import RunConfig, ScoreMethod
from .errors import ConfigError
from .footprint import TRAIN
from .inputs import scored_inputs
from .plan import training_rows
from .rundir import PAIRS_FILE, RESUMABLE, SIMILARITY_FILE, RunDir, score_file
from .scoring.methods import METHODS
from .search.driver import scored_methods
from .search.trial import RETRIEVAL_FILE, STARTS_FILE, SUPERNET_FILE, TRAIN_FILE
from .stages import (
    ALIGNMENT_FILE,
    CHECKPOINT_FILE,
    lost_scores,
    lost_similarity,
    lost_supernet,
)
from .texts import heldout_parts, lost_array
from .timings import record_stage

TAKEN = ("data", "supernet", "scores")
"""Stages that can be taken."""

_TEACHER = ("teacher.source", "teacher.revision", "teacher.dtype", "teacher.random_weights")
_PROMPTS = ("probes.multi_keys", "probes.digits")
_FIELDS = {
    "data": (*_TEACHER, "data.", *_PROMPTS),
    "supernet": (*_TEACHER, "supernet."),
    "scores": (*_TEACHER, "scoring.", *_PROMPTS),
}
_FREE = (*RESUMABLE, "scoring.methods", "scoring.memory_gib")
"""Fields within those that change nothing of what is taken."""
_AMOUNTS = ("supernet.source", "supernet.tokens", "search.proxy_tokens", "search.final.")
"""Fields that say how much text there is."""

Changes = Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Take:
    """What a stage takes of another run: files, and why that is not all that the stage makes (empty: it is)."""

    stage: str
    files: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Reuse:
    """What a run takes of another, stage by stage; those that it has done itself are left out."""

    source: RunDir
    takes: tuple[Take, ...]
    seeds: tuple[int, int]
    """Of the other run and of this one."""

    @property
    def whole(self) -> list[str]:
        """The stages that have nothing left to do."""
        return [take.stage for take in self.takes if not take.missing]

    @property
    def scored(self) -> list[ScoreMethod]:
        """The methods whose scores are taken."""
        files = {name for each in self.takes for name in each.files}
        return [method for method in METHODS if score_file(method) in files]

    def lines(self) -> list[str]:
        """What is taken, and what is made here for which reason, a line each."""
        taken = [take.stage + " in part" * bool(take.missing) for take in self.takes if take.files]
        said = [f"{', '.join(taken) or 'nothing'} from {self.source.path}"] if self.takes else []
        if taken and self.seeds[0] != self.seeds[1]:
            made, here = self.seeds
            said.append(f"seed {here} is the search's alone: what is taken has {made}")
        said += [f"made here: {each.stage}: {each.missing}" for each in self.takes if each.missing]
        return [f"{'reuse':<9} {text}" for text in said]


def plan_reuse(config: RunConfig, run_dir: RunDir, source: RunDir) -> Reuse:
    """What a run takes of source. Nothing is written.

    Raises ConfigError where source is no run, or this one.
    """
    old = source.load_config()
    if source.path.resolve() == run_dir.path.resolve():
        raise ConfigError(f"--reuse {source.path}: is this run itself; allowed: another one")
    dumps = [each.model_dump(mode="json", by_alias=True) for each in (old, config)]
    found = differences(dumps[0], dumps[1])
    data = _unless_own(run_dir, source, _data(config, old, source, found))
    supernet = _unless_own(run_dir, source, _supernet(config, source, found, data))
    scores = _scores(config, run_dir, source, found, (data, supernet))
    open_stages = [t for t in (data, supernet, scores) if run_dir.stage(t.stage) is None]
    # A stage that has all of its files here already takes none.
    takes = tuple(t for t in open_stages if t.files or t.missing)
    return Reuse(source, takes, (old.seed, config.seed))


def _unless_own(run_dir: RunDir, source: RunDir, one: Take) -> Take:
    """What later stages may count on: a stage that this run has done with other files is not the other run's."""
    if run_dir.stage(one.stage) is None:
        return one
    pairs = [(run_dir / name, source / name) for name in one.files]
    if all(own.exists() and filecmp.cmp(own, other) for own, other in pairs):
        return one
    return Take(one.stage, missing="this run has made its own")


def take(reuse: Reuse, run_dir: RunDir, say: Callable[[str], None]) -> None:
    """Links or copies the files, marks stages that are whole as done, and writes down where that is from.

    Nothing is taken, and said so, where the runs' teachers differ (teacher.json). The run directory is locked.
    """
    source = reuse.source
    if not any(one.files for one in reuse.takes):
        return  # A run that has not got far has no teacher.json either.
    prints = [place.read_json("teacher.json").get("fingerprint") for place in (source, run_dir)]
    if prints[0] != prints[1]:
        say(f"{'reuse':<9} nothing: the teacher of {source.path} has other weights")
        return
    for one in reuse.takes:
        for name in one.files:
            _take_file(source, run_dir, name)
        if one.files:
            run_dir.record_origin(one.stage, _origin(reuse, one))
        if not one.missing:
            summary = (source.stage(one.stage) or {}).get("summary", "")
            row = record_stage(run_dir, one.stage, 0.0, 0, f"{summary} (from {source.path})")
            run_dir.mark_done(**row)
            if one.stage == "supernet":
                (run_dir / CHECKPOINT_FILE).unlink(missing_ok=True)


def _origin(reuse: Reuse, one: Take) -> dict[str, Any]:
    """What provenance.json says of a stage's files."""
    source = reuse.source
    earlier = source.origins().get(one.stage)
    found = {"run": str(source.path), "seed": reuse.seeds[0], "files": list(one.files)}
    made = (source.stage(one.stage) or {}).get("time")
    return found | ({"time": made} if made else {}) | ({"reused": earlier} if earlier else {})


def _take_file(source: RunDir, run_dir: RunDir, name: str) -> None:
    """A second name of the same file, since none is ever written to again, or a copy on another disk."""
    with run_dir.replacing(name) as temporary:
        temporary.unlink()
        try:
            os.link(source / name, temporary)
        except OSError:
            shutil.copyfile(source / name, temporary)


def _changed(found: Changes, fields: Sequence[str]) -> str:
    """The fields of these that differ, as a message names them."""
    return describe_changes(
        {
            path: pair
            for path, pair in found.items()
            if f"{path}.".startswith(tuple(f if f.endswith(".") else f"{f}." for f in fields))
            and not path.startswith(_FREE)
        }
    )


def _data(config: RunConfig, old: RunConfig, source: RunDir, found: Changes) -> Take:
    if changed := _changed(found, _FIELDS["data"]):
        return Take("data", missing=changed)
    parts = [*heldout_parts(config)]
    there = [*heldout_parts(old)]
    if training_rows(config) != training_rows(old) or any(part not in there for part in parts):
        return Take("data", missing=_changed(found, _AMOUNTS))
    files = [file for _, _, _, _, file, _ in parts]
    rows = training_rows(config)
    if rows.text:
        files.append(TRAIN_FILE)
        files += [STARTS_FILE] * (source / STARTS_FILE).exists()
        files += [RETRIEVAL_FILE] * bool(rows.prompts)
    whole = _made(source, "data", files)
    damaged = [f"{source / n}: {said}" for n in whole.files if (said := lost_array(source / n))]
    return Take("data", missing=damaged[0]) if damaged else whole


def _supernet(config: RunConfig, source: RunDir, found: Changes, data: Take) -> Take:
    if changed := _changed(found, _FIELDS["supernet"]):
        return Take("supernet", missing=changed)
    if config.supernet.source == TRAIN and data.missing:
        return Take("supernet", missing="it is trained on other text")
    files = [SUPERNET_FILE, *(n for n in (ALIGNMENT_FILE,) if (source / n).exists())]
    whole = _made(source, "supernet", files)
    if not whole.missing and (lost := lost_supernet(source)):
        return Take("supernet", missing=lost)
    return whole


def _made(source: RunDir, stage: str, files: Sequence[str]) -> Take:
    """These files of a stage, where the other run has done it and has them."""
    if source.stage(stage) is None:
        return Take(stage, missing=f"{source.path} has not got that far")
    lost = [name for name in files if not (source / name).exists()]
    if lost:
        return Take(stage, missing=f"{source / lost[0]}: missing")
    return Take(stage, tuple(files))


def _scores(
    config: RunConfig, run_dir: RunDir, source: RunDir, found: Changes, made: tuple[Take, Take]
) -> Take:
    """The scores that run_dir lacks and source has, each where what it is measured on is taken too."""
    if changed := _changed(found, _FIELDS["scores"]):
        return Take("scores", missing=changed)
    inputs = {
        name: sha for name, sha in scored_inputs(config).items() if name.startswith("scoring.")
    }
    if changed_files := source.changed_inputs(inputs):
        return Take("scores", missing=f"{changed_files[0]}: the file has changed since")
    data, supernet = made
    wanted = [m for m in scored_methods(config) if m in lost_scores(run_dir, [m])]
    lost = lost_scores(source, wanted)
    reasons, files = list[str](), list[str]()
    for method in wanted:
        other = (METHODS[method].needs_text and data.missing) or (
            METHODS[method].needs_supernet and supernet.missing
        )
        if other or method in lost:
            said = "text or twins are others" if other else lost[method]
            reasons.append(f"{method} ({said})")
        else:
            files.append(score_file(method))
    if lost_similarity(run_dir):
        if data.missing or lost_similarity(source):
            reasons.append(SIMILARITY_FILE)
        else:
            files.append(SIMILARITY_FILE)
    if files and (source / PAIRS_FILE).exists():
        files.append(PAIRS_FILE)
    return Take("scores", tuple(files), ", ".join(reasons))
