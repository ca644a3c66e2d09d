"""A search that is killed again and again at random moments, and what must hold after each kill and at the end."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from optuna.trial import FrozenTrial
from sqlalchemy.exc import SQLAlchemyError

from ..errors import RunFault
from ..rundir import RunDir
from ..search.outcome import read_outcome
from .stand_in import POINTS, SHAPE, Settings, to_json
from .whole_search import open_database, read_trials, repeated

KINDS = ("driver", "start", "worker", *POINTS)
"""How a kill comes: the driver while trials end; the driver at any moment of its first seconds; one of two workers, and the driver
some time later; or the driver dies of itself where stand_in.POINTS says."""
DEADLINE = 600.0
POLL_SECONDS = 0.02
PASSES = {"statement": 300, "commit": 60, "begin": 6, "end": 6}
"""Most times that a point is passed before the end."""


@dataclass
class Tally:
    """What the kills came to."""

    kills: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    changed: int = 0
    """Finished trials that were gone, or other than before, after a kill."""
    damaged: int = 0
    """Kills after which the database was not whole."""


def start(run_dir: Path, settings: Settings) -> subprocess.Popen[bytes]:
    """A call of the search in a process of its own."""
    command = [sys.executable, "-m", "archsearch.lab.stand_in", str(run_dir), to_json(settings)]
    with run_dir.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def finish(run_dir: Path, settings: Settings) -> None:
    """Runs the search to its end. Raises RunFault where it fails."""
    if status := start(run_dir, settings).wait(timeout=DEADLINE):
        raise RunFault(f"{run_dir.with_suffix('.log')}: the search failed, exit status {status}")


def kill_driver(driver: subprocess.Popen[bytes]) -> bool:
    """Kills a driver and then what it started; whether it was still running."""
    try:
        started = psutil.Process(driver.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    driver.kill()
    status = driver.wait()
    for process in started:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(started, timeout=10)
    return status == -signal.SIGKILL


def kill_many(
    run_dir: Path, settings: Settings, kills: int, rng: random.Random, kinds: Sequence[str] = KINDS
) -> Tally:
    """Kills a search so many times, and checks after each that what was finished is still there as it was.

    Raises RunFault where the search ends before: it needs more trials.
    """
    tally = Tally()
    known: Finished = {}
    order = [kinds[number % len(kinds)] for number in range(kills)]
    rng.shuffle(order)
    while order:
        kind = order.pop()
        tally.calls += 1
        killed = _call(run_dir, settings, kind, rng)
        if not killed:
            raise RunFault(
                f"the search ended after {tally.kills.total()} kills; allowed: more trials"
            )
        tally.kills.update(killed)
        for extra in list(killed.elements())[1:]:
            # A worker's kill comes with one of the driver.
            if extra in order:
                order.remove(extra)
        known = _compare(run_dir, known, tally)
        print(
            f"kill {tally.kills.total()}: {kind}, {len(known)} trials finished",
            flush=True,
        )
    return tally


def _call(run_dir: Path, settings: Settings, kind: str, rng: random.Random) -> Counter[str]:
    """One call that ends by a kill; the kills, none where the search came to its end."""
    if kind in POINTS:
        point = (kind, rng.randint(1, PASSES[kind]))
        status = start(run_dir, replace(settings, die=point)).wait(DEADLINE)
        return Counter([kind] if status == -signal.SIGKILL else [])
    driver = start(run_dir, replace(settings, workers=2 if kind == "worker" else 0))
    found: Counter[str] = Counter()
    if kind == "start":
        time.sleep(rng.uniform(0, 6))
    else:
        _wait_for_trials(run_dir, driver, rng.randint(1, 6))
        if kind == "worker" and _kill_worker(driver, rng):
            found["worker"] += 1
            _wait_for_trials(run_dir, driver, rng.randint(1, 6))
        time.sleep(rng.uniform(0, 0.2))
    if kill_driver(driver):
        found[kind if kind == "start" else "driver"] += 1
    return found


def _kill_worker(driver: subprocess.Popen[bytes], rng: random.Random) -> bool:
    workers = [
        process
        for process in psutil.Process(driver.pid).children(recursive=True)
        if process.name().startswith("ray::_Actor")
    ]
    if not workers:
        return False
    rng.choice(workers).kill()
    return True


def _wait_for_trials(run_dir: Path, driver: subprocess.Popen[bytes], more: int) -> None:
    """Until so many more trials have ended, or the driver has."""
    wanted = _count(run_dir) + more
    deadline = time.monotonic() + DEADLINE
    while _count(run_dir) < wanted and driver.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _count(run_dir: Path) -> int:
    try:
        place = f"file:{run_dir / 'study.db'}?mode=ro"
        with sqlite3.connect(place, uri=True, timeout=5) as connection:
            (count,) = connection.execute(
                "SELECT count(*) FROM trials WHERE state = 'COMPLETE'"
            ).fetchone()
        connection.close()
    except sqlite3.Error:
        return 0  # The search is just making it.
    return int(count)


Finished = Mapping[tuple[str, int], FrozenTrial]


def _compare(run_dir: Path, known: Finished, tally: Tally) -> dict[tuple[str, int], FrozenTrial]:
    """The finished trials of now, and in tally whether those known are among them."""
    if not (run_dir / "study.db").exists():
        return dict(known)
    with sqlite3.connect(run_dir / "study.db", timeout=60) as connection:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    connection.close()
    tally.damaged += verdict != "ok"
    try:
        found = {
            (name, trial.number): trial
            for name, trials in read_trials(RunDir(run_dir)).items()
            for trial in trials
        }
    except (SQLAlchemyError, RuntimeError):
        found = {}  # Killed before the tables were there; with trials known that is a loss, which counts.
    tally.changed += sum(found.get(key) != trial for key, trial in known.items())
    return found


def count_faults(run_dir: Path, settings: Settings) -> dict[str, int]:
    """What is wrong with a search that has ended: candidates lost, counted twice, failed, and trials left open."""
    config = settings.config()
    found = read_trials(RunDir(run_dir))
    outcome = read_outcome(config, RunDir(run_dir), SHAPE)
    lost, wanted = 0, set(range(config.search.trials))
    for rung in outcome.rungs:
        reached = {c.candidate for c in rung.search} | {row.candidate for row in rung.pruned[0]}
        lost += len(wanted - reached)
        wanted = {c.candidate for c in rung.search}
    with open_database(RunDir(run_dir)) as storage:
        left = sum(
            not trial.state.is_finished()
            for study in storage.get_all_studies()
            for trial in storage.get_all_trials(study._study_id)
        )
    return {
        "candidates lost": lost,
        "candidates or head maps with two results": sum(
            len(repeated(trials)) for trials in found.values()
        ),
        "candidates that failed": outcome.failed,
        "trials left open": left,
    }
