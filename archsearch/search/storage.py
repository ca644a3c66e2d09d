"""The database of studies: checked without a trace before any work, opened safely, its password kept apart. No torch."""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from sqlalchemy import URL, NullPool, create_engine, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from ..config import RunConfig
from ..errors import ConfigError, EnvironmentFault, FieldFault
from ..mounts import network_file_system
from ..passwords import HIDDEN, hide_passwords
from ..rundir import RunDir, replacing

FIELD = "search.storage"
SECRET_FILE = "storage.url"
"""The URL with its password, for the owner's eyes alone; config.json has it without."""
LOCK_SECONDS = 60
"""How long a write waits for a reader, such as the dashboard, to let go of an SQLite file."""
CONNECT_SECONDS = 30.0
"""How long a server may take to answer."""
_ALLOWED = "allowed: sqlite:///PATH, postgresql://..., mysql://..."

_T = TypeVar("_T")


def storage_url(config: RunConfig, run_dir: RunDir) -> str:
    """The URL of a run's studies, with its password where it has one.

    Raises ConfigError where the config comes from the run directory and its password is not kept there.
    """
    url = config.search.storage
    if url is None:
        return run_dir.storage
    if HIDDEN not in url:
        return url
    secret = run_dir / SECRET_FILE
    kept = secret.read_text(encoding="utf-8").strip() if secret.exists() else ""
    if hide_passwords(kept) != url:
        raise ConfigError(
            f"{FIELD}: the password of {url} is not in {secret}; `archsearch run` with the run's config writes it"
        )
    return kept


def keep_password(config: RunConfig, run_dir: RunDir) -> None:
    """Writes the URL down for commands that have only the run directory, if it has a password."""
    url = config.search.storage
    if url is not None and hide_passwords(url) != url:
        with replacing(run_dir / SECRET_FILE, mode=0o600) as path:
            path.write_text(url + "\n", encoding="utf-8")


def sqlite_file(url: str) -> Path | None:
    """The file of an SQLite URL; None for a server's. Raises ConfigError as open_storage does."""
    parsed = _parse(url)
    return Path(str(parsed.database)) if parsed.get_backend_name() == "sqlite" else None


def check_storage(url: str) -> None:
    """Finds out whether the database can be opened and written, and leaves it as it was; none is made.

    Raises ConfigError for an URL that is none, FieldFault for a driver, a folder or a server that is not there, and for
    a database that is damaged, of another version of Optuna, or not to be written.
    """
    parsed = _parse(url)
    with _opening(parsed):
        if parsed.get_backend_name() != "sqlite":
            _in_time(partial(_check_server, parsed, url), parsed)
            return
        try:
            _check_sqlite(Path(str(parsed.database)), url)
        except EnvironmentFault as error:
            raise FieldFault(f"{FIELD}: {error}") from error


def holds_studies(url: str) -> bool:
    """Whether the database is there and has Optuna's tables; none is made. Raises as open_storage does."""
    parsed = _parse(url)
    with _opening(parsed):
        if parsed.get_backend_name() != "sqlite":
            return _in_time(partial(_has_tables, parsed), parsed)
        path = Path(str(parsed.database))
        if not path.exists():
            return False
        with _sqlite(path) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'studies'")
            return tables.fetchone() is not None


def open_storage(url: str) -> RDBStorage:
    """The storage at an Optuna URL; a database that does not exist is made.

    Raises ConfigError where the URL is none, EnvironmentFault where the database is damaged or out of reach;
    a damaged file is left as it is.
    """
    parsed = _parse(url)
    with _opening(parsed):
        if parsed.get_backend_name() != "sqlite":
            return _in_time(partial(RDBStorage, url), parsed)
        _prepare_sqlite(Path(str(parsed.database)))
        storage = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": LOCK_SECONDS}})
    event.listen(storage.engine, "connect", _relax_syncs)
    storage.engine.dispose()
    return storage


def find_storage(config: RunConfig, run_dir: RunDir) -> RDBStorage | None:
    """The storage of a run's studies, None where it has none yet; none is made.

    Raises EnvironmentFault where the database of a run that has searched is missing, and as open_storage does.
    """
    url = storage_url(config, run_dir)
    file = sqlite_file(url)
    if file is None or file.exists():
        return open_storage(url)
    from_elsewhere = not file.is_absolute() and run_dir.has_trials()
    if from_elsewhere or run_dir.stage("search") is not None:
        where = "; its path counts from the folder that the run was started in" * from_elsewhere
        raise EnvironmentFault(
            f"{file.absolute()}: missing; it holds the trials of this run{where}"
        )
    return None


