"""How many pairs head scores need: agreement between disjoint halves of the pairs, and between contexts.

    python -m archsearch.lab.score_stability search_spaces/smollm2_135m.yaml --figures runs/lab/score_stability.json

Receiver effects are measured once, on --pairs usable pairs of every sub-probe at every context (general ones once).
From these the composite is made anew, without senders, of n pairs a sub-probe, and of n others: Spearman's correlation
over all heads and over the top 20% of the pooled score, and what the two top 5% share, over --splits random splits.
--senders N makes the composite of two halves of the pairs of the first context with senders too, N pairs a capability.

Legend: P pairs of a sub-probe, L layers, H query heads.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

import torch

from ..config import RunConfig, ScoringConfig
from ..configfile import load_config
from ..models.supernet import Supernet
from ..models.teacher import Teacher, load_teacher
from ..scoring.causal import causal
from ..scoring.inputs import GIB, ScoreInputs, SubProbe
from ..scoring.pairs import draw_pairs
from ..scoring.receivers import receiver_effects
from ..search.seeds import Table, num_full_heads, top_heads
from .agreement import AMONG_TOP, SHARED, WHOLE, Agreement, Bank, agreement, halves, tables_of
from .entry import add_config, run_script, script_parser
from .records import LabBook

SIZES = (1, 2, 3, 4, 6, 8)
"""Pairs a sub-probe in each half, as far as the pairs go."""
ENOUGH = 0.9
TOP, BEST = 0.2, 0.05
"""Shares of all heads: those that are also ranked alone, and those that a selector would keep."""

Pairs = dict[str, dict[str, SubProbe]]


def only(config: RunConfig, **fields: object) -> RunConfig:
    """The config with these fields of its scoring section."""
    return config.model_copy(update={"scoring": config.scoring.model_copy(update=fields)})


def effects_of(teacher: Teacher, pairs: Pairs, scoring: ScoringConfig) -> Bank:
    """Receiver effects by capability; usable pairs have a gap, so that none is NaN."""
    bank = {}
    for name, every in pairs.items():
        probes = {kind: probe for kind, probe in every.items() if probe.pairs}
        found = receiver_effects(
            teacher,
            [pair for probe in probes.values() for pair in probe.pairs],
            decay=scoring.decay,
            min_gap=-math.inf,
            memory_bytes=round(scoring.memory_gib * GIB),
        )
        parts = found.heads_PLH.split([len(probe.pairs) for probe in probes.values()])
        bank[name] = dict(zip(probes, parts, strict=True))
    return bank


class Study:
    """The figures of one config."""

    def __init__(self, teacher: Teacher, config: RunConfig, book: LabBook) -> None:
        self.teacher, self.scoring, self.book = teacher, config.scoring, book
        self.best = num_full_heads(teacher.shape, BEST)

    def draw(self, config: RunConfig) -> Pairs:
        """Usable pairs, how many of each kind recorded; none where the config names no kind."""
        found = draw_pairs(self.teacher, config, seed=config.seed)
        for name, probes in found.items():
            where = f" at {config.scoring.contexts[0]}" if name == "retrieval" else ""
            for kind, probe in probes.items():
                text, kept = f"usable pairs, {kind}{where}", len(probe.pairs)
                self.book.add(text, kept, "pairs", drawn=probe.drawn)
                print(f"{text}: {kept} of {probe.drawn}", flush=True)
        return found

    def tables(self, bank: Bank) -> dict[str, Table]:
        """tables_of with the config's threshold."""
        return tables_of(bank, self.scoring.threshold)

    def top(self, whole: Mapping[str, Table]) -> set[int]:
        """The places of the top heads of a composite in its flat order."""
        shape = self.teacher.shape
        chosen = top_heads(whole[WHOLE], num_full_heads(shape, TOP))
        return {layer * shape.num_heads + head for layer, head in chosen}

    def splits(self, bank: Bank, context: int, count: int, seed: int) -> None:
        """Agreement of halves of every size, and the least size whose mean, as that of all larger, is enough."""
        lengths = {kind: len(e) for probes in bank.values() for kind, e in probes.items()}
        sizes = [size for size in SIZES if 2 * size <= max(lengths.values())]
        top, enough = self.top(self.tables(bank)), dict[str, int]()
        for size in sizes:
            rng = Random(f"halves/{seed}/{context}/{size}")
            splits = [halves(bank, size, rng) for _ in range(count)]
            drawn = [
                agreement(self.tables(first), self.tables(second), top, self.best)
                for first, second in splits
            ]
            short = {kind: pairs for kind, pairs in lengths.items() if pairs < 2 * size}
            where = f"context {context}, {size} pairs a sub-probe"
            means = self.add(f"agreement of halves, {where}", drawn, short=short)
            for name, mean in means.items():
                if mean >= ENOUGH:
                    enough.setdefault(name, size)
                else:
                    enough.pop(name, None)  # It has to last.
        for name in (WHOLE, AMONG_TOP, SHARED):
            text = f"least pairs a sub-probe with a mean of {ENOUGH}, context {context}, {name}"
            self.book.add(text, enough.get(name, sizes[-1]), "pairs", reached=name in enough)
            print(f"{text}: {enough.get(name, 'more than ' + str(sizes[-1]))}", flush=True)

    def contexts(self, banks: Mapping[int, Bank]) -> None:
        """Agreement between contexts, of all pairs; general ones are the same at each."""
        tables = {context: self.tables(bank) for context, bank in banks.items()}
        for first, second in combinations(banks, 2):
            top = self.top(tables[first])
            found = agreement(tables[first], tables[second], top, self.best)
            found.pop("general", None)
            self.add(f"agreement of contexts {first} and {second}", [found])

    def senders(self, pairs: Pairs, bank: Bank, count: int) -> None:
        """Agreement of the causal scores, senders included, of every other pair, and of the same ones without."""
        tables, bare = [], []
        for start in (0, 1):
            half = {
                name: {
                    kind: replace(probe, pairs=probe.pairs[start::2])
                    for kind, probe in probes.items()
                    if len(probe.pairs) > 1
                }
                for name, probes in pairs.items()
            }
            scoring = self.scoring.model_copy(update={"sender_pairs": count})
            no_text = torch.empty(0, 0)
            found = causal(ScoreInputs(self.teacher, half, no_text, no_supernet, scoring, seed=0))
            tables.append(
                {name: c.score for name, c in found.capabilities.items() if c.score is not None}
                | {WHOLE: found.composite}
            )
            bare.append(
                self.tables(
                    {
                        name: {kind: bank[name][kind][start::2] for kind in probes}
                        for name, probes in half.items()
                    }
                )
            )
        top = self.top(self.tables(bank))
        for title, (first, second) in (("with senders", tables), ("receivers alone", bare)):
            self.add(
                f"agreement of every other pair, {count} sender pairs a capability, {title}",
                [agreement(first, second, top, self.best)],
            )

    def add(self, title: str, drawn: Sequence[Agreement], **facts: object) -> Agreement:
        """Records and prints what was drawn as mean, least and most; returns the means."""
        means, shown = {}, []
        for name in drawn[0]:
            values = [each[name] for each in drawn]
            means[name] = statistics.mean(values)
            unit = "share" if name == SHARED else "correlation"
            spread = {"least": min(values), "most": max(values), "splits": len(values)}
            self.book.add(f"{title}, {name}", means[name], unit, None, **spread, **facts)
            shown.append(f"{name} {means[name]:.3f} ({min(values):.3f} to {max(values):.3f})")
        print(f"{title}: {'; '.join(shown)}", flush=True)
        return means


