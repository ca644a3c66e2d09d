"""Ground truth of the selectors: what the teacher loses without the heads that each score ranks highest.

    python -m archsearch.lab.knockout RUN [RUN ...] --figures runs/lab/knockout.json

RUN is a run directory of `archsearch score`; several runs are several seeds. On fresh pairs, which no score has seen,
the best --share of the heads of every scores file, and as many random ones, are taken away in two ways: their outputs
come from the corrupt prompt, at every position of a real forward with nothing frozen (corrupt), or from their twins
(twin). Figures: the rise of the clean answer's NLL (teacher-forced, nats an answer token) and the fall of its exact
match, means over pairs; and the rank correlations of the scores with one another.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import get_args

from ..attention.dispatch import set_backend
from ..config import RunConfig, ScoreMethod
from ..errors import ConfigError
from ..headmap import ModelShape
from ..models.supernet import Supernet
from ..models.teacher import Teacher, load_teacher
from ..rundir import RunDir, score_file
from ..scoring.inputs import GIB
from ..scoring.pairs import draw_pairs
from ..search.seeds import ScoreTables, num_full_heads, read_scores, top_heads
from ..search.trial import SUPERNET_FILE
from ..stages import RunContext
from .agreement import flat, rank_correlation
from .entry import add_run, run_script, script_parser
from .head_losses import ALL, MEASURES, WAYS, Bench, Heads, Key
from .records import LabBook

RANDOM = "random"
TIMES_RANDOM = "times random's"
NLL, MATCH = MEASURES

Tables = dict[str, ScoreTables]


def head_sets(
    shape: ModelShape, tables: Tables, share: float, num_random: int, seed: int
) -> dict[str, list[Heads]]:
    """The best heads of each table at a share of all heads, and num_random random sets of as many."""
    count = num_full_heads(shape, share)
    sets = {name: [frozenset(top_heads(table.heads, count))] for name, table in tables.items()}
    sets[RANDOM] = [
        frozenset(random.Random(f"knockout/{seed}/{number}").sample(shape.heads(), count))
        for number in range(num_random)
    ]
    return sets


def read_tables(run_dir: RunDir) -> Tables:
    """The scores files that a run has. Raises ConfigError where there is none."""
    methods = [name for name in get_args(ScoreMethod) if (run_dir / score_file(name)).exists()]
    if not methods:
        raise ConfigError(f"{run_dir.path}: no scores files; run `archsearch score` there first")
    return read_scores(run_dir, methods)


def fresh_bench(run_dir: RunDir, config: RunConfig, teacher: Teacher, num_pairs: int) -> Bench:
    """A run's twins, and pairs of its generated sub-probes from a seed that its own stages do not use."""
    scoring = config.scoring.model_copy(update={"pairs": num_pairs, "pairs_file": None})
    config = config.model_copy(update={"scoring": scoring})
    found = draw_pairs(teacher, config, seed=RunContext(config, run_dir).seed("knockout"))
    if not found:
        raise ConfigError(f"{run_dir.path}: scoring.retrieval and scoring.general are both empty")
    pairs = {
        name: [p for sub in probes.values() for p in sub.pairs] for name, probes in found.items()
    }
    supernet = Supernet.load(run_dir / SUPERNET_FILE, teacher)
    # Half, since the torch path of twins holds more a token than full attention does.
    memory_bytes = round(scoring.memory_gib * GIB) // 2
    return Bench.of(teacher, supernet, pairs, decay=scoring.decay, memory_bytes=memory_bytes)


def losses_of(path: Path, args: argparse.Namespace) -> tuple[int, Tables, dict[Key, float]]:
    """A run's seed, its scores, and what its teacher loses without their best heads and without random ones."""
    run_dir, started = RunDir(path), time.monotonic()
    config, tables = run_dir.load_config(), read_tables(run_dir)
    teacher = _teacher(config.teacher.model_copy(update={"device": args.device}))
    bench = fresh_bench(run_dir, config, teacher, args.pairs)
    print(
        f"{path}: {len(bench.capabilities)} pairs, {', '.join(tables)}; "
        f"ready after {time.monotonic() - started:.1f} s",
        flush=True,
    )
    sets = head_sets(teacher.shape, tables, args.share, args.random, config.seed)
    losses: dict[Key, float] = {}
    for name, group in sets.items():
        losses |= bench.losses(name, group)
        shown = ", ".join(f"{way} {losses[name, way, ALL, NLL]:+.3f}" for way in WAYS)
        print(f"  {name}: {shown} nats, {time.monotonic() - started:.1f} s", flush=True)
    return config.seed, tables, losses


