"""Searches compared on the real model: their fronts at equal seconds, and their maps beside selectors' on data that no search saw.

    archsearch run search_spaces/smollm2_135m_gpu.yaml --run-dir GUIDED
    archsearch run search_spaces/smollm2_135m_gpu.yaml --run-dir TPE --reuse GUIDED --set search.sampler=tpe \\
        --set search.representation=ranked
    python -m archsearch.lab.search_compare GUIDED TPE --workers 4 --seconds 480 --figures runs/lab/search_compare.json

RUNs searched the same model, supernet and text with the same objectives and proxies. The first table has the hypervolume of each
search, of its seeds alone and of its random control after equal seconds of evaluation (a worker's, times its share of a GPU) and
after equal trials. For the others the found maps and all selectors' are trained alike on the runs' text and measured on a
held-out text, prompts and files of prompts that the runs did not have; for a model other than SmolLM2, --set data.heldout and
probes.files. Selectors are those whose scores the first RUN has (`archsearch score CONFIG --run-dir RUN --method NAME`).
Readings land in FOLDER/readings.jsonl as they are made; the same command goes on. --dry-run says what there is to train.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import RunConfig
from ..data.overlap import shared_rows
from ..errors import ConfigError, RunFault
from ..search.trial import HELDOUT_FILE
from .bench_folder import BenchFolder, read_config, read_shape
from .entry import add_run, run_script, script_parser
from .found_maps import found_entries, merged, missing_scores
from .found_tables import name_text, record_share, show_share
from .ledger import FAILED, Ledger
from .records import LabBook
from .search_fronts import Fronts, record_fronts, record_search, show_fronts
from .search_runs import HELDOUT_FILES, Search, read_searches
from .selection import MEASURED, Study, jobs_of, lines_of
from .selection_maps import METHODS, Entry, Stage
from .selection_tables import Table, record_readings
from .student_call import add_students, open_workers, prepare_payload
from .student_jobs import Estimate, Job, Left, run_jobs
from .student_worker import TEACHER

SHARES = (1 / 4, 1 / 8, 1 / 16)
ASSETS = "package:archsearch/assets/smollm2_135m"
UNSEEN = (
    "probes.contexts=[1024, 2048, 4096]",
    "probes.prompts=32",
    f"data.heldout={{source: file, path: {ASSETS}/heldout.npy}}",
    "data.heldout_sequences=32",
    f"probes.files=[{{name: stations, path: {ASSETS}/niah_single.jsonl.gz}}, "
    f"{{name: stations_keys, path: {ASSETS}/niah_multikey.jsonl.gz}}]",
)
"""What is set in the run's config after MEASURED and before --set, beside its own prompts and schedule and another seed."""
SEED = 900_001
"""Offset of the seed from the runs', so that prompts are none of a trial's, of a final stage's or of search.retention."""
MOST_DECAY = 0.999
"""Share of the steps over which the rate falls at most: readings allow no 1, and of less than 500 steps this is all."""
STAGE = "compare"


def measured_config(first: Search, overrides: Sequence[str]) -> RunConfig:
    """What students are trained and measured by. Raises ConfigError where its prompts would be the searches'."""
    own = first.config
    as_searched = (
        f"probes.kinds=[{', '.join(own.probes.kinds)}]",
        f"distill.decay_share={min(own.distill.decay_share, MOST_DECAY)}",
        f"seed={own.seed + SEED}",
    )
    config = read_config(first.run, [*MEASURED, *UNSEEN, *as_searched, *overrides])
    if config.seed == own.seed:
        raise ConfigError(
            f"--set seed={config.seed}: the searches' own prompts; allowed: any other seed"
        )
    return config


def seen_rows(searches: Sequence[Search], folder: BenchFolder) -> int:
    """Rows of the held-out text that share a passage with text that a search was measured on.

    Raises ConfigError where all do.
    """
    text_NT = np.load(folder.dir / HELDOUT_FILE, mmap_mode="r")
    seen: set[int] = set()
    for search in searches:
        for path in sorted(search.run.path.glob(HELDOUT_FILES)):
            seen |= {row for row, _ in shared_rows(text_NT, np.load(path, mmap_mode="r"))}
    if len(seen) == len(text_NT):
        raise ConfigError(
            f"{folder.dir / HELDOUT_FILE}: is text that the searches were measured on; allowed: another --set "
            "data.heldout with another --folder"
        )
    return len(seen)


def all_fronts(searches: Sequence[Search]) -> list[Fronts]:
    """The fronts of every length that all searches came to."""
    objectives = searches[0].config.search.objectives
    lengths = [rung.tokens for rung in searches[0].rungs]
    reached = [n for n in lengths if all(n in {r.tokens for r in s.rungs} for s in searches)]
    return [Fronts.of(objectives, tokens, searches) for tokens in reached]


