"""The seconds of a whole search that is killed in its middle and started again, and whether that lost or repeated anything.

    python -m archsearch.lab.whole_search search_spaces/smollm2_135m_gpu.yaml --run-dir runs/whole \\
        --set search.trials=200 --figures runs/lab/whole_search.json

`archsearch run` gets SIGKILL, with all that it started, once --kill-at of the first rung's candidates are finished, and the same command
then runs to its end. What both print goes to RUN.log beside the run directory. Figures are written whatever they say; the exit status
is not 0 where a candidate was lost, evaluated twice or changed, or where a finished stage ran again.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psutil
from optuna.exceptions import OptunaError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from ..config import RunConfig
from ..configfile import load_config
from ..errors import ConfigError, EnvironmentFault, RunFault
from ..headmap import ModelShape
from ..plan import STAGES
from ..rundir import RunDir
from ..search.front import Candidate
from ..search.outcome import SearchOutcome, read_outcome
from ..search.promotion import promote
from ..search.samplers import quiet_optuna
from ..search.study import study_name
from ..timings import read_timings
from .entry import add_config, run_script, script_parser
from .records import LabBook

POLL_SECONDS = 0.05
KILL_SECONDS = 60.0
"""How long killed processes may take to be gone: a GPU's driver frees their memory first."""
TAIL_LINES = 20
GROUPS = ("search", "control")

Trials = Mapping[str, Sequence[FrozenTrial]]
"""Complete trials by the name of their study."""


@dataclass(frozen=True)
class Snapshot:
    """What a run directory holds while nothing runs. seconds and marked_ns by stage: so far, and when its end was marked."""

    trials: Trials
    seconds: Mapping[str, float]
    marked_ns: Mapping[str, int]

    @classmethod
    def of(cls, run_dir: RunDir) -> Snapshot:
        """Reads a run directory and changes nothing in it."""
        marks = {name: run_dir / f"stages/{name}.json" for name in STAGES}
        stages, _ = read_timings(run_dir)
        return cls(
            read_trials(run_dir),
            {row["stage"]: row["seconds"] for row in stages},
            {name: path.stat().st_mtime_ns for name, path in marks.items() if path.exists()},
        )


@dataclass(frozen=True)
class Times:
    """Moments of both parts, in seconds of time.time()."""

    start: float
    killed: float
    restart: float
    end: float


@contextmanager
def open_database(run_dir: RunDir) -> Iterator[RDBStorage]:
    """The run's studies, read-only. Raises SQLAlchemyError, OptunaError or RuntimeError until the search has made them."""
    # Through a connection of SQLite's own: SQLAlchemy's URLs know no quoted paths.
    place = f"file:{quote(str(run_dir / 'study.db'))}?mode=ro"
    connect = {"creator": lambda: sqlite3.connect(place, uri=True)}
    storage = RDBStorage("sqlite://", engine_kwargs=connect)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def read_trials(run_dir: RunDir) -> Trials:
    """The complete trials of every study of a run."""
    with open_database(run_dir) as storage:
        return {
            study.study_name: storage.get_all_trials(study._study_id, states=(TrialState.COMPLETE,))
            for study in storage.get_all_studies()
        }


def count_finished(run_dir: RunDir, name: str) -> int:
    """Complete trials of a study; 0 where it is not there yet."""
    if not (run_dir / "study.db").exists():
        return 0
    try:
        with open_database(run_dir) as storage:
            study = storage.get_study_id_from_name(name)
            return storage.get_n_trials(study, state=TrialState.COMPLETE)
    except (SQLAlchemyError, OptunaError, RuntimeError, KeyError):
        return 0  # The search is just making it.


