"""A run directory: one writer, atomic files, a frozen config, stage markers and provenance. No torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from pydantic import ValidationError

from .changes import describe_changes, differences
from .config import RunConfig
from .configfile import first_problem
from .errors import ConfigError, EnvironmentFault
from .mounts import network_file_system
from .passwords import shown_config
from .provenance import describe_call

SCHEMA = 1

RESUMABLE = (
    "search.trials",
    "search.max_retries",
    "search.max_minutes",
    "search.max_tokens",
    "search.patience",
    "search.min_gain",
    "search.retention.",
    "execution.",
    "kernels.",
    "supernet.checkpoint_minutes",
    "distill.cache_gib",
    "distill.checkpointing",
    "distill.replay",
)
"""Fields that may change between two calls of one run, since no finished work depends on them."""

SCORES = "scores"
"""Folder of the scores files, beside scores.json of the causal ones."""
PAIRS_FILE = "pairs.json"
"""Pairs kept and drawn of each sub-probe of each capability."""
INPUTS_FILE = "inputs.json"
"""SHA-256 of the files that the scores were made from, by the config's field."""
SIMILARITY_FILE = "similarity.json"
PROVENANCE_FILE = "provenance.json"
OWNER_FILE = "owner.json"
"""The id by which studies know the run that they belong to, and whether one has begun."""

_NO_FOLDER = "is a file; a run directory is expected"
_DISK_FAULTS = (errno.EROFS, errno.ENOSPC, errno.EDQUOT)

_Part = TypeVar("_Part", dict[str, Any], list[Any], bool)


