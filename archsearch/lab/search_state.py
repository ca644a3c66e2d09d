"""Whether a search keeps what it has and counts every trial once: the same twice, killed at any moment, and by the thousand.

    python -m archsearch.lab.search_state --run-dir runs/state --figures runs/lab/search_state.json
    python -m archsearch.lab.search_state --run-dir runs/state --figures ... --part soak

Four parts, all on the CPU and with made-up metrics (stand_in.py): determinism, soak, storage, kills. Figures replace those of an
earlier call, of the soak and of storage those of the same sampler; the exit status is not 0 where one misses its bound.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil

from ..errors import RunFault
from ..rundir import RunDir
from ..search.proposals.choice import BIT_SAMPLERS
from ..search.proposals.ranked import RankedProposals
from ..search.samplers import quiet_optuna
from .entry import run_script, script_parser
from .records import LabBook
from .search_kills import DEADLINE, count_faults, finish, kill_many, start
from .search_seconds import storage_seconds, timed_calls
from .stand_in import Settings, search
from .whole_search import open_database, read_trials, repeated

LENGTHS = {"proxy_tokens": [0, 100, 400], "halving": {}}
CASES: dict[str, dict[str, Any]] = {
    "tpe on ranked": {"sampler": "tpe"},
    "nsga2 on ranked": {"sampler": "nsga2"},
    "guided on free": {"sampler": "guided", "representation": "free"},
    "guided on groups": {"sampler": "guided", "representation": "groups"},
    "random on groups": {"sampler": "random", "representation": "groups"},
}
WORKERS = 4
FLAT_BYTES = 64 * 2**20
"""Growth of the driver over the last three quarters of the soak that still counts as flat: a trial's own record is some kB."""
RESPONSE_BYTES = 5e6
TRIALS_A_SECOND = 20.0
STORAGE_SECONDS = 0.04
"""Most that a trial's writes may take, mean of the last fifth of the trials."""
PARTS = ("determinism", "soak", "storage", "kills")
TRIALS = {"determinism": 96, "soak": 2000, "storage": 500, "kills": 400}


@dataclass
class Check:
    """Adds figures and collects what misses its bound."""

    book: LabBook
    faults: list[str]

    def add(
        self,
        metric: str,
        value: float,
        unit: str,
        *,
        exactly: float | None = None,
        most: float | None = None,
        least: float | None = None,
        **facts: Any,
    ) -> None:
        """Adds a figure and, with a bound, checks it."""
        bounds = {"exactly": exactly, "at most": most, "at least": least}
        said = [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None]
        self.book.add(metric, value, unit, said[0] if said else None, **facts)
        print(f"{metric}: {value:.6g} {unit} {f'({said[0]})' if said else ''}", flush=True)
        missed = (
            (exactly is not None and value != exactly)
            or (most is not None and value > most)
            or (least is not None and value < least)
        )
        if missed:
            self.faults.append(f"{metric}: {value:g}, not {said[0]}")


