"""Retrieval at long contexts and past the teacher's window, before and after tuning on long rows, by what FA heads are.

    python -m archsearch.lab.long_context RUN --method blend --share 0.125 --tokens 2000000 --long-tokens 4000000 \\
        --seconds 480 --figures runs/lab/long_context.json --set 'probes.contexts=[1024, 8192, 16384]'

Of a run that has scores and a supernet, the map of one seed method at one share is distilled once for each case (of full_branch.CASES),
measured, tuned on rows of section long_context, and measured again; so is the teacher's own architecture, as a control, and the teacher
as it is stands beside them. Figures land in FOLDER/long_context.jsonl as they are made; the same command goes on, amid a
training too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import RunConfig, SeedConfig
from ..data.corpora import Packed
from ..headmap import HeadMap, Operator
from ..models.cut import cut
from ..models.full_heads import full_branch, rope_fader
from ..rundir import RunDir
from ..search.seeds import needed_by_seeds, read_scores, seed_maps
from ..search.study import head_map_text
from ..search.trial import GAMMA_SEQUENCES, TRAIN_FILE, TrialWorker
from ..studentconfig import FullConfig
from ..training.kept import Keeper, distill_kept
from ..training.long_rows import long_batches
from ..training.longcontext import tune_long_context
from ..training.loop import StepHook
from ..training.teacher_logits import TeacherLogits
from .bench_folder import BenchFolder, read_config, read_shape
from .entry import add_overrides, add_run, run_script, script_parser
from .full_branch import CASES
from .ledger import VALUES, Ledger
from .records import LabBook
from .selection_maps import metric_of, retrieval_columns
from .student_worker import OutOfTime, stop_after

MEASURED = (
    "probes.kinds=[single, multikey, copying, labels, arithmetic, lookup, agreement]",
    "probes.unseen=[single, multikey]",
    "probes.contexts=[1024, 8192, 16384]",
    "probes.beyond_window=true",
    "probes.prompts=16",
    "data.extra_heldout=[{label: docs, source: docstrings}]",
    "distill.decay_share=0.2",
)
"""What is set in the run's config before --set."""
TEACHER, CONTROL = "teacher", "all full attention, RoPE"
DEFAULT_CASES = ("RoPE", "RoPE, gate", "NoPE, log-scale", "NoPE, log-scale, gate")
BEFORE, AFTER = "before", "after"
KEEP_SECONDS = 60.0
"""Between two checkpoints of a training: what a call that is out of time loses at most."""


@dataclass(frozen=True)
class Bench:
    """What all cases share. settings: a digest of all that a figure depends on but its case."""

    worker: TrialWorker
    head_map: HeadMap
    tokens: int
    fade_tokens: int
    ledger: Ledger
    settings: str
    deadline: float

    @property
    def config(self) -> RunConfig:
        """The run's config, with what the command line changes."""
        return self.worker.config

    def key(self, case: str, stage: str) -> str:
        """What the figures of a case before or after tuning are found by."""
        return f"{self.settings}/{case}/{stage}"

    def keeper(self, case: str, stage: str) -> Keeper:
        """Where the training that a stage is measured after keeps its state, for a call that is out of time."""
        key = self.key(case, stage)
        digest = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
        path = self.worker.run_dir / f"kept-{digest}.safetensors"
        return Keeper(path, {"key": key}, KEEP_SECONDS)

    def measure(self, case: str, stage: str, student: HydraHeadForCausalLM, **facts: Any) -> None:
        """Adds the figures of a student, unless they are there."""
        if self.key(case, stage) in self.ledger.rows():
            return
        started = time.monotonic()
        values = self.worker.measure(student)
        seconds = time.monotonic() - started
        self.ledger.add(
            self.key(case, stage),
            case=case,
            stage=stage,
            values=values,
            measure_seconds=seconds,
            **facts,
        )
        print(f"{case}, {stage}: {_line(values)}, {seconds:.1f} s", flush=True)

    def is_done(self, case: str) -> bool:
        """Whether all figures of a case are there."""
        found = self.ledger.rows()
        return all(self.key(case, stage) in found for stage in (BEFORE, AFTER))


def run_case(bench: Bench, case: str, logits: TeacherLogits) -> None:
    """Distils, measures, tunes and measures a student. Raises OutOfTime, and leaves what was measured."""
    worker, config = bench.worker, bench.config
    head_map, options = _case_of(bench, case)
    text_NT = np.load(worker.run_dir / TRAIN_FILE, mmap_mode="r")
    ids_BT = torch.from_numpy(text_NT[:GAMMA_SEQUENCES].astype(np.int64))
    branch = full_branch(worker.teacher, options, ids_BT)
    student = cut(worker.teacher, worker.supernet, head_map, copy=True, full=branch)
    batch_tokens = worker.batch_sequences * config.data.sequence_length
    fade, stop = rope_fader(student, options, batch_tokens), stop_after(bench.deadline)
    keepers, seconds = {stage: bench.keeper(case, stage) for stage in (BEFORE, AFTER)}, 0.0
    # The control is the teacher: there is nothing to distil.
    if case != CONTROL:
        seconds = distill_kept(
            student,
            worker.teacher,
            worker.batches,
            keepers[BEFORE],
            tokens=bench.tokens,
            config=config.distill,
            logits=logits,
            before_step=_both(stop, fade),
        ).seconds
    bench.measure(case, BEFORE, student, train_seconds=seconds)
    rows = long_batches(config, worker.teacher.tokenizer, Packed(text_NT), worker.run_dir)
    tuned = tune_long_context(
        student,
        worker.teacher,
        rows,
        config.long_context,
        keeper=keepers[AFTER],
        before_step=stop,
    )
    facts = {"train_seconds": tuned.seconds, "tuned_tokens": tuned.tokens, "loss": tuned.last_loss}
    bench.measure(case, AFTER, student, **facts)
    for keeper in keepers.values():
        keeper.path.unlink(missing_ok=True)


