"""How far an early reading of students ranks them as a later one does, read off the figures of the comparison of selectors.

    python -m archsearch.lab.selection_agreement runs/lab/selection.json --figures runs/lab/selection_agreement.json

Spearman's rank correlation of each metric between two readings of the same maps: over all of them, at each FA share, and among
the third with the lowest KL at the later reading of each share, the hard case. Maps of several seeds count once, by the first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..fidelity.agreement import spearman
from .entry import run_script, script_parser
from .records import LabBook, join

METRICS = ("kl", "kl_docs", "retrieval_nll")
"""KL on held-out text and on text that no model has drawn, and the mean NLL of what retrieval prompts ask for."""
NEAR = 0.01
"""FA shares as near as that to one of SHARES count as it."""
SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
LEAST_MAPS = 5

Readings = dict[str, dict[int, dict[str, float]]]
"""Metrics by map and by tokens."""


def readings_of(records: Iterable[Mapping[str, Any]]) -> tuple[Readings, dict[str, float]]:
    """Metrics of every map at every reading, and every map's FA share."""
    found: Readings = defaultdict(dict)
    shares: dict[str, float] = {}
    for record in records:
        if not str(record["metric"]).startswith("kl, ") or "selectors" not in record:
            continue
        key = json.dumps(record["head_map"])
        shares[key] = record["fa_share"]
        metrics = {"kl": record["value"], "retrieval_nll": record["retrieval_nll"]}
        metrics |= {name: record["figures"][name] for name in METRICS if name in record["figures"]}
        found[key].setdefault(record["tokens"], metrics)
    return found, shares


def groups_of(
    readings: Readings, shares: Mapping[str, float], late: int
) -> dict[str, tuple[str, ...]]:
    """The maps of each group, by its name."""
    groups = {"all": tuple(readings)}
    for share in SHARES:
        near = [key for key in readings if abs(shares[key] - share) <= NEAR]
        groups[f"FA share {share:g}"] = tuple(near)
        best = sorted(near, key=lambda key: readings[key][late]["kl"])[: len(near) // 3]
        groups[f"FA share {share:g}, best third"] = tuple(best)
    return {name: keys for name, keys in groups.items() if len(keys) >= LEAST_MAPS}


def agree(
    readings: Readings, keys: Iterable[str], early: tuple[str, int], late: tuple[str, int]
) -> float | None:
    """Spearman between (metric, tokens) and (metric, tokens); None where a map lacks one."""
    pairs = []
    for key in keys:
        values = [readings[key].get(tokens, {}).get(metric) for metric, tokens in (early, late)]
        if None in values:
            return None
        pairs.append(values)
    first, second = zip(*pairs, strict=True)
    return spearman(first, second)


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    parser.add_argument("selection", type=Path, help="figures of archsearch.lab.selection")
    args = parser.parse_args()
    records = join([args.selection])
    readings, shares = readings_of(records)
    tokens = sorted({count for each in readings.values() for count in each})
    if len(tokens) < 2:
        raise ConfigError(f"{args.selection}: one reading alone; allowed: figures of two or more")
    early, late = tokens[0], tokens[-1]
    readings = {key: each for key, each in readings.items() if {early, late} <= each.keys()}
    example = records[-1]
    book = LabBook(example["seed"], machine=example["machine"], versions=example["versions"])
    print(
        f"| maps | number | {' | '.join(METRICS)} | KL with retrieval_nll |\n|---|---|---|---|---|---|"
    )
    for name, keys in groups_of(readings, shares, late).items():
        asked = [((metric, early), (metric, late)) for metric in METRICS]
        asked.append((("kl", early), ("retrieval_nll", late)))
        cells = []
        for first, second in asked:
            value = agree(readings, keys, first, second)
            cells.append("" if value is None else f"{value:.3f}")
            if value is not None:
                metric = f"Spearman, {first[0]} at {first[1]:,} tokens with {second[0]} at {second[1]:,}, {name}"
                book.add(metric, value, "", None, maps=len(keys))
        print(f"| {name} | {len(keys)} | {' | '.join(cells)} |")
    book.write(args.figures)


if __name__ == "__main__":
    run_script(main)