def measure_determinism(place: Path, check: Check, trials: int) -> None:
    """One worker, the same seed: twice without a stop, and once killed in the middle of each rung."""
    for name, case in CASES.items():
        settings = Settings({"trials": trials, **LENGTHS, **case})
        fronts = []
        for label in ("first", "second", "killed"):
            run_dir = place / f"{name.replace(' ', '-')}-{label}"
            if label == "killed":
                for at in (trials // 2, trials // 8):
                    died = start(run_dir, replace(settings, die=("end", at))).wait(DEADLINE)
                    assert died == -signal.SIGKILL, died
            finish(run_dir, settings)
            fronts.append((run_dir / "pareto.json").read_bytes())
        check.add(
            f"pareto files that differ between two runs, {name}",
            float(fronts[0] != fronts[1]),
            "files",
            exactly=0,
        )
        check.add(
            f"pareto files that differ after two kills, {name}",
            float(fronts[0] != fronts[2]),
            "files",
            exactly=0,
        )


def measure_soak(place: Path, check: Check, trials: int, case: str, workers: int = WORKERS) -> None:
    """Many trials on several workers: counts, speed, memory, and what the dashboard sends."""
    settings = Settings({"trials": trials, **CASES[case]}, workers=workers)
    process, sizes, moments = psutil.Process(), [], []

    def watch(done: int, total: int) -> None:
        moments.append(time.monotonic())
        if done % (total // 20) == 0:
            sizes.append(process.memory_info().rss)

    own: dict[str, Any] = {"trials": trials, "workers": workers, "sampler": case}
    with RunDir(place / case.replace(" ", "-")) as run_dir:
        began = time.monotonic()
        with timed_calls(chooser(settings), ["propose"], time.thread_time) as proposals:
            search(run_dir, settings, progress=watch)
        seconds = time.monotonic() - began
        check_counts(run_dir, check, own)
        check.add(
            "soak: trials a second, start of the workers included", trials / seconds, "1/s", **own
        )
        check_rates(check, moments, proposals, own)
        grown = sizes[-1] - sizes[len(sizes) // 4]
        check.add(
            "soak: growth of the driver over the last three quarters",
            grown,
            "bytes",
            most=FLAT_BYTES,
            sizes=sizes,
            **own,
        )
        size, took = dashboard_response(run_dir, "stand-in@0")
        check.add(
            "soak: dashboard's answer for the study", size, "bytes", most=RESPONSE_BYTES, **own
        )
        check.add("soak: seconds of that answer", took, "s", **own)


def chooser(settings: Settings) -> type:
    """The class that proposes in such a search."""
    config = settings.config().search
    found = RankedProposals if config.representation == "ranked" else BIT_SAMPLERS[config.sampler]
    assert isinstance(found, type)
    return found


def check_counts(run_dir: RunDir, check: Check, own: dict[str, Any]) -> None:
    """Whether every candidate has one result, and every map one candidate."""
    (found,) = read_trials(run_dir).values()
    numbers = {trial.user_attrs["candidate"] for trial in found}
    wanted = own["trials"]
    check.add("soak: trials with a result", len(found), "trials", exactly=wanted, **own)
    check.add("soak: candidates with a result", len(numbers), "candidates", exactly=wanted, **own)
    check.add(
        "soak: candidates or maps evaluated twice",
        len(repeated(found)),
        "candidates",
        exactly=0,
        **own,
    )


def check_rates(
    check: Check, moments: list[float], proposals: list[float], own: dict[str, Any]
) -> None:
    """How fast trials end, by the moments of their ends, and what proposals take, in processor seconds."""
    trials = own["trials"]
    check.add(
        "soak: trials a second, from the first to the last",
        (trials - 1) / (moments[-1] - moments[0]),
        "1/s",
        least=TRIALS_A_SECOND,
        **own,
    )
    last = (trials // 10) / (moments[-1] - moments[-1 - trials // 10])
    check.add("soak: trials a second, last tenth", last, "1/s", **own)
    for part in (0.25, 0.5, 1.0):
        end = round(part * len(proposals))
        some = proposals[max(0, end - trials // 20) : end]
        check.add(
            f"soak: processor seconds of a proposal, {part:.0%} of the way",
            sum(some) / len(some),
            "s",
            **own,
        )


def dashboard_response(run_dir: RunDir, name: str) -> tuple[int, float]:
    """Bytes and seconds of what optuna-dashboard sends for a study when its page is opened."""
    from optuna_dashboard import wsgi

    with open_database(run_dir) as storage:
        app, study = wsgi(storage), storage.get_study_id_from_name(name)
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": f"/api/studies/{study}",
            "QUERY_STRING": "after=0",
            "wsgi.input": BytesIO(),
            "SERVER_NAME": "localhost",
            "SERVER_PORT": "0",
            "wsgi.url_scheme": "http",
        }
        status: list[str] = []
        began = time.monotonic()
        body = b"".join(app(environ, lambda line, headers, error=None: status.append(line)))
        took = time.monotonic() - began
    if not status[0].startswith("200") or len(json.loads(body)["trials"]) < 1:
        raise RunFault(f"the dashboard answers {status[0]}")
    return len(body), took


def measure_storage(place: Path, check: Check, trials: int, case: str) -> None:
    """What the last fifth of many trials costs in the database, in this process."""
    with RunDir(place / case.replace(" ", "-")) as run_dir:
        seconds = storage_seconds(run_dir, Settings({"trials": trials, **CASES[case]}))
    last = seconds[-(trials // 5) :]
    own: dict[str, Any] = {"trials": trials, "sampler": case}
    check.add(
        "storage: seconds of a trial's writes, mean of the last fifth",
        sum(last) / len(last),
        "s",
        most=STORAGE_SECONDS,
        **own,
    )
    check.add("storage: seconds of a trial's writes, most of those", max(last), "s", **own)


def measure_kills(place: Path, check: Check, trials: int, kills: int, seed: int) -> None:
    """One search, killed so many times."""
    settings = Settings({"trials": trials, "max_retries": kills, **LENGTHS}, seconds=0.01)
    run_dir = place / "kills"
    tally = kill_many(run_dir, settings, kills, random.Random(seed))
    finish(run_dir, settings)
    own: dict[str, Any] = {
        "trials": trials,
        "calls": tally.calls,
        "kinds": dict(sorted(tally.kills.items())),
    }
    check.add("kills: SIGKILLs", tally.kills.total(), "kills", least=kills, **own)
    check.add(
        "kills: finished trials gone or changed afterwards",
        tally.changed,
        "trials",
        exactly=0,
        **own,
    )
    check.add(
        "kills: after which the database was damaged", tally.damaged, "kills", exactly=0, **own
    )
    for name, count in count_faults(run_dir, settings).items():
        check.add(f"kills: {name} at the end", count, name.split()[0], exactly=0, **own)


def kept_rows(known: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Known figures that no new one of the same name, and sampler where it has one, replaces."""
    replaced = {(row["metric"], row.get("sampler")) for row in new}
    return [row for row in known if (row["metric"], row.get("sampler")) not in replaced]


def main() -> None:
    """Command line entry. Raises RunFault where a figure misses its bound."""
    parser = script_parser(__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="is emptied first")
    parser.add_argument("--part", choices=PARTS, action="append", help="all where not given")
    parser.add_argument("--trials", type=int, help="of each search")
    parser.add_argument(
        "--case",
        choices=[*CASES],
        action="append",
        help="samplers of the soak and of storage; guided on groups where not given",
    )
    parser.add_argument("--kills", type=int, default=50, help="least SIGKILLs")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills")
    args = parser.parse_args()
    quiet_optuna()
    check = Check(LabBook(args.seed), [])
    for part in args.part or PARTS:
        place = args.run_dir / part
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        trials = args.trials or TRIALS[part]
        if part == "determinism":
            measure_determinism(place, check, trials)
        elif part == "kills":
            measure_kills(place, check, trials, args.kills, args.seed)
        else:
            measure = measure_soak if part == "soak" else measure_storage
            for case in args.case or ("guided on groups",):
                measure(place, check, trials, case)
    known = json.loads(args.figures.read_text()) if args.figures.exists() else []
    check.book.rows = kept_rows(known, check.book.rows) + check.book.rows
    check.book.write(args.figures)
    if check.faults:
        raise RunFault("; ".join(check.faults))


if __name__ == "__main__":
    run_script(main)
