"""What a student gains or loses by its full-attention heads: RoPE kept or taken away, log-scale, norm, gate.

    python -m archsearch.lab.full_branch RUN --share 0.125 --method causal --readings 0 500000 2000000 \\
        --fade-tokens 400000 --contexts 1024 8192 16384 --long-tokens 1000000 --figures runs/lab/full_branch.json

Of a run that has scores and a supernet, the map of one seed method at one share is trained once for each case, on the same
batches, and measured at each reading: KL on the run's held-out text, and the kinds of prompts that trials are asked, at these
contexts. With --long-tokens each student is then tuned on long rows, as section long_context says, and measured again.
Several processes may share the cases (--cases) and a file of figures: each replaces those of its own cases alone.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..attention.positions import set_rope_share
from ..config import DistillConfig, RunConfig, SeedConfig
from ..data.corpora import Packed, training_batches
from ..errors import ConfigError
from ..evaluation.divergence import TeacherReference, divergence
from ..evaluation.retrieval import retrieval
from ..headmap import HeadMap
from ..models.cut import cut
from ..models.full_heads import full_branch, rope_fader, rope_share
from ..models.kernels import use_kernels
from ..models.supernet import Supernet
from ..models.teacher import Teacher, load_teacher
from ..rundir import RunDir, replacing
from ..search.seeds import needed_by_seeds, read_scores, seed_maps
from ..search.trial import (
    EVALUATION_TOKENS,
    GAMMA_SEQUENCES,
    HELDOUT_FILE,
    RETRIEVAL_FILE,
    SUPERNET_FILE,
    TRAIN_FILE,
    evaluation_probes,
)
from ..studentconfig import FullConfig
from ..trainconfig import FORK_SHARE
from ..training.long_rows import long_batches
from ..training.longcontext import tune_long_context
from ..training.readings import distill_with_readings
from ..training.teacher_logits import TeacherLogits
from .bench_folder import read_config
from .entry import add_overrides, add_run, run_script, script_parser
from .records import LabBook

AT_ONCE: dict[str, Any] = {"rope": False, "rope_fade_tokens": 0}
NOPE: dict[str, Any] = {"rope": False}
TEACHER = "teacher"
CASES: dict[str, dict[str, Any]] = {
    "RoPE": {},
    "RoPE, gate": {"gate": True},
    "RoPE, norm": {"norm": True},
    "RoPE, log-scale": {"log_scale": True},
    "NoPE at once": AT_ONCE,
    "NoPE, slow first": NOPE,
    "NoPE, angles": NOPE | {"rope_fade": "angles"},
    "NoPE, mixed": NOPE | {"rope_fade": "mixed"},
    "NoPE, log-scale": NOPE | {"log_scale": True},
    "NoPE, log-scale beyond the window": NOPE | {"log_scale": True, "log_scale_form": "clipped"},
    "NoPE, log-scale at inference": NOPE | {"log_scale": True, "log_scale_training": False},
    "NoPE, log-scale, gate": NOPE | {"log_scale": True, "gate": True},
    "NoPE, log-scale, norm, gate": NOPE | {"log_scale": True, "norm": True, "gate": True},
}
"""Options of section student.full."""


@dataclass
class Bench:
    """All that the cases share. text_NT, prompts_MT: training rows; reference and probes: what students are measured by."""

    config: RunConfig
    teacher: Teacher
    supernet: Supernet
    head_map: HeadMap
    text_NT: NDArray[Any]
    prompts_MT: NDArray[Any] | None
    reference: TeacherReference
    contexts: Sequence[int]
    book: LabBook
    rows: list[tuple[str, str, dict[str, float]]] = field(default_factory=list)
    compared_to: str | None = "RoPE"
    """The case that the others are held against."""

    @classmethod
    def open(
        cls,
        run: RunDir,
        method: str,
        share: float,
        contexts: Sequence[int],
        overrides: Sequence[str] = (),
    ) -> Bench:
        """Reads a run. Raises ConfigError or EnvironmentFault where it lacks scores, supernet or text."""
        config = read_config(run, overrides)
        use_kernels(config.kernels)
        teacher = load_teacher(config.teacher)
        wanted = SeedConfig.model_validate({"methods": (method,), "fa_shares": (share,)})
        scores = read_scores(run, needed_by_seeds(wanted))
        (seed,) = seed_maps(teacher.shape, scores, wanted, config.seed)
        heldout_NT = torch.from_numpy(np.load(run / HELDOUT_FILE).astype(np.int64))
        prompts = run / RETRIEVAL_FILE
        return cls(
            config,
            teacher,
            Supernet.load(run / SUPERNET_FILE, teacher),
            seed.head_map,
            np.load(run / TRAIN_FILE, mmap_mode="r"),
            np.load(prompts, mmap_mode="r") if prompts.exists() else None,
            TeacherReference(teacher, heldout_NT),
            contexts,
            LabBook(config.seed),
        )

    def batches(self, sequences: int, start_step: int) -> Iterator[Tensor]:
        """The run's own training batches."""
        return training_batches(
            self.text_NT,
            self.prompts_MT,
            niah_share=self.config.data.niah_share if self.prompts_MT is not None else 0.0,
            batch_sequences=sequences,
            seed=self.config.seed,
            start_step=start_step,
        )

    def measure(self, case: str, stage: str, student: HydraHeadForCausalLM) -> dict[str, float]:
        """Adds a student's figures to the book."""
        probes = self.config.probes.model_copy(update={"contexts": tuple(self.contexts)})
        asked = evaluation_probes(self.teacher, self.config.model_copy(update={"probes": probes}))
        tokens = EVALUATION_TOKENS[self.teacher.device.type]
        values = divergence(student, self.reference)
        values |= retrieval(student, asked, batch_tokens=tokens)
        for name, value in values.items():
            unit = "share" if "_match" in name or name == "top1_agreement" else "nats/token"
            compared = None if case == self.compared_to else self.compared_to
            facts = {"case": case, "stage": stage, "map": list(self.head_map.layers)}
            self.book.add(f"{name}, {case}, {stage}", value, unit, compared, **facts)
        self.rows.append((case, stage, values))
        return values


