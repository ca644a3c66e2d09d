"""Stores a run's trained supernet small, and measures what that costs.

    python -m archsearch.lab.compress_supernet RUN --forms 24x8 40x4 --recover-tokens 1000000 \\
        --to supernet.safetensors --figures runs/lab/supernet_storage.json

A form is RANKxBITS. Each is made from the full-rank supernet (factors fitted to the inputs' second moment), trained
further as factors for --recover-tokens, and judged by the held-out KL of head maps beside the full-rank supernet.
The form with the least KL of those within --max-bytes goes to --to. Random maps at 1/8 (five seeds) are also asked
for multi-key retrieval.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import RunConfig, SeedConfig, SeedMethod
from ..data.corpora import training_batches
from ..evaluation.divergence import TeacherReference, divergence
from ..evaluation.retrieval import retrieval
from ..headmap import HeadMap
from ..models.cut import cut
from ..models.supernet import Supernet
from ..models.teacher import Teacher, load_teacher
from ..rundir import RunDir
from ..search.seeds import needed_by_seeds, read_scores, seed_maps
from ..search.trial import evaluation_probes
from ..training.align import AlignmentLoss
from ..training.loop import Plan, TrainingState, train
from ..training.lowrank import bake, restrict
from ..training.taps import visit_layers
from ..training.twin_error import measure_twins
from .entry import add_run, run_script, script_parser
from .records import LabBook

SHARES = (0.25, 0.125)
METHODS: tuple[SeedMethod, ...] = ("causal", "replacement_kl", "even_layers")
RANDOM_SEEDS = 5


@dataclass
class Bench:
    """The run that the supernet came from, and the maps to judge it by."""

    run: Path
    config: RunConfig
    teacher: Teacher
    maps: dict[str, HeadMap]
    heldout: Tensor

    @classmethod
    def open(cls, run: Path, device: str) -> Bench:
        """Loads a finished run's config, teacher, scores and held-out tokens."""
        RunDir(run).require_search("heldout.npy")
        config = RunDir(run).load_config()
        placed = config.teacher.model_copy(update={"device": device})
        config = config.model_copy(update={"teacher": placed})
        teacher = load_teacher(config.teacher)
        wanted = SeedConfig(methods=METHODS, fa_shares=SHARES)
        tables = read_scores(RunDir(run), needed_by_seeds(wanted))
        maps = {
            f"{seed.method}@{seed.head_map.fa_share:.3f}": seed.head_map
            for seed in seed_maps(teacher.shape, tables, wanted, config.seed)
        }
        for share in SHARES:
            only = SeedConfig(methods=("random",), fa_shares=(share,))
            for number in range(RANDOM_SEEDS):
                (seed,) = seed_maps(teacher.shape, {}, only, 1000 + number)
                maps[f"random{number}@{share:.3f}"] = seed.head_map
        heldout = torch.from_numpy(np.load(run / "heldout.npy").astype(np.int64))
        return cls(run, config, teacher, maps, heldout)

    def kl_by_map(self, supernet: Supernet) -> dict[str, float]:
        """Held-out KL of every map, cut from supernet without further training."""
        reference = TeacherReference(self.teacher, self.heldout)
        return {
            name: divergence(cut(self.teacher, supernet, head_map, copy=False), reference)["kl"]
            for name, head_map in self.maps.items()
        }

    def random_retrieval(self, supernet: Supernet) -> dict[str, float]:
        """Multi-key exact match of the teacher and of the random maps at the smallest share."""
        probes = [p for p in evaluation_probes(self.teacher, self.config) if p.kind == "multikey"]
        ask = partial(retrieval, probes=probes, batch_tokens=16_384)
        found = {"teacher": ask(self.teacher.model)["niah_multikey_match"]}
        for name, head_map in self.maps.items():
            if name.startswith("random") and name.endswith(f"{min(SHARES):.3f}"):
                student = cut(self.teacher, supernet, head_map, copy=False)
                found[name] = ask(student)["niah_multikey_match"]
        return found

    def batches(self, seed: int, start: int) -> Any:
        """Training batches of the run."""
        prompts = self.run / "retrieval.npy"
        return training_batches(
            np.load(self.run / "train.npy", mmap_mode="r"),
            np.load(prompts, mmap_mode="r") if prompts.exists() else None,
            niah_share=self.config.data.niah_share if prompts.exists() else 0.0,
            batch_sequences=max(
                1, self.config.supernet.batch_tokens // self.config.data.sequence_length
            ),
            seed=seed,
            start_step=start,
        )


