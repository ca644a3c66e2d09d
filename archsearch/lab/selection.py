"""Selectors of full-attention heads compared at equal budgets: the students of their maps, trained alike and measured.

    python -m archsearch.lab.selection RUN --stage A --workers 4 --seconds 480 --figures runs/lab/selection.json \\
        --set 'data.heldout={source: file, path: package:archsearch/assets/smollm2_135m/heldout.npy}' \\
        --set data.heldout_sequences=32 --set 'probes.files=[{name: stations, path: \\
        package:archsearch/assets/smollm2_135m/niah_single.jsonl.gz}, {name: stations_keys, path: \\
        package:archsearch/assets/smollm2_135m/niah_multikey.jsonl.gz}]'

RUN has scores and a supernet; scores that are missing are made first (`archsearch score RUN_CONFIG --method NAME`). Each map is
one run at a constant rate, with a short fork whose rate falls at each reading. Stage A trains the maps of all selectors, B those
of the best of A, C the best of B with several orders of batches. Readings land in FOLDER/readings.jsonl as they are made; the same
command goes on. --dry-run says what a stage would train, and about how long.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..errors import ConfigError
from ..headmap import ModelShape
from ..rundir import RunDir
from ..search.seeds import read_scores
from .bench_folder import BenchFolder, read_config, read_shape
from .entry import add_run, run_script, script_parser
from .ledger import VALUES, Ledger
from .selection_maps import (
    CONTROL,
    LAYERS,
    METHODS,
    STAGES,
    UNITS,
    Entry,
    Stage,
    deciding,
    entries_of,
    needed_scores,
    ranked,
    retrieval_columns,
)
from .selection_tables import Line, Table, record, show
from .student_call import add_students, open_workers, prepare_payload
from .student_jobs import Estimate, Job, run_jobs
from .student_worker import TEACHER, reading_key

MEASURED = (
    "probes.kinds=[copying, labels, arithmetic, lookup, agreement]",
    "probes.unseen=[single, multikey]",
    "probes.contexts=[1024, 2048, 4096, 8192]",
    "probes.prompts=16",
    "data.extra_heldout=[{label: docs, source: docstrings}]",
    "distill.decay_share=0.2",
    "distill.cache_gib=16",
)
"""What is set in the run's config before --set: prompts of a kind that nothing is trained on, text that no model has drawn,
and a rate that is constant until a reading."""
CHOICE = "choice"
"""In the key of a row that says which selectors a stage trains."""


@dataclass(frozen=True)
class Study:
    """What a call is about. rows: the ledger's, by key."""

    config: RunConfig
    shape: ModelShape
    run: RunDir
    settings: str
    rows: Mapping[str, dict[str, Any]]

    def values(self, entry: Entry | None, tokens: int, seed: int = 0) -> Mapping[str, float] | None:
        """The figures of a map, None where there are none (yet); without an entry those of the teacher."""
        head_map = None if entry is None else entry.head_map
        row = self.rows.get(reading_key(self.settings, head_map, seed, tokens), {})
        return row.get(VALUES)

    def entries(self, stage: Stage, selectors: Sequence[str]) -> list[Entry]:
        """The maps of a stage."""
        tables = read_scores(self.run, needed_scores(selectors))
        return entries_of(
            self.shape,
            tables,
            selectors,
            stage.shares,
            stage.units,
            seed=self.config.seed,
            cost=self.config.cost,
        )

    def columns(self) -> tuple[list[str], list[str]]:
        """All retrieval columns, and those that the teacher answers well enough to decide."""
        teacher = self.values(None, 0) or {}
        columns = retrieval_columns(teacher)
        return columns, deciding(columns, teacher)


def choose(study: Study, name: str, stages: Mapping[str, Stage], ledger: Ledger) -> list[str]:
    """The selectors of a stage: all, or the best of the stage before and evenly spaced layers; a choice is written down.

    Raises ConfigError where that stage has maps without their readings.
    """
    stage, key = stages[name], f"{study.settings}/{CHOICE}/{name}"
    if not stage.before:
        return list(METHODS)
    if key not in study.rows:
        before = stages[stage.before]
        own = choose(study, stage.before, stages, ledger) if before.before else list(METHODS)
        # At this stage's shares and units, which may be fewer.
        wanted = replace(before, shares=stage.shares, units=stage.units)
        selectors = best_selectors(study, wanted, own, stage)
        ledger.add(key, map=None, selectors=selectors)
        return selectors
    chosen: list[str] = study.rows[key]["selectors"]
    return chosen


def best_selectors(
    study: Study, before: Stage, selectors: Sequence[str], stage: Stage
) -> list[str]:
    """The best selectors by the last reading of the stage before, and evenly spaced layers."""
    entries, tokens = study.entries(before, selectors), before.readings[-1]
    keys = [reading_key(study.settings, entry.head_map, 0, tokens) for entry in entries]
    if missing := [key for key in keys if key not in study.rows]:
        raise ConfigError(
            f"stage {stage.before}: {len(missing)} of {len(entries)} maps have no reading at {tokens:,} tokens yet; "
            "allowed: that stage first, or --only with selectors"
        )
    _, decide = study.columns()
    order = ranked(entries, lambda entry: study.values(entry, tokens), decide, stage.units)
    return [*[name for name, _ in order if name != LAYERS][: stage.best], LAYERS]