def distil_config(config: DistillConfig) -> DistillConfig:
    """The config's distillation, with a trunk to fork from."""
    if config.decay_share < 1:
        return config
    return config.model_copy(update={"decay_share": FORK_SHARE})


def run_case(
    bench: Bench,
    case: str,
    readings: Sequence[int],
    fade_tokens: int,
    logits: TeacherLogits,
) -> None:
    """Trains and measures a student of that case."""
    options = FullConfig.model_validate({"rope_fade_tokens": fade_tokens, **CASES[case]})
    ids_BT = torch.from_numpy(bench.text_NT[:GAMMA_SEQUENCES].astype(np.int64))
    branch = full_branch(bench.teacher, options, ids_BT)
    student = cut(bench.teacher, bench.supernet, bench.head_map, copy=True, full=branch)
    distill, length = distil_config(bench.config.distill), bench.text_NT.shape[1]
    sequences = max(1, distill.batch_tokens // length)
    distill_with_readings(
        student,
        bench.teacher,
        partial(bench.batches, sequences),
        readings=readings,
        measure=lambda model, tokens: bench.measure(case, f"{tokens:,} tokens", model),
        config=distill,
        logits=logits,
        before_step=rope_fader(student, options, sequences * length),
    )
    long = bench.config.long_context
    if long.tokens:
        set_rope_share(student, rope_share(options, readings[-1]))
        batches = long_batches(bench.config, bench.teacher.tokenizer, Packed(bench.text_NT))
        tune_long_context(student, bench.teacher, batches, long)
        bench.measure(case, f"{long.tokens:,} long tokens more", student)


def check_figures(path: Path, head_map: HeadMap) -> None:
    """Raises ConfigError where the file has figures of another map, or is no file of figures."""
    for row in _read_figures(path):
        if row.get("map") != list(head_map.layers):
            raise ConfigError(f"{path}: has figures of another head map; allowed: another file")


def merge_figures(book: LabBook, path: Path) -> None:
    """Writes a book's figures in the place of those of the same cases; the others in the file stay.

    Several processes may do so at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        own = {row["case"] for row in book.rows}
        others = [row for row in _read_figures(path) if row["case"] not in own]
        order = [TEACHER, *CASES]
        rows = sorted([*others, *book.rows], key=lambda row: order.index(row["case"]))
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(rows, indent=1) + "\n")
    finally:
        os.close(folder)


def _read_figures(path: Path) -> list[dict[str, Any]]:
    """The figures of a file, none where there is none."""
    if not path.exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text())
        known = {TEACHER, *CASES}
        if all(row["case"] in known for row in rows):
            return rows
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: no figures of cases ({error!r}); allowed: another file"
        ) from error
    raise ConfigError(f"{path}: has figures of other cases; allowed: another file")


def print_table(bench: Bench) -> None:
    """All students' figures as Markdown, a row each."""
    names = list(bench.rows[0][2])
    print(f"| case | after | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for case, stage, values in bench.rows:
        print(f"| {case} | {stage} | {' | '.join(f'{values[name]:.3f}' for name in names)} |")


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    add_run(parser)
    parser.add_argument("--method", default="causal", help="a seed method")
    parser.add_argument("--share", type=float, default=0.125, help="of full-attention heads")
    parser.add_argument(
        "--readings",
        type=int,
        nargs="+",
        default=[0, 500_000, 2_000_000],
        help="tokens at which students are measured",
    )
    parser.add_argument("--fade-tokens", type=int, default=400_000, help="in which RoPE goes")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[1024, 8192, 16_384],
        help="lengths of retrieval prompts",
    )
    parser.add_argument(
        "--long-tokens", type=int, default=0, help="of tuning on long rows; 0 leaves it out"
    )
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES), help="branches to compare"
    )
    add_overrides(parser, "run's config")
    args = parser.parse_args()
    overrides = [f"long_context.tokens={args.long_tokens}", *args.overrides]
    bench = Bench.open(RunDir(args.run), args.method, args.share, args.contexts, overrides)
    check_figures(args.figures, bench.head_map)
    bench.measure(TEACHER, "as it is", bench.teacher.model)
    logits = TeacherLogits(bench.teacher, distil_config(bench.config.distill))
    for case in args.cases:
        run_case(bench, case, args.readings, args.fade_tokens, logits)
        # After each case: a run that is cut off keeps what it has.
        merge_figures(bench.book, args.figures)
        print(f"{case}: {bench.rows[-1][2]}", flush=True)
    print_table(bench)


if __name__ == "__main__":
    run_script(main)
