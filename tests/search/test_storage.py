"""Databases of studies: what is wrong with one is found before any work, and no password is shown."""

from __future__ import annotations

import json
import socket
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.passwords import hide_passwords, shown_config
from archsearch.rundir import RunDir
from archsearch.search import storage
from archsearch.search.outcome import read_outcome
from archsearch.search.storage import check_storage, keep_password, open_storage, storage_url
from archsearch.search.study import check_studies
from tests.search.fakes import SHAPE, fake_config, fake_search

SECRET = "postgresql+psycopg2://me:p:w/x@host:5432/studies"
SHOWN = "postgresql+psycopg2://me:***@host:5432/studies"


@pytest.mark.parametrize(
    "url",
    [
        "study.db",
        "",
        "redis://localhost",
        "postgresql://me:secret@host:port/x",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?uri=true",
    ],
)
def test_what_is_no_url_of_a_database_is_a_fault_of_the_config(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^search\.storage: .*; allowed: sqlite:///PATH"
    ) as caught:
        check_storage(url)
    assert "secret" not in str(caught.value)


def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    said = rf"^search\.storage: {SHOWN.replace('*', '.').replace('+', '.')} needs the Python package psycopg2"
    with pytest.raises(EnvironmentFault, match=said):
        check_storage(SECRET)


def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that connects and then waits for ever, as most do."""
    listener = socket.create_server(("127.0.0.1", 0))

    def connect(*_: Any, **__: Any) -> None:
        with socket.create_connection(listener.getsockname()) as connection:
            connection.recv(1)

    driver: Any = ModuleType("pymysql")
    driver.paramstyle, driver.VERSION, driver.Error = "format", (1, 1, 0), Exception
    driver.connect = connect
    monkeypatch.setitem(sys.modules, "pymysql", driver)
    monkeypatch.setattr(storage, "CONNECT_SECONDS", 0.2)
    url = "mysql+pymysql://me:secret@host/studies"
    for check in (check_storage, open_storage):
        with pytest.raises(EnvironmentFault, match=r"me:\*\*\*@.* does not answer within 0\.2 s"):
            check(url)
    listener.close()


def test_sqlite_files_are_checked_and_none_is_made(tmp_path: Path) -> None:
    check_storage(f"sqlite:///{tmp_path / 'new.db'}")
    assert not list(tmp_path.iterdir())
    with pytest.raises(EnvironmentFault, match=r"^search\.storage: .*/none/a\.db: its folder does"):
        check_storage(f"sqlite:///{tmp_path / 'none/a.db'}")
    (tmp_path / "folder").mkdir()
    with pytest.raises(EnvironmentFault, match=r"^search\.storage: .*: unable to open"):
        check_storage(f"sqlite:///{tmp_path / 'folder'}")
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database" * 99)
    with pytest.raises(EnvironmentFault, match=r"damaged\.db: damaged or no SQLite database"):
        check_storage(f"sqlite:///{damaged}")
    assert damaged.read_bytes() == b"no database" * 99


def test_a_database_that_others_hold_or_of_another_version_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    open_storage(url).engine.dispose()
    check_storage(url)
    holder = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(storage, "LOCK_SECONDS", 0)
    with pytest.raises(EnvironmentFault, match=r"locked; another process may hold it"):
        check_storage(url)
    holder.execute("ROLLBACK")
    holder.execute("UPDATE alembic_version SET version_num = 'v9.9.9.a'")
    holder.close()
    with pytest.raises(EnvironmentFault, match=r"^search\.storage: sqlite.*cannot be opened: "):
        check_storage(url)


def test_a_database_of_the_users_own_gets_no_tables_from_a_check(tmp_path: Path) -> None:
    """A dry run asks it whose studies it has."""
    with closing(sqlite3.connect(tmp_path / "own.db", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE mine (number INTEGER)")
    before = (tmp_path / "own.db").read_bytes()
    config = fake_config(storage=f"sqlite:///{tmp_path / 'own.db'}")
    check_studies(config, RunDir(tmp_path / "run"))
    assert (tmp_path / "own.db").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["own.db"]


def test_a_path_that_counts_from_another_folder_makes_no_new_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_config(trials=4, storage="sqlite:///shared.db")
    monkeypatch.chdir(tmp_path)
    fake_search(config, tmp_path / "run")
    run_dir = RunDir(tmp_path / "run")
    assert len(read_outcome(config, run_dir, SHAPE).rungs) == 1
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(EnvironmentFault, match=r"/other/shared\.db: missing; .* was started in$"):
        read_outcome(config, run_dir, SHAPE)
    assert not list((tmp_path / "other").iterdir())


def test_passwords_are_hidden_wherever_they_stand() -> None:
    assert hide_passwords(f"--set search.storage={SECRET} x") == f"--set search.storage={SHOWN} x"
    assert (
        hide_passwords("mysql://h/x?user=a&password=b&c=d") == "mysql://h/x?user=a&password=***&c=d"
    )
    for text in ("postgresql://me@host/x", "sqlite:////a/b@c:d.db", "https://huggingface.co/a@b"):
        assert hide_passwords(text) == text


def test_a_run_keeps_its_password_to_itself(tmp_path: Path) -> None:
    config = fake_config(storage=SECRET)
    with RunDir(tmp_path) as run_dir:
        run_dir.freeze_config(config)
        with pytest.raises(
            ConfigError, match=r"the password of .*\*\*\*.* is not in .*storage\.url"
        ):
            storage_url(run_dir.load_config(), run_dir)
        keep_password(config, run_dir)
        run_dir.freeze_config(config)
        stored = run_dir.load_config()
        assert stored.search.storage == SHOWN
        assert storage_url(stored, run_dir) == storage_url(config, run_dir) == SECRET
        run_dir.check_frozen(fake_config(storage=SECRET.replace("p:w/x", "new")))
    assert (tmp_path / "storage.url").stat().st_mode & 0o777 == 0o600
    others = [path for path in tmp_path.iterdir() if path.name != "storage.url"]
    assert not any("p:w/x" in path.read_text() for path in others)
    assert "p:w" not in json.dumps(shown_config(config))


def test_a_command_line_is_kept_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["archsearch", "run", "--set", f"search.storage={SECRET}"])
    with RunDir(tmp_path) as run_dir:
        run_dir.record_provenance(1)
    assert f"search.storage={SHOWN}" in (tmp_path / "provenance.json").read_text()
    assert "p:w" not in (tmp_path / "provenance.json").read_text()
