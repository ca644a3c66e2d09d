"""Whose a study is: a run directory has an id, which every study that it begins carries. No torch.

A run directory that was moved or renamed is the same run. A copy is none while the original is there: both would write to
one study. With the study in the run directory itself a copy has a study of its own, and goes on by itself.
"""

from __future__ import annotations

import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import optuna

from ..config import RunConfig
from ..errors import ConfigError
from ..passwords import hide_passwords
from ..rundir import OWNER_FILE, RunDir, read_id

SCHEMA = 1
OWNER = "owner"
"""User attribute of a study: the id of its run directory, and where that was last."""
_PAUSE_SECONDS = 1.0
"""Within this, whoever creates a study has written that it owns it."""


def take_ownership(
    study: optuna.Study, run_dir: RunDir, config: RunConfig, *, is_new: bool
) -> None:
    """Makes a study the run directory's, which is locked. Raises ConfigError where it is another's."""
    if not is_new:
        if OWNER not in study.user_attrs and not study.get_trials(deepcopy=False):
            time.sleep(_PAUSE_SECONDS)
        check_owner(study, run_dir, config)
    place = {"id": _own_id(run_dir), "host": socket.gethostname(), "path": str(_place(run_dir))}
    if study.user_attrs.get(OWNER) != place:
        study.set_user_attr(OWNER, place)


def check_owner(study: optuna.Study, run_dir: RunDir, config: RunConfig) -> None:
    """Raises ConfigError where a study is another run directory's. Nothing is written."""
    owner: dict[str, Any] | None = study.user_attrs.get(OWNER)
    is_inside = config.search.storage is None
    if owner is None:
        if is_inside or not study.get_trials(deepcopy=False) or _was_its_own(study, run_dir):
            return
        whose = "of a run that it does not name, from before studies did,"
    elif owner["id"] == read_id(run_dir.path):
        if is_inside or not _is_elsewhere(owner, run_dir):
            return
        raise ConfigError(
            f"{run_dir.path}: is a copy of the run {owner['path']}, which works on study {study.study_name} in "
            f"search.storage; allowed: that run, or a new --run-dir with --set name=NAME --reuse {run_dir.path}"
        )
    elif _is_gone(owner) and (is_inside or not study.get_trials(deepcopy=False)):
        return
    else:
        whose = f"of the run {owner['path']} on {owner['host']},"
    url = hide_passwords(config.search.storage or run_dir.storage)
    raise ConfigError(
        f"search.storage: {url} holds study {study.study_name} {whose} which stays as it is; allowed: another "
        "search.storage, or a new --run-dir with another name (--set name=NAME)"
    )


def mark_begun(run_dir: RunDir) -> None:
    """Writes down that there may be trials from here on."""
    own_id = _own_id(run_dir)
    if not run_dir.read_json(OWNER_FILE).get("begun"):
        run_dir.write_json(OWNER_FILE, {"schema": SCHEMA, "id": own_id, "begun": True})


def _own_id(run_dir: RunDir) -> str:
    """The id of the run directory, made at the first call."""
    known = read_id(run_dir.path)
    if known is None:
        known = uuid4().hex
        run_dir.write_json(OWNER_FILE, {"schema": SCHEMA, "id": known, "begun": False})
    return known


def _place(run_dir: RunDir) -> Path:
    return run_dir.path.resolve()


def _is_elsewhere(owner: dict[str, Any], run_dir: RunDir) -> bool:
    """Whether the directory that the owner was last is still there and another one than this."""
    place = Path(owner["path"])
    return bool(read_id(place) == owner["id"]) and not place.samefile(run_dir.path)


def _is_gone(owner: dict[str, Any]) -> bool:
    """Whether the owner's directory was on this host and is not there any more."""
    here = owner["host"] == socket.gethostname()
    return bool(here and read_id(Path(owner["path"])) != owner["id"])


def _was_its_own(study: optuna.Study, run_dir: RunDir) -> bool:
    """Whether a study without an owner was begun from here: this run has searched, or its scores were done before."""
    if (run_dir / "trials.json").exists():
        return True
    scores = run_dir.stage("scores")
    started = [t.datetime_start for t in study.get_trials(deepcopy=False) if t.datetime_start]
    if scores is None or not started:
        return False
    # Optuna writes local times down.
    return datetime.fromisoformat(scores["time"]) <= min(started).astimezone(UTC)
