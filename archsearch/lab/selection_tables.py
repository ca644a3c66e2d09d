"""The comparison of selectors as Markdown and as figures of the lab book."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ..config import RunConfig
from ..cost import cache_bytes
from ..headmap import HeadMap
from ..report.records import bytes_text
from ..search.study import head_map_text
from .ledger import FAILED, VALUES
from .records import LabBook, markdown
from .selection_maps import CONTROL, LAYERS, deciding, metric_of, retrieval_columns, retrieval_nll

NOTHING = "°"
"""After a column that decides nothing, since the teacher itself fails at it."""
MEAN = -1
"""In place of a seed: the mean over all."""
DIGITS = 5
"""Significant digits of a figure in the lab book."""

Name = tuple[str, str, float, int]


@dataclass(frozen=True)
class Line:
    """One reading of one map: names are the selectors that chose it, row is the ledger's."""

    stage: str
    names: tuple[Name, ...]
    head_map: HeadMap
    tokens: int
    seed: int
    row: Mapping[str, Any]

    @property
    def kl(self) -> float:
        """KL on the held-out text, infinite where the student failed."""
        return float(self.row.get(VALUES, {}).get("kl", float("inf")))

    @property
    def gpu_seconds(self) -> float:
        """Of training up to here and of measuring, as a share of the GPU that several students had."""
        seconds = self.row.get("train_seconds", 0.0) + self.row.get("measure_seconds", 0.0)
        return float(seconds) / float(self.row.get("workers", 1))


@dataclass(frozen=True)
class Table:
    """All lines of a stage, the teacher's own figures, and the config that says at what context bytes are counted."""

    lines: Sequence[Line]
    teacher: Mapping[str, float]
    config: RunConfig

    @property
    def last(self) -> int:
        """Tokens of the longest reading."""
        return max((line.tokens for line in self.lines), default=0)

    def bytes_of(self, head_map: HeadMap) -> int:
        """Cache bytes of a map."""
        cost = self.config.cost
        return cache_bytes(head_map, cost.context, element_bytes=cost.element_bytes)

    def at(self, share: float, units: Iterable[str], only: str = "") -> list[Line]:
        """Lines of the longest reading at that share, chosen by these units; the means over seeds where there are several."""
        wanted = set(units)
        return [
            line
            for line in means(self.lines)
            if line.tokens == self.last
            and any(
                own == share and unit in wanted and only in ("", selector) and selector != CONTROL
                for selector, unit, own, _ in line.names
            )
        ]


@dataclass(frozen=True)
class Aim:
    """What was to be reached, and what was."""

    name: str
    value: float
    most: float

    @property
    def text(self) -> str:
        """A line."""
        verdict = "reached" if self.value <= self.most else "missed"
        return f"{self.name}: {self.value:.4f}, at most {self.most:.4f}: {verdict}"


def means(lines: Sequence[Line]) -> list[Line]:
    """The lines of maps with one seed, and the mean over seeds of the others."""
    found: dict[tuple[HeadMap, int], list[Line]] = {}
    for line in lines:
        if VALUES in line.row:
            found.setdefault((line.head_map, line.tokens), []).append(line)
    return [own[0] if len(own) == 1 else _mean(own) for own in found.values()]


def _mean(lines: Sequence[Line]) -> Line:
    values = [line.row[VALUES] for line in lines]
    row = dict(lines[0].row) | {
        VALUES: {name: fmean(v[name] for v in values) for name in values[0]}
    }
    for part in ("train_seconds", "measure_seconds"):
        row[part] = fmean(line.row[part] for line in lines)
    return replace(lines[0], seed=MEAN, row=row)


def aims(table: Table) -> list[Aim]:
    """What the comparison was to show, as far as its lines can tell: the best KL after the longest reading."""
    every, after, found = ("head", "group", "bytes"), f"after {table.last:,} tokens", []
    for share, most in ((1 / 8, 0.13), (1 / 4, 0.09)):
        if own := table.at(share, every):
            found.append(Aim(f"best KL at {share:g} {after}", min(line.kl for line in own), most))
    heads, quarter = table.at(1 / 16, ["head"]), table.at(1 / 4, ["layer"], LAYERS)
    if heads and quarter:
        best = min(line.kl for line in heads)
        name = f"best KL of heads at 1/16 against evenly spaced layers at 1/4 {after}"
        found.append(Aim(name, best, quarter[0].kl))
    if eighth := table.at(1 / 8, ["layer"], LAYERS):
        room = table.bytes_of(eighth[0].head_map)
        fitting = [
            line.kl
            for line in means(table.lines)
            if line.tokens == table.last
            and table.bytes_of(line.head_map) <= room
            and line.head_map != eighth[0].head_map
        ]
        if fitting:
            ratio = min(fitting) / eighth[0].kl
            name = f"best KL at the bytes of evenly spaced layers at 1/8, over theirs, {after}"
            found.append(Aim(name, ratio, 2 / 3))
    return found