def chosen_entries(
    args: argparse.Namespace, study: Study, stage: Stage, searches: Sequence[Search]
) -> list[Entry]:
    """Found maps first, then the full-attention control and the selectors'; says who is left out for want of scores."""
    lacking = {} if args.only else missing_scores(study.run)
    for selector, methods in lacking.items():
        print(f"{selector}: left out, {study.run.path} has no scores {', '.join(methods)}")
    selectors = [name for name in args.only or METHODS if name not in lacking]
    return merged(found_entries(searches, stage.shares), study.entries(stage, selectors))


def train(
    args: argparse.Namespace,
    study: Study,
    stage: Stage,
    entries: Sequence[Entry],
    payload: Mapping[str, Any],
) -> tuple[Table, Left]:
    """Trains what is missing until the time is over. Raises RunFault where the teacher cannot be measured."""
    ledger, deadline = Ledger(Path(payload["ledger"])), payload["deadline"]
    study = replace(study, rows=ledger.rows())
    jobs, left = jobs_of(study, stage, entries), Left(0)
    print(Estimate.of(study.config, args.rate).text("found maps and selectors'", jobs), flush=True)
    known = study.values(None, 0) is not None
    if jobs or not known:
        executor = open_workers(args, payload)
        try:
            first = (
                Left(0) if known else run_jobs(executor, [Job(TEACHER, None, 0, (0,))], deadline)
            )
            if first.raised:
                raise RunFault("the teacher has no reading; the line above says why")
            left = run_jobs(executor, jobs, deadline)
        finally:
            executor.shutdown()
    study = replace(study, rows=ledger.rows())
    lines = lines_of(study, STAGE, stage, entries)
    return Table(lines, study.values(None, 0) or {}, study.config), left


def parsed() -> argparse.Namespace:
    """The command line. Raises ConfigError for shares, tokens or seeds that there are not."""
    parser = script_parser(__doc__, figures=False)
    add_run(parser, several=True)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of FA heads")
    parser.add_argument("--tokens", type=int, help="of training; else the runs' longest proxy")
    parser.add_argument("--seeds", type=int, default=1, help="orders of batches of every map")
    add_students(parser, "compare in the first RUN")
    args = parser.parse_args()
    if not all(0 < share < 1 for share in args.shares):
        raise ConfigError("--shares: allowed: above 0 and below 1")
    if args.seeds < 1 or (args.tokens or 0) < 0:
        raise ConfigError("allowed: --seeds of 1 or more, --tokens of 0 or more")
    return args


def main() -> None:
    """Command line entry. Raises RunFault, at the end, where students failed."""
    args, started = parsed(), time.time()
    searches = read_searches(args.runs)
    first = searches[0]
    config = measured_config(first, args.overrides)
    tokens = config.search.proxy_tokens[-1] if args.tokens is None else args.tokens
    stage = Stage(tuple(sorted(set(args.shares), reverse=True)), (tokens,), args.seeds)
    study = Study(config, read_shape(first.run), first.run, "", {})
    entries = chosen_entries(args, study, stage, searches)
    if args.dry_run:
        jobs = jobs_of(study, stage, entries)
        print(Estimate.of(config, args.rate).text("found maps and selectors'", jobs))
        return
    book = LabBook(first.config.seed)
    for search in searches:
        record_search(book, search)
    for fronts in all_fronts(searches):
        print(f"{show_fronts(fronts)}\n", flush=True)
        record_fronts(book, fronts)
    if args.figures:
        book.write(args.figures)
    folder = BenchFolder(first.run, args.folder or first.run / STAGE, config)
    payload = prepare_payload(args, folder, tokens, started)
    seen = seen_rows(searches, folder)
    print(
        f"held-out text: {seen} rows share a passage with text that the searches were measured on"
    )
    study = replace(study, settings=payload["settings"])
    table, left = train(args, study, stage, entries, payload)
    book.add("rows of held-out text that a search was measured on", seen, "rows", "0")
    if table.lines:
        record_readings(book, table)
    for share in stage.shares if table.lines else ():
        print(f"\n{show_share(table, share)}")
        record_share(book, table, share)
    if args.figures:
        book.write(args.figures)
    if left.late:
        print(f"{left.late} maps left: the same command goes on")
    broken = [name_text(line.names[0]) for line in table.lines if FAILED in line.row]
    if failed := [*left.raised, *broken]:
        raise RunFault(f"{len(failed)} students failed: {'; '.join(failed)}")


if __name__ == "__main__":
    run_script(main)
