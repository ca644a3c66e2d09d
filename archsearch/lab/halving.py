"""What successive halving finds of the front that full training of every map would find, and for how many of its tokens.

    archsearch run search_spaces/tiny.yaml --run-dir RUN --set search.halving.keep=1 --set 'search.proxy_tokens=[0,4_096,16_384]'
    python -m archsearch.lab.halving RUN --figures runs/lab/halving.json
    python -m archsearch.lab.halving --ledger LEDGER --measured-as runs/lab/selection.json --figures ...
    python -m archsearch.lab.halving --study runs/lab/smollm2_fidelity.json --lengths 0 131072 3997696 --figures ...

Readings of all maps at all lengths are at hand: those of a search that pruned none, of students of archsearch.lab.selection, or of a
study of proxies. The search's own rule is then played over them (halving_replay).

Hypervolumes are those of the values at full length, from the best of all maps to a tenth of their range beyond the worst (as a run's
report has it); those "of the front's box" from the best to a tenth beyond the worst of the full front, where bad maps make no
room. "drawn" is the mean of as many maps drawn at random as the same tokens train to full length at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..config import HalvingConfig, ObjectiveConfig
from ..configfile import load_config
from ..errors import ConfigError
from ..rundir import RunDir
from .bench_folder import read_config
from .entry import add_overrides, run_script, script_parser
from .halving_replay import Replay, replay
from .halving_sources import RETRIEVAL, Readings, read_fidelity, read_ledger, read_run
from .records import LabBook, join, write_records

PAIRS = (("kl", "cache_bytes"), ("kl", "fa_share"), (RETRIEVAL, "cache_bytes"))
"""Objectives, all of them to be small; a run's own come last."""
KEEPS = (0.1, 0.2, 0.3, 0.4, 0.5)
LEAST_VOLUME, MOST_TOKENS = 0.98, 0.4
"""What the default is to reach, and for how many of the tokens."""
CONFIG = Path("search_spaces/smollm2_135m_gpu.yaml")

Objectives = tuple[ObjectiveConfig, ...]


@dataclass(frozen=True)
class Row:
    """One replay."""

    name: str
    objectives: Objectives
    keep: float
    maps: int
    lengths: tuple[int, ...]
    found: Replay

    @property
    def pair(self) -> str:
        """The objectives' names."""
        return " and ".join(objective.metric for objective in self.objectives)


def objectives_of(readings: Readings) -> list[Objectives]:
    """PAIRS as far as the readings have them, and the run's own."""
    pairs = [
        tuple(ObjectiveConfig(metric=name, direction="minimize") for name in pair)
        for pair in PAIRS
        if set(pair) <= readings.metrics
    ]
    own = readings.config.search.objectives
    if own not in pairs and {objective.metric for objective in own} <= readings.metrics:
        pairs.append(own)
    return pairs


def replays(readings: Readings, keeps: Sequence[float]) -> Iterator[Row]:
    """A replay for each pair of objectives and each keep; all else is as the config's section halving says."""
    config = readings.config
    halving = config.search.halving or HalvingConfig()
    for objectives in objectives_of(readings):
        for keep in keeps:
            changed = {
                "objectives": objectives,
                "halving": halving.model_copy(update={"keep": keep}),
                "max_promoted": None,
            }
            search = config.search.model_copy(update=changed)
            found = replay(config.model_copy(update={"search": search}), readings.rungs)
            lengths, maps = search.proxy_tokens, len(readings.rungs[0])
            yield Row(readings.name, objectives, keep, maps, lengths, found)


def show(rows: Sequence[Row]) -> str:
    """The replays as Markdown."""
    names = ["readings", "objectives", "keep", "maps at each length", "tokens", "hypervolume"]
    names += ["drawn", "of the front's box", "drawn", "maps of the front"]
    text = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in rows:
        own = row.found
        values = (own.volume, own.drawn, own.box_volume, own.box_drawn)
        volumes = [f"{value:.4f}" for value in values]
        cells = [row.name, row.pair, f"{row.keep:g}", ", ".join(map(str, own.kept))]
        cells += [f"{own.tokens_share:.1%}", *volumes, f"{own.front_reached} of {own.front}"]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def verdict(rows: Sequence[Row], keep: float) -> str | None:
    """The worst of the replays of one keep against what is to be reached; None where there are none."""
    own = [row.found for row in rows if row.keep == keep]
    if not own:
        return None
    volume, tokens = min(r.volume for r in own), max(r.tokens_share for r in own)
    word = "reached" if volume >= LEAST_VOLUME and tokens <= MOST_TOKENS else "missed"
    return (
        f"keep {keep:g}: at least {volume:.4f} of the hypervolume (sought {LEAST_VOLUME:g}) for at most {tokens:.1%} of the "
        f"tokens (sought {MOST_TOKENS:.0%}): {word}"
    )