@contextmanager
def storage_faults(url: str) -> Iterator[None]:
    """Turns what a database that fails or is interfered with raises into EnvironmentFault."""
    try:
        yield
    except UpdateFinishedTrialError as error:
        raise EnvironmentFault(
            f"{FIELD}: another process has ended a trial of this run in {hide_passwords(url)}; one run at a time may "
            "work on a study"
        ) from error
    except (SQLAlchemyError, StorageInternalError) as error:
        raise EnvironmentFault(
            f"{FIELD}: {hide_passwords(url)} fails: {_cause(error)}; the same command goes on once it works"
        ) from error


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
        parsed.get_dialect()
    except (ArgumentError, ValueError) as error:
        raise ConfigError(
            f"{FIELD}: {hide_passwords(url)!r} is no URL of a database; {_ALLOWED}"
        ) from error
    except ImportError:
        return parsed  # Of a driver, which whoever opens it misses.
    place = str(parsed.database or "")
    if parsed.get_backend_name() == "sqlite" and (
        place in ("", ":memory:") or place.startswith("file:")
    ):
        raise ConfigError(f"{FIELD}: {url} names no file; {_ALLOWED}")
    return parsed


@contextmanager
def _opening(parsed: URL) -> Iterator[None]:
    shown = parsed.render_as_string(hide_password=True)
    try:
        yield
    except ImportError as error:
        package = error.name or str(error)
        raise FieldFault(
            f"{FIELD}: {shown} needs the Python package {package}, which is not installed"
        ) from error
    except (SQLAlchemyError, StorageInternalError, RuntimeError) as error:
        raise FieldFault(f"{FIELD}: {shown} cannot be opened: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """The first line of what the database itself says."""
    inner = getattr(error, "orig", None) or error.__cause__ or error
    said = getattr(inner, "orig", None) or inner
    return (str(said).strip() or type(said).__name__).splitlines()[0]


def _in_time(call: Callable[[], _T], parsed: URL) -> _T:
    """What the call answers. One that does not end is left behind in its thread, whatever the driver's own limits."""
    answers: list[_T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    if errors:
        raise errors[0]
    if not answers:
        shown = parsed.render_as_string(hide_password=True)
        raise FieldFault(f"{FIELD}: {shown} does not answer within {CONNECT_SECONDS:g} s")
    return answers[0]


def _has_tables(parsed: URL) -> bool:
    with create_engine(parsed, poolclass=NullPool).connect() as connection:
        return inspect(connection).has_table("studies")


def _check_server(parsed: URL, url: str) -> None:
    """Writes in a transaction that is rolled back: a row where Optuna's tables are, a table where they are not."""
    engine = create_engine(parsed, poolclass=NullPool)
    with engine.connect() as connection, connection.begin() as transaction:
        is_there = inspect(connection).has_table("studies")
        name = f"archsearch_{uuid4().hex}"
        if is_there:
            row = text("INSERT INTO studies (study_name) VALUES (:name)")
            connection.execute(row, {"name": name})
        elif parsed.get_backend_name() == "postgresql":  # Others keep a table that is rolled back.
            connection.execute(text(f"CREATE TABLE {name} (number INTEGER)"))
        transaction.rollback()
    if is_there:
        RDBStorage(url).engine.dispose()  # Finds another version's tables.


def _check_sqlite(path: Path, url: str) -> None:
    _require_folder(path)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise EnvironmentFault(f"{path.parent} cannot be written ({said})") from error
    if path.exists() and path.stat().st_size:
        with _sqlite(path) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if "version_info" in tables:
            RDBStorage(url).engine.dispose()  # Finds another version's tables.


def _prepare_sqlite(path: Path) -> None:
    """Checks an existing file, and lets readers look on while we write."""
    _require_folder(path)
    fresh = not path.exists() or path.stat().st_size == 0
    with _sqlite(path) as connection:
        if not fresh:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
        # A write-ahead log needs shared memory, which network file systems lack.
        if network_file_system(path.absolute()) is None:
            connection.execute("PRAGMA journal_mode=WAL")


def _require_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise EnvironmentFault(f"{path}: its folder does not exist")


@contextmanager
def _sqlite(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(
            sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)
        ) as connection:
            yield connection
    except sqlite3.OperationalError as error:
        held = "; another process may hold it" if "lock" in str(error) else ""
        raise EnvironmentFault(f"{path}: {error}{held}") from error
    except sqlite3.DatabaseError as error:
        raise EnvironmentFault(
            f"{path}: damaged or no SQLite database ({error}); nothing was changed. The other files of the "
            "run are not touched by this: move the database away to search anew with them, or save its "
            f"trials with `sqlite3 {path.name} .recover`"
        ) from error


def _relax_syncs(connection: sqlite3.Connection, _: Any) -> None:
    """With a write-ahead log this loses nothing when a process dies, and spares a disk flush a write."""
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    if mode == "wal":
        connection.execute("PRAGMA synchronous=NORMAL")
