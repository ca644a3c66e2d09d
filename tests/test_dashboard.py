"""What is run to serve a dashboard."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from archsearch import dashboard
from archsearch.rundir import RunDir
from archsearch.search.storage import keep_password
from tests.search.fakes import fake_config

SECRET = "postgresql+psycopg2://me:p%22w@host:5432/studies"
PROBE = """
import sys
from types import ModuleType
module = ModuleType("optuna_dashboard._cli")
module.main = lambda: print(sys.argv)
sys.modules["optuna_dashboard._cli"] = module
"""


def test_the_dashboard_gets_a_password_that_no_command_line_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    begin = subprocess.run

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert not any("p%22w" in word for word in command)
        place = command.index("-c") + 1
        told = [*command[:place], PROBE + command[place], *command[place + 1 :]]
        done = begin(told, **options, capture_output=True, text=True)
        started.append(done.stdout.strip())
        return done

    with RunDir(tmp_path) as run_dir:
        run_dir.freeze_config(fake_config(storage=SECRET))
        keep_password(fake_config(storage=SECRET), run_dir)
    monkeypatch.setattr(dashboard, "check_storage", lambda _: None)
    monkeypatch.setattr(dashboard, "_require_free", lambda _: None)
    monkeypatch.setattr(subprocess, "run", run)
    dashboard.serve(run_dir, "8080", print)
    words = ["optuna-dashboard", SECRET, "--host", "127.0.0.1", "--port", "8080"]
    assert started == [repr(words)]
