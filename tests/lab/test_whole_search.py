"""A whole search, killed and started again: what is left of it, and what is said of what was lost or repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import psutil
import pytest
from optuna.trial import FrozenTrial, create_trial

from archsearch.config import RunConfig
from archsearch.configfile import load_config
from archsearch.errors import ConfigError, RunFault
from archsearch.lab import whole_search
from archsearch.lab.records import LabBook
from archsearch.lab.whole_search import Part, Snapshot, Times
from archsearch.plan import STAGES

ROOT = Path(__file__).parents[2]
TRIALS, TOKENS = 10, (0, 256)
SEARCHED = 6
"""Trials of the search that is killed: seeds, and two that the sampler chooses."""
SPAWN = """\
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
own = subprocess.Popen(sleep, start_new_session=True)
print(own.pid, subprocess.Popen(sleep).pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the subprocesses import is this tree."""
    found = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in found if path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def call(monkeypatch: pytest.MonkeyPatch, config: Path, run: Path, *words: str) -> Path:
    figures = run.with_name("figures.json")
    command = ["whole_search", str(config), "--run-dir", str(run), "--figures", str(figures)]
    monkeypatch.setattr(sys, "argv", [*command, *words])
    whole_search.main()
    return figures


def test_a_killed_search_ends_with_every_candidate_once(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "a run#1.x"
    sets = [f"search.trials={SEARCHED}", "search.max_promoted=2"]
    words = [word for change in sets for word in ("--set", change)]
    path = call(monkeypatch, run_config, run, "--kill-at", "0.7", *words)
    rows = {row["metric"]: row for row in json.loads(path.read_text())}

    def value(metric: str) -> Any:
        return rows[metric]["value"]

    whole = rows["seconds of the whole search, killed and started again"]
    assert whole["compared_to"] == "at most 900 s"
    parts = ("before the kill", "from the kill to the restart", "after the restart")
    assert whole["value"] == pytest.approx(sum(value(f"seconds {part}") for part in parts))
    for stage in ("data", "supernet", "scores"):
        assert value(f"seconds of {stage} before the kill") > 0
        assert value(f"seconds of {stage} after the restart") == 0
    for part in ("before the kill", "after the restart"):
        assert 0 < value(f"seconds of search {part}") < value(f"seconds {part}")
    assert value("seconds of report before the kill") == 0
    assert value("finished stages that ran again") == 0

    kept = rows["candidates finished before the kill, unchanged at the end"]
    assert 4 <= kept["value"] < 2 * SEARCHED
    assert kept["compared_to"] == f"exactly {kept['value']}"
    for group in ("search", "control"):
        assert value(f"candidates evaluated, {group}, 0 proxy tokens") == SEARCHED
        assert value(f"candidates evaluated, {group}, 256 proxy tokens") >= 1
    trials = json.loads((run / "trials.json").read_text())["rungs"]
    for rung in trials:
        at = f"{rung['proxy_tokens']} proxy tokens"
        assert value(f"points on the front, {at}") == sum(
            c["on_front"] for c in rung["candidates"] if c["method"] != "random-control"
        )
        for name, volume in rung["hypervolume"].items():
            assert value(f"hypervolume, {name}, {at}") == pytest.approx(volume)
    log = run.with_name(f"{run.name}.log").read_text()
    assert log.count("scores    kept: ") == 1


def test_bad_arguments_are_refused(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    with pytest.raises(ConfigError, match="there exists; allowed: a new folder"):
        call(monkeypatch, run_config, there)
    new = tmp_path / "new"
    with pytest.raises(ConfigError, match=r"--kill-at: 1; allowed"):
        call(monkeypatch, run_config, new, "--kill-at", "1")
    with pytest.raises(ConfigError, match=r"search\.storage: is set"):
        call(monkeypatch, run_config, new, "--set", "search.storage=sqlite:///x.db")
    with pytest.raises(ConfigError, match=r"search\.patience: is set"):
        call(monkeypatch, run_config, new, "--set", "search.patience=4")
    assert not new.exists()


def test_a_run_that_ends_by_itself_is_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    with (
        Part(["run", str(tmp_path / "missing.yaml")], log) as part,
        pytest.raises(RunFault, match="ended before it was to be killed, exit status 2"),
    ):
        part.kill_once(lambda: False)
    assert "missing.yaml" in capsys.readouterr().err
    with (
        Part(["run", str(tmp_path / "missing.yaml")], log) as part,
        pytest.raises(RunFault, match="the run failed, exit status 2"),
    ):
        part.finish()


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Part, list[int]]]:
    """A part with a child in its session and one with a session of its own, as a worker may be."""
    popen = subprocess.Popen

    def start(_: Any, **options: Any) -> subprocess.Popen[bytes]:
        return popen([sys.executable, "-c", SPAWN], **options)

    log = tmp_path / "log"
    monkeypatch.setattr(subprocess, "Popen", start)
    part = Part([], log)
    monkeypatch.undo()
    deadline = time.monotonic() + 30
    while not log.read_text().endswith("\n") and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = [int(word) for word in log.read_text().split()]
    yield part, pids
    for pid in pids:
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()


def test_a_kill_leaves_no_descendant(family: tuple[Part, list[int]]) -> None:
    part, pids = family
    children = [psutil.Process(pid) for pid in pids]
    assert len(children) == 2
    assert all(child.is_running() for child in children)
    part.kill_once(lambda: True)
    for child in children:
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def made_trial(candidate: int, head_map: str, value: float = 1.0) -> FrozenTrial:
    attributes = {"candidate": candidate, "head_map": head_map}
    return create_trial(values=[value, 2.0], user_attrs=attributes)


def test_candidates_evaluated_twice_are_found() -> None:
    trials = [made_trial(0, "FG"), made_trial(1, "GF"), made_trial(2, "FG"), made_trial(3, "GG")]
    assert whole_search.repeated(trials[1:]) == []
    assert whole_search.repeated(trials) == [2]
    assert whole_search.repeated([*trials, made_trial(1, "GF")]) == [1, 2]


def test_lost_and_changed_candidates_are_named(run_config: Path) -> None:
    config: RunConfig = load_config(run_config, ["search.proxy_tokens=[0]"])
    trials = [made_trial(number, f"{number:05b}") for number in range(TRIALS)]
    names = "check@0", "check-random@0"
    outcome: Any = SimpleNamespace(rungs=[])
    book = LabBook(0)
    whole = dict.fromkeys(names, trials)
    assert whole_search.record_rungs(book, config, outcome, whole) == []
    lost = whole | {names[1]: [*trials[:4], *trials[5:], made_trial(11, "more")]}
    faults = whole_search.record_rungs(book, config, outcome, lost)
    text = "candidates evaluated, control, 0 proxy tokens"
    assert faults == [f"{text}: lost [4]", f"{text}: not_asked [11]"]

    left = Snapshot({names[0]: trials[:3]}, {}, {})
    assert whole_search.record_kept(book, left, whole) == []
    other = made_trial(1, "00001", 1.5)
    changed = {names[0]: [trials[0], other, *trials[2:]]}
    (fault,) = whole_search.record_kept(book, left, changed)
    assert fault == "changed or lost after the kill: check@0 candidate 1"


def test_stages_that_ran_again_are_named() -> None:
    left = Snapshot({}, {"teacher": 1.0, "data": 2.0}, {"teacher": 10**9, "data": 3 * 10**9})
    marks = dict.fromkeys(STAGES, 9 * 10**9) | left.marked_ns
    ended = Snapshot({}, dict.fromkeys(STAGES, 4.0) | left.seconds, marks)
    times, book = Times(0.0, 5.0, 6.0, 9.5), LabBook(0)
    assert whole_search.record_times(book, times, left, ended, 9.0) == []
    rows = {row["metric"]: row["value"] for row in book.rows}
    assert rows["seconds of supernet before the kill"] == 2.0
    assert rows["seconds of supernet after the restart"] == 4.0
    again = replace(ended, marked_ns=marks | {"data": 7 * 10**9})
    assert whole_search.record_times(book, times, left, again, 9.0) == ["ran again: data"]


def test_a_study_is_counted_only_once_it_is_there(tmp_path: Path) -> None:
    run_dir = whole_search.RunDir(tmp_path)
    assert whole_search.count_finished(run_dir, "a") == 0
    (tmp_path / "study.db").touch()
    assert whole_search.count_finished(run_dir, "a") == 0
    assert (tmp_path / "study.db").stat().st_size == 0
    (tmp_path / "study.db").unlink()
    study = optuna.create_study(
        storage=run_dir.storage, study_name="a", directions=["minimize"] * 2
    )
    study.add_trials([made_trial(number, f"{number:03b}") for number in range(5)])
    study.ask()
    assert whole_search.count_finished(run_dir, "a") == 5
    assert whole_search.count_finished(run_dir, "b") == 0