def jobs_of(study: Study, stage: Stage, entries: Sequence[Entry]) -> list[Job]:
    """A job for each map and seed whose readings are not all there: the long ones of one seed after the other."""
    jobs = []
    for seed in range(stage.seeds):
        for entry in entries:
            # One control tells what training does by itself.
            if seed and entry.names[0][0] == CONTROL:
                continue
            keys = [reading_key(study.settings, entry.head_map, seed, t) for t in stage.readings]
            missing = [
                t for key, t in zip(keys, stage.readings, strict=True) if key not in study.rows
            ]
            if missing:
                name = ", ".join(
                    f"{selector}/{unit}/{share:g}" for selector, unit, share, _ in entry.names
                )
                jobs.append(Job(name, entry.head_map, seed, tuple(missing)))
    return jobs


def lines_of(study: Study, name: str, stage: Stage, entries: Sequence[Entry]) -> list[Line]:
    """Rows of the table: a reading of a map each, under every selector that chose it."""
    lines = []
    for entry in entries:
        for seed in range(stage.seeds):
            for tokens in stage.readings:
                key = reading_key(study.settings, entry.head_map, seed, tokens)
                row = study.rows.get(key)
                if row is not None:
                    lines.append(Line(name, tuple(entry.names), entry.head_map, tokens, seed, row))
    return lines


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = script_parser(__doc__, figures=False)
    add_run(parser)
    parser.add_argument("--stage", choices=STAGES, required=True, help="what is trained")
    parser.add_argument(
        "--units", nargs="+", choices=UNITS, help="single heads, KV groups or layers"
    )
    parser.add_argument("--shares", type=float, nargs="+", help="of full-attention heads")
    parser.add_argument("--seeds", type=int, help="of random maps")
    parser.add_argument("--tokens", type=int, nargs="+", help="readings, in place of the stage's")
    parser.add_argument("--tokens-before", type=int, nargs="+", help="those of the stages before")
    add_students(parser, "RUN/selection")
    return parser.parse_args()


def chosen_stages(args: argparse.Namespace) -> dict[str, Stage]:
    """STAGES with what the command line changes: shares, units and seeds of its stage, readings also of those before."""
    stages = dict(STAGES)
    for index, name in enumerate(list(STAGES)[: list(STAGES).index(args.stage)]):
        if args.tokens_before and index < len(args.tokens_before):
            stages[name] = replace(stages[name], readings=(args.tokens_before[index],))
    own: dict[str, Any] = {
        "shares": args.shares and tuple(args.shares),
        "units": args.units and tuple(args.units),
        "readings": args.tokens and tuple(sorted(args.tokens)),
        "seeds": args.seeds,
    }
    given = {field: value for field, value in own.items() if value}
    stages[args.stage] = replace(stages[args.stage], **given)
    return stages


def expected(args: argparse.Namespace, study: Study, stage: Stage) -> list[Job]:
    """About the jobs of a stage before anything is trained: where it waits for another, any selectors are the best."""
    by_head = [name for name, units in METHODS.items() if "head" in units]
    any_best = by_head[: stage.best]
    selectors = args.only or (any_best if stage.before else list(METHODS))
    entries = study.entries(stage, list(dict.fromkeys([*selectors, LAYERS])))
    return jobs_of(study, stage, entries)


def train_stage(args: argparse.Namespace, study: Study, payload: Mapping[str, Any]) -> Table:
    """Trains what is missing until the time is over, and says how much is left."""
    stages, ledger = chosen_stages(args), Ledger(Path(payload["ledger"]))
    stage, deadline = stages[args.stage], payload["deadline"]
    executor = open_workers(args, payload)
    try:
        run_jobs(executor, [Job(TEACHER, None, 0, (0,))], deadline)
        study = replace(study, rows=ledger.rows())
        selectors = args.only or choose(study, args.stage, stages, ledger)
        entries = study.entries(stage, selectors)
        jobs = jobs_of(study, stage, entries)
        estimate = Estimate.of(study.config, args.rate)
        print(estimate.text(f"stage {args.stage}: {', '.join(selectors)}", jobs), flush=True)
        left = run_jobs(executor, jobs, deadline)
    finally:
        executor.shutdown()
    print(f"{left.jobs} maps left" if left.jobs else f"stage {args.stage} is done")
    study = replace(study, rows=ledger.rows())
    lines = lines_of(study, args.stage, stage, entries)
    return Table(lines, study.values(None, 0) or {}, study.config)


def main() -> None:
    """Command line entry."""
    args, started = parsed(), time.time()
    run, stage = RunDir(args.run), chosen_stages(args)[args.stage]
    config = read_config(run, [*MEASURED, *args.overrides])
    if args.dry_run:
        study = Study(config, read_shape(run), run, "", {})
        jobs = expected(args, study, stage)
        print(Estimate.of(config, args.rate).text(f"stage {args.stage}", jobs))
        return
    folder = BenchFolder(run, args.folder or args.run / "selection", config)
    payload = prepare_payload(args, folder, stage.readings[-1], started)
    study = Study(config, read_shape(run), run, payload["settings"], {})
    table = train_stage(args, study, payload)
    print(show(table))
    if args.figures:
        record(table, args.figures)


if __name__ == "__main__":
    run_script(main)