def input_grams(bench: Bench, num_tokens: int) -> Tensor:
    """Second moment of each layer's attention input over training tokens: [L, C, C]."""
    size = bench.teacher.model.config.hidden_size
    grams = torch.zeros(bench.teacher.shape.num_layers, size, size, device=bench.teacher.device)

    def add(layer: int, x_BTC: Tensor, *_: Any) -> None:
        flat = x_BTC.flatten(0, 1).float()
        grams[layer] += flat.T @ flat

    stream = bench.batches(bench.config.seed + 17, 0)
    done = 0
    with torch.no_grad():
        while done < num_tokens:
            ids = next(stream).to(bench.teacher.device)
            visit_layers(bench.teacher.model, ids, add)
            done += ids.numel()
    return grams / done


def recover(bench: Bench, supernet: Supernet, rank: int, tokens: int) -> None:
    """Trains the factors of a low-rank supernet, and its small parameters, on further tokens."""
    base = Supernet.migrated(bench.teacher, supernet.options)
    stream = partial(bench.batches, bench.config.seed + 29)
    sample = next(stream(0))
    variance = measure_twins(bench.teacher, supernet, sample[:8]).variance_LH
    groups = restrict(supernet, base, rank)
    trained = {n: p for n, p in supernet.named_parameters() if p.requires_grad}
    plan = Plan(
        steps=max(1, tokens // sample.numel()),
        learning_rate=bench.config.supernet.learning_rate,
        warmup_steps=10,
    )
    train(
        TrainingState(trained, groups),
        plan,
        AlignmentLoss(bench.teacher, supernet, variance),
        stream,
    )
    bake(supernet)


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    add_run(parser)
    parser.add_argument(
        "--forms", nargs="+", default=["24x8", "48x4"], help="RANKxBITS of each form that is tried"
    )
    parser.add_argument(
        "--recover-tokens",
        type=int,
        default=1_000_000,
        help="of training after the cut; 0 leaves it out",
    )
    parser.add_argument(
        "--max-bytes", type=int, default=4_000_000, help="most that the kept file may take"
    )
    parser.add_argument("--to", type=Path, required=True, help="where the best form goes")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    args = parser.parse_args()
    bench = Bench.open(args.run, args.device)
    book = LabBook(bench.config.seed)
    full = Supernet.load(args.run / "supernet.safetensors", bench.teacher)
    whole = bench.kl_by_map(full)
    with book.kept(args.figures):
        for name, kl in whole.items():
            book.add(f"held-out KL, {name}, full-rank supernet", kl, "nats/token")
        for name, match in bench.random_retrieval(full).items():
            book.add(f"multi-key exact match, {name}, full-rank supernet", match, "share")
        grams = input_grams(bench, 65_536)
        best: tuple[float, Path] | None = None
        for form in args.forms:
            excess, path = _make_form(bench, args, form, grams, whole, book)
            small = path.stat().st_size <= args.max_bytes
            if small and (best is None or excess < best[0]):
                best = (excess, path)
        if best is not None:
            best[1].replace(args.to)
            stored = Supernet.load(args.to, bench.teacher)
            for name, match in bench.random_retrieval(stored).items():
                book.add(f"multi-key exact match, {name}, stored supernet", match, "share")


def _make_form(
    bench: Bench,
    args: argparse.Namespace,
    form: str,
    grams: Tensor,
    whole: dict[str, float],
    book: LabBook,
) -> tuple[float, Path]:
    """Makes one form in steps and records each; returns its median excess KL and its file."""
    rank, bits = (int(part) for part in form.split("x"))
    path = args.to.with_name(f"{args.to.stem}-{form}.safetensors")
    full = Supernet.load(args.run / "supernet.safetensors", bench.teacher)
    excess = 0.0
    for step in ("cut", "recovered"):
        if step == "recovered":
            if not args.recover_tokens:
                break
            full = Supernet.load(path, bench.teacher)
            started = time.monotonic()
            recover(bench, full, rank, args.recover_tokens)
            seconds = time.monotonic() - started
            full.meta["recover_tokens"] = args.recover_tokens
            book.add(f"recovery of {form}", seconds, "s", tokens=args.recover_tokens)
        full.save(path, bench.teacher, rank, bits=bits, input_gram_LCC=grams)
        ratios = []
        for name, kl in bench.kl_by_map(Supernet.load(path, bench.teacher)).items():
            ratios.append(kl / whole[name])
            text = f"held-out KL, {name}, {form} {step}"
            book.add(text, kl, "nats/token", "full rank", ratio=kl / whole[name])
        excess = statistics.median(ratios)
        size = path.stat().st_size
        book.add(f"KL over full rank, median of maps, {form} {step}", excess, "ratio", bytes=size)
        print(f"{form} {step}: {size:,} bytes, KL x {excess:.3f} of full rank", flush=True)
    return excess, path


if __name__ == "__main__":
    run_script(main)
