"""The best found head maps beside the selectors' at each share, over runs with different seeds.

    python -m archsearch.lab.selector_table RUN [RUN ...] --figures runs/lab/smollm2_front.json

Columns are seed methods (--columns), "search" and "front". Every selector's map is read at its own share; of random seeds the best
counts. "search" is the best map of the same rung that no seed supplied, at no more full-attention heads; "front" is the same
with the seeds among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from ..config import SeedMethod
from ..report.records import Candidate, Rung, bytes_text
from ..report.summary import read_summary
from ..rundir import RunDir
from ..search.study import head_map_text
from .entry import add_run, run_script, script_parser
from .records import LabBook

SHARES = (0.5, 0.25, 0.125)
FOUND = ("search", "front")
COLUMNS = ("even_layers", "random", "causal", "replacement_kl", *FOUND)
SLACK = 0.02
"""A selector's share is rounded to whole heads or layers; so far it may be from the nominal one."""

Row = tuple[int, int, float, dict[str, Candidate | None]]


def best(candidates: Iterable[Candidate], metric: str) -> Candidate | None:
    """The candidate with the least metric, or None without candidates."""
    return min(candidates, key=lambda c: c.metrics[metric], default=None)


def column(rung: Rung, name: str, share: float, metric: str) -> Candidate | None:
    """The candidate of one column of the table, or None where the rung has none."""
    found = [c for c in rung.candidates if c.group != "random" and metric in c.metrics]
    if name in FOUND:
        pool = [c for c in found if name == "front" or c.group == "search"]
        return best((c for c in pool if c.metrics["fa_share"] <= share + SLACK), metric)
    of_method = [c for c in found if name in (c.method, *c.also)]
    return best((c for c in of_method if abs(c.metrics["fa_share"] - share) <= SLACK), metric)


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    add_run(parser, several=True)
    parser.add_argument("--metric", default="kl", help="that maps are compared by")
    parser.add_argument(
        "--columns",
        nargs="+",
        choices=(*get_args(SeedMethod), *FOUND),
        default=COLUMNS,
        metavar="NAME",
        help="seed methods, search and front",
    )
    parser.add_argument(
        "--shares", nargs="+", type=float, default=SHARES, help="of full-attention heads"
    )
    parser.add_argument("--machine", help="where the runs ran, if not here")
    args = parser.parse_args()
    provenance = RunDir(args.runs[0]).read_json("provenance.json")
    book = LabBook(0, machine=args.machine, versions=provenance["calls"][-1]["versions"])
    rows: list[Row] = []
    for path in args.runs:
        summary = read_summary(RunDir(path))
        seed = int(summary.config["seed"])
        for rung in summary.rungs:
            for share in args.shares:
                cells = {name: column(rung, name, share, args.metric) for name in args.columns}
                rows.append((seed, rung.proxy_tokens, share, cells))
            for name, value in rung.hypervolume.items():
                text = f"hypervolume, {name}, {rung.proxy_tokens} proxy tokens, run seed {seed}"
                book.add(text, value, "share of box")
        for stage in summary.stages:
            text = f"seconds of {stage['stage']}, run seed {seed}"
            book.add(text, stage["seconds"], "s", peak_bytes=stage["peak_bytes"])
    _record(book, rows, args.metric)
    book.write(args.figures)
    print(f"| run seed | proxy tokens | FA share | {' | '.join(args.columns)} |")
    print("|" + "---|" * (3 + len(args.columns)))
    for seed, tokens, share, cells in rows:
        shown = [_cell(cell, args.metric) for cell in cells.values()]
        print(f"| {seed} | {tokens:,} | {share} | {' | '.join(shown)} |")


def _record(book: LabBook, rows: Iterable[Row], metric: str) -> None:
    for seed, tokens, share, cells in rows:
        for name, cell in cells.items():
            if cell is None:
                continue
            text = f"{metric}, {name} at FA share {share}, {tokens} proxy tokens, run seed {seed}"
            facts = {key: cell.metrics[key] for key in ("fa_share", "cache_bytes")}
            head_map = head_map_text(cell.head_map)
            book.add(text, cell.metrics[metric], "nats/token", None, **facts, head_map=head_map)


def _cell(candidate: Candidate | None, metric: str) -> str:
    if candidate is None:
        return "–"
    return f"{candidate.metrics[metric]:.4f} ({bytes_text(candidate.metrics['cache_bytes'])})"


if __name__ == "__main__":
    run_script(main)