class Part:
    """One call of `archsearch run`, in a process session of its own; nothing of it outlives the `with` block."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "archsearch.cli", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill_once(self, due: Callable[[], bool]) -> None:
        """Waits until it is due and kills. Raises RunFault where the call ends before."""
        while not due():
            if self._process.poll() is not None:
                raise self._fault("ended before it was to be killed")
            time.sleep(POLL_SECONDS)
        self.kill()
        if self._process.returncode != -signal.SIGKILL:
            raise self._fault("ended before it could be killed")

    def finish(self) -> None:
        """Waits for the end. Raises RunFault where that is not one of a search, with or without failed candidates."""
        if self._process.wait() not in (0, RunFault.exit_status):
            raise self._fault("failed")

    def kill(self) -> None:
        """Kills the session and all descendants, Ray's too. Raises EnvironmentFault where one stays."""
        found: set[psutil.Process] = set()
        # All are stopped first: a process that is still running might start another one meanwhile.
        while new := self._alive() - found:
            _signal(new, signal.SIGSTOP)
            found |= new
        _signal(found, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + KILL_SECONDS
        while left := {process for process in found if _is_alive(process)} | self._alive():
            if time.monotonic() > deadline:
                pids = sorted(process.pid for process in left)
                raise EnvironmentFault(f"processes {pids} do not end after SIGKILL")
            _signal(left, signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def _alive(self) -> set[psutil.Process]:
        """The session's processes, and descendants that made a session of their own."""
        leader, found = self._process.pid, set()
        if self._process.poll() is None:
            found |= {psutil.Process(leader), *psutil.Process(leader).children(recursive=True)}
        found |= {process for process in psutil.process_iter() if _session(process) == leader}
        return {process for process in found if _is_alive(process)}

    def _fault(self, what: str) -> RunFault:
        lines = self._log.read_text(errors="replace").splitlines()
        print("\n".join(lines[-TAIL_LINES:]), file=sys.stderr)
        return RunFault(f"{self._log}: the run {what}, exit status {self._process.returncode}")


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process still holds anything: a zombie that nobody has asked after does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal(processes: set[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def run_twice(
    config: RunConfig, run_dir: RunDir, command: Sequence[str], kill_at: float
) -> tuple[Times, Snapshot]:
    """Runs, kills and runs again; when, and what the killed part left. Raises RunFault where either part ends otherwise."""
    log = run_dir.path.with_name(f"{run_dir.path.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    name = study_name(config, config.search.proxy_tokens[0])
    due = kill_at * config.search.trials
    start = time.time()
    with Part(command, log) as part:
        part.kill_once(lambda: count_finished(run_dir, name) >= due)
    killed = time.time()
    left = Snapshot.of(run_dir)
    print(f"killed after {killed - start:.1f} s", flush=True)
    restart = time.time()
    with Part(command, log) as part:
        part.finish()
        end = time.time()
    return Times(start, killed, restart, end), left


def asked(config: RunConfig, outcome: SearchOutcome) -> list[tuple[set[int], set[int]]]:
    """Numbers of the candidates that each rung has to evaluate: the search's, seeds included, and the control's."""
    first = set(range(config.search.trials))
    found = [(first, first if config.search.random_control else set())]
    for rung in outcome.rungs[: len(config.search.proxy_tokens) - 1]:
        search, control = promote(config.search, rung.fronts, rung.search, rung.control)
        found.append((_numbers(search.chosen), _numbers(control.chosen)))
    return found


def _numbers(candidates: Sequence[Candidate]) -> set[int]:
    return {c.candidate for c in candidates}


def repeated(trials: Sequence[FrozenTrial]) -> list[int]:
    """Candidates with two results, or with a head map that an earlier candidate of the study had."""
    numbers = Counter(trial.user_attrs["candidate"] for trial in trials)
    owner: dict[str, int] = {}
    for trial in trials:
        owner.setdefault(trial.user_attrs["head_map"], trial.user_attrs["candidate"])
    return sorted(
        number for number, count in numbers.items() if count > 1 or number not in owner.values()
    )


def record_rungs(
    book: LabBook, config: RunConfig, outcome: SearchOutcome, trials: Trials
) -> list[str]:
    """Adds what was evaluated at each rung against what the config asks, and its fronts; what is wrong with that."""
    faults = []
    for place, wanted in enumerate(asked(config, outcome)):
        tokens = config.search.proxy_tokens[place]
        for group, numbers in zip(GROUPS, wanted, strict=True):
            found = trials.get(study_name(config, tokens, control=group == "control"), ())
            done = {trial.user_attrs["candidate"] for trial in found}
            off = {
                "lost": sorted(numbers - done),
                "not_asked": sorted(done - numbers),
                "repeated": repeated(found),
            }
            text = f"candidates evaluated, {group}, {tokens} proxy tokens"
            book.add(text, len(found), "candidates", f"exactly {len(numbers)}", **off)
            faults += [f"{text}: {what} {who}" for what, who in off.items() if who]
        if place < len(outcome.rungs):
            _record_fronts(book, outcome, place)
    return faults


def _record_fronts(book: LabBook, outcome: SearchOutcome, place: int) -> None:
    rung = outcome.rungs[place]
    at = f"{rung.proxy_tokens} proxy tokens"
    book.add(f"points on the front, {at}", len(rung.fronts.points), "points")
    book.add(f"candidates that failed, {at}", len(rung.failures), "candidates")
    for name, volume in rung.fronts.hypervolumes().items():
        if name != "random" or rung.control:
            book.add(f"hypervolume, {name}, {at}", volume, "share of box")


def record_kept(book: LabBook, left: Snapshot, trials: Trials) -> list[str]:
    """Adds how many results of before the kill are there unchanged: values, attributes and times."""
    before = [(name, trial) for name, found in left.trials.items() for trial in found]
    changed = sorted(
        f"{name} candidate {trial.user_attrs['candidate']}"
        for name, trial in before
        if trial not in trials.get(name, ())
    )
    text = "candidates finished before the kill, unchanged at the end"
    kept = len(before) - len(changed)
    book.add(text, kept, "candidates", f"exactly {len(before)}", changed=changed)
    return [f"changed or lost after the kill: {', '.join(changed)}"] if changed else []


def record_times(
    book: LabBook, times: Times, left: Snapshot, ended: Snapshot, limit: float
) -> list[str]:
    """Adds seconds of the whole, the parts and their stages. The stage that was killed lasted from the mark of the one before."""
    whole = times.end - times.start
    book.add(
        "seconds of the whole search, killed and started again", whole, "s", f"at most {limit:g} s"
    )
    book.add("seconds before the kill", times.killed - times.start, "s")
    book.add("seconds from the kill to the restart", times.restart - times.killed, "s")
    book.add("seconds after the restart", times.end - times.restart, "s")
    killed = next(name for name in STAGES if name not in left.marked_ns)
    since = max(left.marked_ns.values()) / 1e9
    before = {**left.seconds, killed: times.killed - since}
    for name in STAGES:
        after = ended.seconds[name] - left.seconds.get(name, 0.0)
        book.add(f"seconds of {name} before the kill", before.get(name, 0.0), "s")
        book.add(f"seconds of {name} after the restart", round(after, 2), "s")
    again = [name for name, mark in left.marked_ns.items() if ended.marked_ns[name] != mark]
    book.add("finished stages that ran again", len(again), "stages", "exactly 0", stages=again)
    return [f"ran again: {', '.join(again)}"] if again else []


UNKNOWN = ("halving", "max_minutes", "max_tokens", "patience")
"""Fields of section search that say how many candidates there are in ways that asked() does not follow."""


def main() -> None:
    """Command line entry. Raises ConfigError where the run directory exists, RunFault where anything was lost or done twice."""
    parser = script_parser(__doc__)
    add_config(parser)
    parser.add_argument("--run-dir", type=Path, required=True, help="must not exist yet")
    parser.add_argument("--kill-at", type=float, default=0.5, help="share of search.trials")
    parser.add_argument("--seconds", type=float, default=900.0, help="what the whole may take")
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    if not 0 < args.kill_at < 1:
        raise ConfigError(f"--kill-at: {args.kill_at:g}; allowed: above 0 and below 1")
    if args.run_dir.exists():
        raise ConfigError(f"--run-dir: {args.run_dir} exists; allowed: a new folder")
    if config.search.storage is not None:
        raise ConfigError("search.storage: is set; allowed: the run's own database")
    search = config.search
    unknown = {name: getattr(search, name) for name in UNKNOWN} | {
        "final.tokens": search.final.tokens
    }
    for name, value in unknown.items():
        if value is not None:
            raise ConfigError(f"search.{name}: is set, and candidates are counted without it here")
    quiet_optuna()
    run_dir = RunDir(args.run_dir)
    overrides = [word for text in args.overrides for word in ("--set", text)]
    command = ["run", str(args.config), "--run-dir", str(args.run_dir), *overrides]
    times, left = run_twice(config, run_dir, command, args.kill_at)
    ended = Snapshot.of(run_dir)
    shape = ModelShape(**run_dir.read_json("teacher.json")["model"])
    outcome = read_outcome(config, run_dir, shape)
    book = LabBook(config.seed)
    faults = [
        *record_times(book, times, left, ended, args.seconds),
        *record_kept(book, left, ended.trials),
        *record_rungs(book, config, outcome, ended.trials),
    ]
    book.write(args.figures)
    for row in book.rows:
        bound = f" ({row['compared_to']})" if row["compared_to"] else ""
        print(f"{row['metric']}: {row['value']:.6g} {row['unit']}{bound}")
    if faults:
        raise RunFault("; ".join(faults))


if __name__ == "__main__":
    run_script(main)