_teacher = cache(load_teacher)
"""Runs that differ in their seed alone share a teacher."""


def with_times_random(runs: Sequence[Mapping[Key, float]]) -> list[dict[Key, float]]:
    """The runs' losses, and each NLL rise over the mean of random heads in all runs, where that is above zero.

    A single run's random heads may lose next to nothing, which would blow up a mean of the runs' own ratios.
    """
    found = [dict(run) for run in runs]
    for key in runs[0]:
        name, way, scope, measure = key
        chance = statistics.mean(run[RANDOM, way, scope, measure] for run in runs)
        if measure == NLL and name != RANDOM and chance > 0:
            for run in found:
                if key in run:
                    run[name, way, scope, TIMES_RANDOM] = run[key] / chance
    return found


def record(book: LabBook, seeds: Sequence[int], runs: Sequence[Mapping[Key, float]]) -> None:
    """A row a figure that every run has: mean over runs, least, most, and each run's."""
    for key in runs[0]:
        name, way, scope, measure = key
        values = [run[key] for run in runs if key in run]
        facts = {"least": min(values), "most": max(values), "by_run": values, "run_seeds": seeds}
        text = f"{measure}, {name} by {way}, {scope}"
        unit = MEASURES.get(measure, "ratio")
        if len(values) == len(runs):
            book.add(text, statistics.mean(values), unit, "no head taken away", **facts)


def print_table(names: Sequence[str], runs: Sequence[Mapping[Key, float]]) -> None:
    """The figures as Markdown: mean over runs, with the least and most where it is of all pairs."""
    scopes = list(dict.fromkeys(scope for _, _, scope, _ in runs[0]))
    columns = [
        (way, scope, measure)
        for way in WAYS
        for measure in (NLL, TIMES_RANDOM, MATCH)
        for scope in scopes
        if measure == NLL or scope == ALL
    ]
    print("| heads | " + " | ".join(f"{w}: {m}, {s}" for w, s, m in columns) + " |")
    print("|" + "---|" * (1 + len(columns)))
    for name in names:
        cells = []
        for column in columns:
            values = [run[name, *column] for run in runs if (name, *column) in run]
            cells.append(_cell(values, column) if len(values) == len(runs) else "–")
        print(f"| {name} | {' | '.join(cells)} |")


def _cell(values: Sequence[float], column: tuple[str, str, str]) -> str:
    _, scope, measure = column
    form = ".3g" if measure == TIMES_RANDOM else ".3f"
    text, *ends = (f"{v:{form}}" for v in (statistics.mean(values), min(values), max(values)))
    return f"{text} ({' to '.join(ends)})" if scope == ALL else text


def correlate(book: LabBook, runs: Sequence[Tables], names: Sequence[str]) -> None:
    """Records and prints Spearman's correlation of every two methods' head scores, mean over runs."""
    print("\n| Spearman | " + " | ".join(names) + " |\n|" + "---|" * (1 + len(names)))
    for row, first in enumerate(names):
        cells = []
        for column, second in enumerate(names):
            values = [rank_correlation(flat(t[first].heads), flat(t[second].heads)) for t in runs]
            cells.append(f"{statistics.mean(values):.2f}")
            if row < column:
                text = f"Spearman of head scores, {first} and {second}"
                book.add(text, statistics.mean(values), "correlation", by_run=values)
        print(f"| {first} | {' | '.join(cells)} |")


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    add_run(parser, several=True)
    parser.add_argument("--share", type=float, default=0.05, help="of all heads that are corrupted")
    parser.add_argument("--pairs", type=int, default=8, help="of each sub-probe")
    parser.add_argument("--random", type=int, default=5, help="random sets to compare with")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    args = parser.parse_args()
    if args.random < 1:
        parser.error("--random: 1 set or more, since losses are told in times random's")
    # fla-core would tune its kernels anew for every number of twins in a layer, longer than all the rest takes.
    set_backend("gdn", "torch")
    found = [losses_of(path, args) for path in args.runs]
    seeds, tables = [seed for seed, _, _ in found], [each for _, each, _ in found]
    losses = with_times_random([each for _, _, each in found])
    names = [name for name in tables[0] if all(name in other for other in tables)]
    book = LabBook(seeds[0])
    record(book, seeds, losses)
    print_table([*names, RANDOM], losses)
    correlate(book, tables, names)
    book.write(args.figures)


if __name__ == "__main__":
    run_script(main)