def _case_of(bench: Bench, case: str) -> tuple[HeadMap, FullConfig]:
    if case == CONTROL:
        return HeadMap.uniform(bench.head_map.model, Operator.FULL), FullConfig()
    fields = {"rope_fade_tokens": bench.fade_tokens, **CASES[case]}
    return bench.head_map, FullConfig.model_validate(fields)


def _both(first: StepHook, second: StepHook) -> StepHook:
    def call(step: int, last: int) -> None:
        first(step, last)
        second(step, last)

    return call


def _line(values: dict[str, float]) -> str:
    shown = [f"{c} {values[metric_of(c, 'match')]:.2f}" for c in retrieval_columns(values)]
    return ", ".join([f"KL {values['kl']:.4f}", *shown])


def show(bench: Bench, cases: Sequence[str]) -> str:
    """All figures as Markdown."""
    rows = bench.ledger.rows()
    found = [
        row for case in cases for s in (BEFORE, AFTER) if (row := rows.get(bench.key(case, s)))
    ]
    if not found:
        return "no figures yet"
    columns = retrieval_columns(found[0][VALUES])
    texts = [name for name in found[0][VALUES] if name == "kl" or name.startswith("kl_")]
    head = ["case", "tuning", *texts, *columns, "train s"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in found:
        values = row[VALUES]
        cells = [row["case"], row["stage"], *(f"{values[name]:.4f}" for name in texts)]
        cells += [
            f"{values[metric_of(c, 'match')]:.2f} ({values[metric_of(c, 'nll')]:.2f})"
            for c in columns
        ]
        lines.append(f"| {' | '.join(cells)} | {row.get('train_seconds', 0.0):.1f} |")
    return "\n".join(lines)


def record(bench: Bench, cases: Sequence[str], path: Path) -> None:
    """Writes a record for each retrieval figure and each KL."""
    book, rows = LabBook(bench.config.seed), bench.ledger.rows()
    long = bench.config.long_context
    facts = {
        "map": head_map_text(bench.head_map),
        "distilled_tokens": bench.tokens,
        "long_tokens": long.tokens,
        "long_length": long.sequence_length,
        "long_loss": long.loss,
    }
    for case in cases:
        for stage in (BEFORE, AFTER):
            values = rows.get(bench.key(case, stage), {}).get(VALUES, {})
            for name, value in values.items():
                unit = "share" if "_match" in name or name.startswith("top1") else "nats/token"
                own = {"case": case, "tuning": stage, **facts}
                book.add(
                    f"{name}, {case}, {stage} tuning", float(f"{value:.5g}"), unit, None, **own
                )
    book.write(path)


def open_bench(args: argparse.Namespace, deadline: float) -> Bench:
    """Reads the run. Raises ConfigError or EnvironmentFault where it lacks scores, supernet or text."""
    run = RunDir(args.run)
    tokens = f"long_context.tokens={args.long_tokens}"
    config = read_config(run, [*MEASURED, tokens, *args.overrides])
    wanted = SeedConfig.model_validate({"methods": (args.method,), "fa_shares": (args.share,)})
    scores = read_scores(run, needed_by_seeds(wanted))
    (seed,) = seed_maps(read_shape(run), scores, wanted, config.seed, config.cost)
    folder = BenchFolder(run, args.folder or args.run / "long_context", config)
    folder.prepare()
    facts: dict[str, Any] = {
        "folder": folder.settings(),
        "map": list(seed.head_map.layers),
        "tokens": args.tokens,
        "fade": args.fade_tokens,
        "long": config.long_context.model_dump(exclude={"checkpointing"}),
    }
    settings = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=6)
    return Bench(
        TrialWorker(folder.payload()),
        seed.head_map,
        args.tokens,
        args.fade_tokens,
        Ledger(args.ledger or folder.dir / "long_context.jsonl"),
        settings.hexdigest(),
        deadline,
    )


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__, figures=False)
    add_run(parser)
    parser.add_argument("--method", default="blend", help="a seed method")
    parser.add_argument("--share", type=float, default=0.125, help="of full-attention heads")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="of distillation")
    parser.add_argument("--fade-tokens", type=int, default=500_000, help="in which RoPE goes")
    parser.add_argument("--long-tokens", type=int, default=4_000_000, help="of tuning on long rows")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, CONTROL], help="students to compare")
    parser.add_argument("--folder", type=Path, help="RUN/long_context where not given")
    parser.add_argument("--ledger", type=Path, help="FOLDER/long_context.jsonl where not given")
    add_overrides(parser, "run's config")
    parser.add_argument("--seconds", type=float, default=480.0, help="most in all")
    parser.add_argument("--figures", type=Path, help="JSON that they go to")
    args = parser.parse_args()
    bench = open_bench(args, time.time() + args.seconds)
    cases = args.cases or [*DEFAULT_CASES, CONTROL]
    logits = TeacherLogits(bench.worker.teacher, bench.config.distill)
    bench.measure(TEACHER, BEFORE, bench.worker.teacher.model)
    left = [case for case in cases if not bench.is_done(case)]
    try:
        for case in list(left):
            run_case(bench, case, logits)
            bench.worker.free_memory()
            left.remove(case)
    except OutOfTime:
        pass
    print(show(bench, [TEACHER, *cases]))
    if args.figures:
        record(bench, [TEACHER, *cases], args.figures)
    print(f"left: {'; '.join(left)}" if left else "done")


if __name__ == "__main__":
    run_script(main)