class RunDir:
    """The files of one run. Reading needs no lock; a writer holds it: `with RunDir(path) as run_dir:`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self._lock: IO[str] | None = None

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def storage(self) -> str:
        """URL of the study database that is used where the config names none."""
        return f"sqlite:///{self / 'study.db'}"

    def __enter__(self) -> RunDir:
        """Creates the directory and takes its lock.

        Raises ConfigError where the path is no directory, EnvironmentFault where it cannot be written and where another
        process holds the lock; it names that process's id and host.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"{nearest_folder(self.path)}: {_NO_FOLDER}") from error
        except OSError as error:
            raise EnvironmentFault(f"{self.path}: cannot be created ({_reason(error)})") from error
        # The kernel drops a flock when its holder dies, so a SIGKILL leaves no stale lock.
        try:
            lock = open(self / "lock", "a+", encoding="utf-8")
        except OSError as error:
            raise EnvironmentFault(f"{self.path}: {_unwritable(error)}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise EnvironmentFault(f"{self.path}: in use by {holder}") from error
        lock.seek(0)
        lock.truncate()
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        self._lock = lock
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """A temporary path to write; it becomes `name` in one step once the block ends without error.

        Raises EnvironmentFault where the disk is full or has become read-only.
        """
        try:
            with replacing(self / name) as temporary:
                yield temporary
        except OSError as error:
            if error.errno not in _DISK_FAULTS:
                raise
            raise EnvironmentFault(f"{self.path}: {_unwritable(error)}") from error

    def write_text(self, name: str, text: str) -> Path:
        """Writes a text file in one step and returns its path."""
        with self.replacing(name) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return self / name

    def write_json(self, name: str, data: Any) -> Path:
        """Writes a JSON file in one step and returns its path. NaN is refused with ValueError."""
        return self.write_text(name, json.dumps(data, indent=1, allow_nan=False) + "\n")

    def read_json(self, name: str) -> Any:
        """Reads a JSON file. Raises ConfigError where it is missing or no JSON."""
        try:
            return json.loads((self / name).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            is_run = (self / "config.json").exists()
            doubt = "" if is_run else f"; is {self.path} a run directory?"
            raise ConfigError(f"{self / name}: missing{doubt}") from error
        except NotADirectoryError as error:
            raise ConfigError(f"{nearest_folder(self.path)}: {_NO_FOLDER}") from error
        except ValueError as error:
            raise ConfigError(f"{self / name}: damaged, not JSON: {error}") from error

    def _read_part(self, name: str, key: str, kind: type[_Part]) -> _Part:
        """A field of a JSON file. Raises ConfigError where the file is damaged."""
        data = self.read_json(name)
        part = data.get(key) if isinstance(data, dict) else None
        if not isinstance(part, kind):
            raise ConfigError(f"{self / name}: damaged, no {kind.__name__} {key} in it")
        return part

    def freeze_config(self, config: RunConfig, inputs: Mapping[str, str] | None = None) -> None:
        """Stores the config, and what the files that scores are made from hold: field -> SHA-256.

        RESUMABLE fields may differ from those that the run was started with. Raises ConfigError where others do, or
        such a file does once heads are scored.
        """
        self._check_changes(config, inputs or {})
        self.write_json("config.json", shown_config(config))
        if inputs:
            self.write_json(INPUTS_FILE, {"schema": SCHEMA, "sha256": dict(inputs)})

    def check_frozen(self, config: RunConfig, inputs: Mapping[str, str] | None = None) -> None:
        """Checks a config and its files against those that the run was started with, if it was; writes nothing.

        The files may change until heads are scored. Raises ConfigError that lists the differences beyond RESUMABLE
        and says how to go on, and for a folder that holds other things than a run.
        """
        self._check_changes(config, inputs or {})
        found = [] if (self / "config.json").exists() or not self.path.is_dir() else self._names()
        if found:
            raise ConfigError(
                f"{self.path}: holds {found[0]} but no config.json, so that it is no run directory; allowed for "
                "--run-dir: a new or empty folder, or that of a run"
            )

    def _names(self) -> list[str]:
        """What is in the directory, less what a call that was killed at once may have left."""
        names = sorted(path.name for path in self.path.iterdir())
        return [name for name in names if name != "lock" and not name.startswith(".")]

    def _check_changes(self, config: RunConfig, inputs: Mapping[str, str]) -> None:
        if not (self / "config.json").exists():
            return
        new = shown_config(config)
        # Read through the model, so that a field that is new since then counts with its default.
        old = shown_config(self.load_config())
        free = RESUMABLE if self.has_trials() else (*RESUMABLE, "search.storage")
        found = {
            key: pair for key, pair in differences(old, new).items() if not key.startswith(free)
        }
        changes = describe_changes(found)
        if not changes and self._has_scores():
            changes = "; ".join(
                f"{field}: the file has changed since heads were scored"
                for field in self.changed_inputs(inputs)
            )
        if changes:
            raise ConfigError(
                f"{self.path}: this run was started with another config ({changes}); allowed: a new --run-dir, "
                f"where `archsearch run` takes what still fits with --reuse {self.path}"
            )

    def has_trials(self) -> bool:
        """Whether a search has begun here, whatever database holds its trials."""
        begun = (self / OWNER_FILE).exists() and self._read_part(OWNER_FILE, "begun", bool)
        return begun or any((self / name).exists() for name in ("study.db", "trials.json"))

    def _has_scores(self) -> bool:
        """Whether heads are scored, or were once."""
        files = [self / score_file("causal"), *(self / SCORES).glob("*.json")]
        return self.stage("scores") is not None or any(path.exists() for path in files)

    def changed_inputs(self, inputs: Mapping[str, str]) -> list[str]:
        """Fields whose file holds something else than when it was last written down, if it was."""
        if not (self / INPUTS_FILE).exists():
            return []
        old = self._read_part(INPUTS_FILE, "sha256", dict)
        return [field for field, found in inputs.items() if old.get(field, found) != found]

    def load_config(self) -> RunConfig:
        """The config that the run was started with. Raises ConfigError where there is none."""
        data = self.read_json("config.json")
        try:
            return RunConfig.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            said = first_problem(error)
            raise ConfigError(
                f"{self / 'config.json'}: damaged or of another version: {said}"
            ) from error

    def require_search(self, name: str) -> None:
        """Raises ConfigError where the file `name`, which a search writes, is not there yet, or this is no run."""
        self.load_config()
        if not (self / name).exists():
            raise ConfigError(
                f"{self / name}: missing: the search has not run to there yet; `archsearch run` with this run's "
                f"config and --run-dir {self.path} does"
            )

    def mark_done(self, stage: str, **details: Any) -> None:
        """Records that a stage is finished, with JSON-able details such as its seconds."""
        time = datetime.now(UTC).isoformat(timespec="seconds")
        self.write_json(f"stages/{stage}.json", {"schema": SCHEMA, "time": time, **details})

    def mark_open(self, stage: str) -> None:
        """Takes back that a stage is finished, if it was."""
        (self / f"stages/{stage}.json").unlink(missing_ok=True)

    def stage(self, name: str) -> dict[str, Any] | None:
        """Details of a finished stage, None where it is not finished."""
        if not (self / f"stages/{name}.json").exists():
            return None
        details: dict[str, Any] = self.read_json(f"stages/{name}.json")
        return details

    def record_provenance(self, seed: int) -> None:
        """Appends what this call runs on: versions, git commit, command line, host, seed."""
        self._write_provenance([*self._calls(), describe_call(seed)], self.origins())

    def record_origin(self, stage: str, origin: Mapping[str, Any]) -> None:
        """Writes down, beside the calls, where what a stage has left was taken from."""
        self._write_provenance(self._calls(), {**self.origins(), stage: dict(origin)})

    def origins(self) -> dict[str, Any]:
        """Where the outputs of stages come from that this run has not made itself, by stage."""
        is_there = (self / PROVENANCE_FILE).exists()
        found = self.read_json(PROVENANCE_FILE) if is_there else {}
        return dict(found.get("reused", {})) if isinstance(found, dict) else {}

    def _calls(self) -> list[Any]:
        if not (self / PROVENANCE_FILE).exists():
            return []
        return self._read_part(PROVENANCE_FILE, "calls", list)

    def _write_provenance(self, calls: list[Any], origins: Mapping[str, Any]) -> None:
        reused = {"reused": origins} if origins else {}
        self.write_json(PROVENANCE_FILE, {"schema": SCHEMA, "calls": calls, **reused})

    def require_writable(self) -> None:
        """Tries to write where the directory is, or where it would be made; nothing is left there.

        Raises ConfigError where a file is in its place, EnvironmentFault where it cannot be written.
        """
        place = nearest_folder(self.path)
        if not place.is_dir():
            raise ConfigError(f"{place}: {_NO_FOLDER}")
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            said = _unwritable(error)
            if place != self.path:
                said = f"cannot be created ({place} {said})"
            raise EnvironmentFault(f"{self.path}: {said}") from error

    def require_disk(self, needed_bytes: int) -> None:
        """Raises EnvironmentFault unless the run directory's disk has that much room."""
        require_disk(self.path, needed_bytes)

    def warnings(self) -> list[str]:
        """What is unwise about the place of this directory, a sentence each."""
        kind = network_file_system(self.path)
        if kind is None:
            return []
        return [
            f"{self.path} is on a network file system ({kind}), where SQLite's locks are not safe: "
            "let only one machine use this run, or set search.storage"
        ]


def read_id(path: Path) -> str | None:
    """The id of the run in that directory; None where there is none, or no such directory."""
    try:
        found = json.loads((path / OWNER_FILE).read_text(encoding="utf-8"))["id"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


def score_file(method: str) -> str:
    """The scores file of a scoring method in a run directory."""
    return "scores.json" if method == "causal" else f"{SCORES}/{method}.json"


@contextmanager
def replacing(target: Path, mode: int = 0o644) -> Iterator[Path]:
    """A temporary path to write; it becomes target in one step, and on disk, once the block ends without error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix
    )
    os.close(handle)
    try:
        yield Path(temporary)
        _flush(Path(temporary))
        os.chmod(temporary, mode)
        os.replace(temporary, target)
        _flush(target.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)


def require_disk(path: Path, needed_bytes: int) -> None:
    """Raises EnvironmentFault unless the disk of path (or its nearest parent) has that much room."""
    place = nearest_folder(path)
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise EnvironmentFault(
            f"{place}: {free / 1e9:.2f} GB of disk is free, {needed_bytes / 1e9:.2f} GB is needed"
        )


def nearest_folder(path: Path) -> Path:
    """The path itself, or the nearest of its parents that there is."""
    return next(p for p in (path, *path.parents) if p.exists())


def _unwritable(error: OSError) -> str:
    return f"cannot be written ({_reason(error)})"


def _reason(error: OSError) -> str:
    """`read-only file system`."""
    said = error.strerror or str(error)
    return said[:1].lower() + said[1:]


def _flush(path: Path) -> None:
    """Forces a file or directory to disk, so that a rename is never seen before its data."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