def record(book: LabBook, rows: Sequence[Row]) -> None:
    """Adds hypervolume and tokens of each replay, with all else as facts."""
    for row in rows:
        facts: dict[str, Any] = {
            "readings": row.name,
            "objectives": [objective.metric for objective in row.objectives],
            "keep": row.keep,
            "maps": row.maps,
            "lengths": list(row.lengths),
            **asdict(row.found),
        }
        facts |= {"kept": list(row.found.kept)}
        lengths = ", ".join(f"{tokens:,}" for tokens in row.lengths)
        of = f"{row.pair}, keep {row.keep:g}, {row.name} at {lengths} tokens"
        for metric, value, bound in (
            ("hypervolume of halving over that of every map", "volume", f">= {LEAST_VOLUME}"),
            ("tokens of halving over those of every map", "tokens_share", f"<= {MOST_TOKENS}"),
        ):
            rest = {key: fact for key, fact in facts.items() if key != value}
            book.add(f"{metric}, {of}", facts[value], "share", bound, **rest)


def parsed() -> argparse.Namespace:
    """The command line. Raises ConfigError where it names no readings, or several kinds."""
    parser = script_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="run directories")
    parser.add_argument("--ledger", type=Path, help="readings of archsearch.lab.selection")
    parser.add_argument("--study", type=Path, help="a fidelity.json")
    parser.add_argument(
        "--config",
        type=Path,
        default=CONFIG,
        help="what the search of a ledger's or study's maps has",
    )
    parser.add_argument("--name", help="what their readings are called")
    parser.add_argument("--lengths", type=int, nargs="+", default=[], help="tokens, of those read")
    parser.add_argument(
        "--keep", type=float, nargs="+", default=KEEPS, help="in place of the config's"
    )
    parser.add_argument(
        "--measured-as",
        type=Path,
        help="figures whose machine and versions are those of the readings",
    )
    add_overrides(parser, "config")
    args = parser.parse_args()
    if [bool(args.runs), bool(args.ledger), bool(args.study)].count(True) != 1:
        raise ConfigError("allowed: RUN, --ledger or --study")
    if not all(0 < keep <= 1 for keep in args.keep):
        raise ConfigError("--keep: allowed: above 0, at most 1")
    return args


def read(args: argparse.Namespace) -> Iterator[tuple[Readings, dict[str, str] | None]]:
    """The readings that the command line names, and the versions that they were made with, where that is known."""
    for path, reader in ((args.ledger, read_ledger), (args.study, read_fidelity)):
        if path is not None:
            readings = reader(path, load_config(args.config, args.overrides), args.lengths)
            yield replace(readings, name=args.name or readings.name), None
    for path in args.runs:
        run = RunDir(path)
        versions = run.read_json("provenance.json")["calls"][-1]["versions"]
        yield read_run(run, read_config(run, args.overrides)), versions


def main() -> None:
    """Command line entry."""
    args = parsed()
    made = join([args.measured_as])[-1] if args.measured_as else {}
    rows: list[Row] = []
    records: list[dict[str, Any]] = []
    for readings, versions in read(args):
        if readings.left_out:
            print(f"{readings.name}: {readings.left_out} maps without all readings are left out")
        own = list(replays(readings, args.keep))
        book = LabBook(
            readings.config.seed,
            machine=made.get("machine"),
            versions=made.get("versions", versions),
        )
        record(book, own)
        rows, records = rows + own, records + book.rows
    print(show(rows))
    if line := verdict(rows, HalvingConfig().keep):
        print(line)
    write_records(records, args.figures)


if __name__ == "__main__":
    run_script(main)
