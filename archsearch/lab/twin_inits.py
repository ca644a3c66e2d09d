"""How close twins come to their heads, by what they start from and how they are trained; what models made of them are worth.

    python -m archsearch.lab.twin_inits search_spaces/smollm2_135m_gpu.yaml --run-dir runs/twins --seconds 540 \\
        --scores runs/smollm2-135m-gpu --figures runs/lab/twin_inits.json

All recipes of one batch size share each pass of the teacher. Each is one run at a constant rate; at each reading a fork of it
falls to 1% of the rate over the last fifth of the reading's tokens, and is measured: errors by head on held-out text and on
retrieval prompts. After the last one, which comes early where the time is up, head maps are cut from the twins as they are
and measured by KL and by prompts. The text is that of the run directory, made there first where there is none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import RunConfig, ScoreMethod, SeedConfig, SeedMethod
from ..configfile import load_config
from ..console import Printer
from ..data.corpora import training_batches
from ..data.niah import Probe, retrieval_rows
from ..data.tasks import RETRIEVAL_KINDS
from ..errors import ConfigError
from ..evaluation.divergence import TeacherReference, divergence
from ..evaluation.retrieval import retrieval
from ..headmap import HeadMap, ModelShape
from ..models.cut import cut
from ..models.kernels import use_kernels
from ..models.teacher import Teacher, load_teacher
from ..rundir import RunDir, score_file
from ..search.seeds import read_scores, seed_maps
from ..search.trial import (
    EVALUATION_TOKENS,
    HELDOUT_FILE,
    RETRIEVAL_FILE,
    TRAIN_FILE,
    evaluation_probes,
)
from ..stages import STAGE_WORK, RunContext
from ..trainconfig import FORK_SHARE
from ..training.align import HELDOUT_TOKENS
from ..training.loop import BatchSource
from .entry import add_config, run_script, script_parser
from .records import LabBook
from .twin_banks import Banks
from .twin_recipes import RECIPES, distinct

READINGS = (0, 250_000, 1_000_000, 4_500_000)
SHARES = (0.125, 0.25)
SCORED: tuple[ScoreMethod, ...] = ("replacement_kl", "causal")
STEPS_AT_ONCE = 8
"""Steps between two looks at the clock."""
PROMPT_ROWS = 8
"""Rows of retrieval prompts that errors are measured on; none of them is trained on."""


@dataclass
class Bench:
    """What all recipes share."""

    config: RunConfig
    teacher: Teacher
    texts: dict[str, Tensor]
    """Held-out tokens by name, that errors are measured on."""
    run_dir: RunDir
    layers: Sequence[int]
    maps: dict[str, HeadMap]
    probes: Sequence[Probe]
    book: LabBook
    figures: Path

    @classmethod
    def open(cls, config: RunConfig, run_dir: RunDir, args: argparse.Namespace) -> Bench:
        """Loads the teacher, makes texts where there are none, and reads scores."""
        use_kernels(config.kernels)
        context = RunContext(config, run_dir, load_teacher(config.teacher))
        teacher = context.teacher()
        if not (run_dir / TRAIN_FILE).exists():
            with run_dir, Printer().stage("data") as progress:
                progress.summary = STAGE_WORK["data"](context, progress)
        heldout = np.load(run_dir / HELDOUT_FILE)
        prompts = retrieval_rows(
            teacher.tokenizer,
            PROMPT_ROWS,
            heldout.shape[1],
            keys=config.probes.multi_keys,
            digits=config.probes.digits,
            seed=context.seed("twins"),
        )
        texts = {"held-out text": heldout[: max(1, HELDOUT_TOKENS // heldout.shape[1])]}
        texts["prompts"] = prompts
        layers = args.layers or range(teacher.shape.num_layers)
        whole = len(layers) == teacher.shape.num_layers and not args.no_students
        probes = evaluation_probes(teacher, config) if whole else []
        return cls(
            config,
            teacher,
            {name: torch.from_numpy(rows.astype(np.int64)) for name, rows in texts.items()},
            run_dir,
            layers,
            head_maps(teacher.shape, args.scores, config.seed) if whole else {},
            [probe for probe in probes if probe.kind in RETRIEVAL_KINDS],
            LabBook(config.seed),
            args.figures,
        )

    def write(self) -> None:
        """Writes the figures so far."""
        self.book.write(self.figures)

    def batches(self, batch_tokens: int) -> BatchSource:
        """The training batches of an alignment with that many tokens a batch."""
        text, prompts = np.load(self.run_dir / TRAIN_FILE, mmap_mode="r"), None
        if (self.run_dir / RETRIEVAL_FILE).exists():
            prompts = np.load(self.run_dir / RETRIEVAL_FILE, mmap_mode="r")

        def batches(step: int) -> Iterator[Tensor]:
            return training_batches(
                text,
                prompts,
                niah_share=self.config.data.niah_share if prompts is not None else 0.0,
                batch_sequences=max(1, batch_tokens // text.shape[1]),
                seed=self.config.seed,
                start_step=step,
            )

        return batches


def head_maps(shape: ModelShape, scores: Path | None, seed: int) -> dict[str, HeadMap]:
    """All-GDN, and at each of SHARES the maps of the scores that there are, or evenly spaced layers."""
    run_dir = None if scores is None else RunDir(scores)
    found = [m for m in SCORED if run_dir is not None and (run_dir / score_file(m)).exists()]
    tables = read_scores(run_dir, found) if run_dir is not None else {}
    chosen: tuple[SeedMethod, ...] = ("all_gdn", *(found or ("even_layers",)))
    seeds = seed_maps(shape, tables, SeedConfig(methods=chosen, fa_shares=SHARES), seed)
    return {
        s.method
        if s.method == "all_gdn"
        else f"{s.method} at {s.head_map.fa_share:.3f}": s.head_map
        for s in seeds
    }


def compare(
    bench: Bench, names: Sequence[str], readings: Sequence[int], seconds: float, *, replay: bool
) -> None:
    """Trains and measures recipes, those of one batch size side by side; each batch size gets its share of the time.

    Figures are written after every reading.
    """
    recipes = distinct(bench.config.supernet, names)
    for name in set(names) - set(recipes):
        print(f"{name}: the same as another recipe here", flush=True)
    groups: dict[int, dict[str, Any]] = {}
    for name, config in recipes.items():
        groups.setdefault(config.batch_tokens, {})[name] = config
    end, left = time.monotonic() + seconds, len(recipes)
    for batch_tokens, configs in groups.items():
        now = time.monotonic()
        deadline = now + (end - now) * len(configs) / left
        left -= len(configs)
        banks = Banks(
            bench.teacher,
            configs,
            bench.batches(batch_tokens),
            bench.layers,
            seed=bench.config.seed,
            replay=replay,
        )
        _read_all(bench, banks, readings, deadline)
        del banks
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _read_all(bench: Bench, banks: Banks, readings: Sequence[int], deadline: float) -> None:
    """Every reading of one group; students are measured before the first step, to know their time, and at the end."""
    steps = [round(tokens / banks.batch_tokens) for tokens in readings]
    started = time.monotonic()
    if 0 in steps:
        _record_errors(bench, banks)
    _record_students(bench, banks)
    last_seconds = time.monotonic() - started
    bench.write()
    forks = [count for count in steps if count]
    for wanted in forks:
        warmup = forks[0] // 2
        reached = _to_fork(banks, wanted, warmup, deadline - last_seconds)
        banks.fork(banks.plans(reached, warmup), reached)
        if reached not in steps[: steps.index(wanted)]:
            _record_errors(bench, banks)
        if reached < wanted or wanted == forks[-1]:
            _record_students(bench, banks)
            bench.write()
            return
        bench.write()
        banks.back()


def _to_fork(banks: Banks, wanted: int, warmup: int, deadline: float) -> int:
    """Takes the trunk to where a reading of `wanted` steps forks off; fewer steps where the time is up before."""
    plans, fork = banks.plans(wanted, warmup), wanted - round(FORK_SHARE * wanted)
    while banks.step < fork:
        # A fork from where the trunk is takes a quarter of its steps.
        reserve = banks.step_seconds * banks.step / 4
        if banks.step and time.monotonic() > deadline - reserve:
            return max(banks.step + 1, round(banks.step / (1 - FORK_SHARE)))
        banks.advance(plans, min(fork, banks.step + STEPS_AT_ONCE))
    return wanted


def _record_errors(bench: Bench, banks: Banks) -> None:
    tokens = banks.step * banks.batch_tokens
    for text, rows_NT in bench.texts.items():
        for bank, relative_nH in zip(banks.banks, banks.errors(rows_NT), strict=True):
            facts = {
                "recipe": bank.name,
                "tokens": tokens,
                "batch_tokens": banks.batch_tokens,
                "learning_rate": bank.config.learning_rate,
                "seconds_a_step_all_recipes": banks.step_seconds,
                "recipes_side_by_side": len(banks.banks),
            }
            _add(bench, f"error of twins on {text}, {bank.name}", relative_nH, facts)


def _add(bench: Bench, metric: str, relative_nH: Tensor, facts: dict[str, Any]) -> None:
    """One record of the errors of all heads of a recipe; of one that has diverged only that it has."""
    if not bool(relative_nH.isfinite().all()):
        bench.book.add(metric, 0.0, "", None, text="not finite", **facts)
        print(f"{metric}, {facts['tokens']:,} tokens: not finite", flush=True)
        return
    rounded = [[float(f"{error:.4g}") for error in layer] for layer in relative_nH.tolist()]
    by_layer = dict(zip(map(str, bench.layers), rounded, strict=True))
    median, mean, worst = (float(f(relative_nH)) for f in (torch.median, torch.mean, torch.max))
    text = f"{median:.4f} median, {mean:.4f} mean, {worst:.3f} worst"
    print(f"{metric}, {facts['tokens']:,} tokens: {text}", flush=True)
    bench.book.add(
        f"{bench.config.name}: {metric}, median of heads",
        median,
        "of the head's variance",
        None,
        mean=mean,
        worst=worst,
        by_layer_and_head=by_layer,
        **facts,
    )


def _record_students(bench: Bench, banks: Banks) -> None:
    if not bench.maps:
        return
    teacher, tokens = bench.teacher, banks.step * banks.batch_tokens
    reference = TeacherReference(teacher, bench.texts["held-out text"])
    for bank in banks.banks:
        for name, head_map in bench.maps.items():
            student = cut(teacher, bank.supernet, head_map)
            values = {"kl": divergence(student, reference)["kl"]}
            values |= retrieval(
                student, bench.probes, batch_tokens=EVALUATION_TOKENS[teacher.device.type]
            )
            facts = {"recipe": bank.name, "map": name, "tokens": tokens}
            for metric, value in values.items():
                unit = "share" if "match" in metric else "nats/token"
                text = f"{bench.config.name}: {metric} of {name}, {bank.name}"
                if np.isfinite(value):
                    bench.book.add(text, value, unit, None, **facts)
            said = ", ".join(f"{metric} {value:.3f}" for metric, value in values.items())
            print(f"{bank.name}, {name}, {tokens:,} tokens: {said}", flush=True)


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    add_config(parser)
    parser.add_argument("--run-dir", type=Path, required=True, help="where the texts are or go")
    parser.add_argument("--scores", type=Path, help="a run whose scores choose the head maps")
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="to compare"
    )
    parser.add_argument(
        "--readings",
        nargs="+",
        type=int,
        default=list(READINGS),
        help="tokens at which twins are measured",
    )
    parser.add_argument("--layers", nargs="+", type=int, help="train these alone, and no students")
    parser.add_argument("--no-students", action="store_true", help="measures twins alone")
    parser.add_argument("--no-replay", action="store_true", help="launch every step anew")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all recipes")
    args = parser.parse_args()
    if args.readings != sorted(set(args.readings)):
        raise ConfigError(f"--readings {args.readings}: they must ascend")
    longest = {"source": "train", "tokens": max(args.readings[-1], 1)}
    config = load_config(args.config, args.overrides)
    supernet = config.supernet.model_copy(update=longest)
    config = config.model_copy(update={"supernet": supernet})
    bench = Bench.open(config, RunDir(args.run_dir), args)
    try:
        compare(bench, args.recipes, args.readings, args.seconds, replay=not args.no_replay)
    finally:
        bench.write()


if __name__ == "__main__":
    run_script(main)