def no_supernet() -> Supernet:
    """Causal scores read no twins."""
    raise ValueError("causal scores need no supernet")


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    add_config(parser)
    parser.add_argument("--pairs", type=int, default=16, help="of each sub-probe")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[512, 1024, 2048],
        help="lengths of retrieval pairs",
    )
    parser.add_argument("--splits", type=int, default=10, help="random halves")
    parser.add_argument(
        "--senders",
        type=int,
        nargs="?",
        const=4,
        default=0,
        help="pairs of sender effects; 4 where no number is given",
    )
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("--pairs: halves need 2 or more")
    config, started = load_config(args.config, args.overrides), time.monotonic()
    config = only(config, pairs=args.pairs, pairs_file=None)
    teacher, book = load_teacher(config.teacher), LabBook(config.seed)
    print(f"teacher on {teacher.device}: {time.monotonic() - started:.1f} s", flush=True)
    study = Study(teacher, config, book)
    general = study.draw(only(config, retrieval=()))
    pairs, banks = {}, {}
    general_bank = effects_of(teacher, general, config.scoring)
    for context in args.contexts:
        retrieval = study.draw(only(config, general=(), contexts=(context,)))
        pairs[context] = retrieval | general
        banks[context] = effects_of(teacher, retrieval, config.scoring) | general_bank
        print(f"receivers at {context}: {time.monotonic() - started:.1f} s", flush=True)
    with book.kept(args.figures):
        for context, bank in banks.items():
            study.splits(bank, context, args.splits, config.seed)
        study.contexts(banks)
        if args.senders:
            study.senders(pairs[args.contexts[0]], banks[args.contexts[0]], args.senders)
    print(f"all: {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    run_script(main)