def show(table: Table) -> str:
    """The table as Markdown, best KL first at each share, and what was to be reached."""
    columns = retrieval_columns(table.teacher)
    decide = set(deciding(columns, table.teacher))
    others = [n for n in table.teacher if n.startswith("kl_")]
    general = "general_nll" in table.teacher
    head = ["selector", "keeps", "budget", "FA share", "cache", "tokens", "seed", "KL", *others]
    head += [column if column in decide else column + NOTHING for column in columns]
    head += ["general"] * general + ["GPU s"]
    rows = []
    if table.teacher:
        figures = _figures(table.teacher, others, columns, general)
        rows.append(["teacher", "", "", "1", "", "", "", *figures, ""])
    lines = [*table.lines, *(line for line in means(table.lines) if line.seed == MEAN)]
    ordered = [
        (name, line) for line in sorted(lines, key=lambda line: line.kl) for name in line.names
    ]
    for name, line in sorted(ordered, key=lambda pair: (-pair[0][2], pair[1].tokens)):
        rows.append(_row(table, name, line, others, columns, general))
    note = f"Retrieval and general prompts: share answered (nats an answer token). {NOTHING}: decides nothing."
    return "\n".join([markdown(head, rows), "", note, *(aim.text for aim in aims(table))])


def _row(
    table: Table,
    name: Name,
    line: Line,
    others: Sequence[str],
    columns: Sequence[str],
    general: bool,
) -> list[str]:
    selector, unit, share, number = name
    values = line.row.get(VALUES)
    figures = (
        _figures(values, others, columns, general)
        if values is not None
        else [str(line.row[FAILED]), *[""] * (len(others) + len(columns) + general)]
    )
    return [
        f"{selector} {number + 1}" if selector == "random" else selector,
        unit,
        f"{share:g}",
        f"{line.head_map.fa_share:.3f}",
        bytes_text(table.bytes_of(line.head_map)),
        f"{line.tokens:,}",
        "mean" if line.seed == MEAN else str(line.seed),
        *figures,
        f"{line.gpu_seconds:.1f}",
    ]


def _figures(
    values: Mapping[str, float], others: Sequence[str], columns: Sequence[str], general: bool
) -> list[str]:
    prompts = [*columns, *["general"] * general]
    return [f"{values[name]:.4f}" for name in ("kl", *others)] + [
        f"{values[metric_of(c, 'match')]:.2f} ({values[metric_of(c, 'nll')]:.2f})" for c in prompts
    ]


def record(table: Table, path: Path) -> None:
    """Writes a record a reading, its KL with all other figures beside it, and one for each aim.

    Records of other stages that the file has stay.
    """
    book = LabBook(table.config.seed)
    stages = sorted({line.stage for line in table.lines})
    if path.exists():
        book.rows += [row for row in json.loads(path.read_text()) if row["stage"] not in stages]
    facts = record_readings(book, table)
    for aim in aims(table):
        book.add(aim.name, short(aim.value), "", f"at most {aim.most:.4g}", **facts)
    book.write(path)


def record_readings(book: LabBook, table: Table) -> dict[str, Any]:
    """Adds the teacher's figures and a record a reading; returns what all records of the table say of it."""
    columns = retrieval_columns(table.teacher)
    decide = deciding(columns, table.teacher)
    stage = min((line.stage for line in table.lines), default="")
    facts: dict[str, Any] = {"stage": stage, "decides": decide}
    book.add(
        "kl, teacher",
        0.0,
        "nats/token",
        None,
        **facts,
        figures={n: short(v) for n, v in table.teacher.items()},
    )
    for line in table.lines:
        if VALUES not in line.row:
            continue
        values = line.row[VALUES]
        selectors = [
            f"{name}/{unit}/{share:g}/{number}" for name, unit, share, number in line.names
        ]
        nll = retrieval_nll(values, decide)
        book.add(
            f"kl, {selectors[0]}, {line.tokens} tokens, seed {line.seed}",
            short(line.kl),
            "nats/token",
            f"{LAYERS} at the same share",
            stage=line.stage,
            selectors=selectors,
            tokens=line.tokens,
            batches=line.seed,
            fa_share=line.head_map.fa_share,
            cache_bytes=table.bytes_of(line.head_map),
            gpu_seconds=round(line.gpu_seconds, 2),
            retrieval_nll=None if nll is None else short(nll),
            figures={name: short(value) for name, value in values.items() if name != "kl"},
            head_map=head_map_text(line.head_map),
        )
    return facts


def short(value: float) -> float:
    """A figure with the digits of the lab book."""
    return float(f"{value:.{DIGITS}g}")
