"""How lab scripts end: faults in one line, SIGTERM like Ctrl-C; and what they say of their options."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from archsearch.errors import ConfigError, EnvironmentFault, RunFault
from archsearch.lab import entry
from archsearch.lab.records import LabBook, write_records

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "archsearch/lab").glob("*.py")
    if "run_script(main)" in path.read_text() and path.stem != "entry"
)
STOPPED = """\
import sys, time
from pathlib import Path
from archsearch.lab.entry import run_script
from archsearch.lab.records import LabBook

def main():
    book = LabBook(0)
    with book.kept(Path(sys.argv[1])):
        book.add("first", 1.0, "s")
        print("ready", flush=True)
        time.sleep(60)
        book.add("second", 2.0, "s")

run_script(main)
"""


@pytest.mark.parametrize(
    ("fault", "status"),
    [(ConfigError("a: 1"), 2), (EnvironmentFault("no GPU"), 3), (RunFault("one failed"), 4)],
)
def test_a_fault_is_one_line_and_its_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: Any, status: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/score_cost.py"])
    before = signal.getsignal(signal.SIGTERM)

    def main() -> None:
        raise fault

    with pytest.raises(SystemExit) as ended:
        entry.run_script(main)
    signal.signal(signal.SIGTERM, before)
    assert ended.value.code == status
    assert capsys.readouterr().err == f"score_cost: {fault}\n"


def test_figures_are_written_where_a_script_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "figures.json"
    command = [sys.executable, "-c", STOPPED, str(path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        error = process.communicate()[1]
    assert process.returncode == entry.INTERRUPTED
    assert error.endswith(": interrupted\n")
    assert "Traceback" not in error
    assert [row["metric"] for row in json.loads(path.read_text())] == ["first"]


def test_without_figures_old_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), LabBook(0).kept(path):
        raise ZeroDivisionError
    assert path.read_text() == "old"


def test_figures_that_cannot_be_written_are_a_fault_of_the_machine() -> None:
    with pytest.raises(EnvironmentFault, match=r"^/proc/figures\.json: cannot be written \("):
        write_records([], Path("/proc/figures.json"))


def test_the_scripts_that_the_readme_names_are_here() -> None:
    assert {"score_cost", "knockout", "twin_inits", "selector_table", "selection"} <= {*SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_of_a_script_has_a_help(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"archsearch.lab.{script}")
    seen: list[argparse.ArgumentParser] = []

    def parse(parser: argparse.ArgumentParser) -> None:
        seen.append(parser)
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(SystemExit):
        module.main()
    (parser,) = seen
    assert parser.description == module.__doc__
    assert [action.dest for action in parser._actions if not action.help] == []
    assert f"python -m archsearch.lab.{script}" in parser.format_help()
