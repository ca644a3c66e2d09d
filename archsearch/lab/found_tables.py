"""Found maps beside those of selectors at each share: a table, a line on every found map, and figures of the lab book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..report.records import bytes_text
from .found_maps import BEST, is_found
from .ledger import FAILED, VALUES
from .records import LabBook, markdown
from .selection_maps import CONTROL, deciding, metric_of, retrieval_columns, retrieval_nll
from .selection_tables import Line, Name, Table, means, short

NONE = "–"


@dataclass(frozen=True)
class Needles:
    """The columns of retrieval prompts that the teacher answers well enough to decide anything, by kind."""

    columns: tuple[str, ...]

    @classmethod
    def of(cls, table: Table) -> Needles:
        """Those of a table's teacher."""
        return cls(tuple(deciding(retrieval_columns(table.teacher), table.teacher)))

    @property
    def kinds(self) -> dict[str, list[str]]:
        """Columns of each kind, one a length."""
        found: dict[str, list[str]] = {}
        for column in self.columns:
            found.setdefault(column.partition("@")[0], []).append(column)
        return found

    def found(self, values: Mapping[str, float], columns: Sequence[str] = ()) -> float | None:
        """Share answered, the mean over columns; over all where none are given."""
        wanted = columns or self.columns
        return fmean(values[metric_of(column, "match")] for column in wanted) if wanted else None


@dataclass(frozen=True)
class Row:
    """A map at a share: its names there, and what decides between maps. needles is 0 where no prompts decide."""

    names: tuple[Name, ...]
    line: Line
    cache: int
    needles: float

    @property
    def kl(self) -> float:
        """On held-out text."""
        return self.line.kl

    @property
    def chosen(self) -> list[Name]:
        """Names of selectors that choose it."""
        return [name for name in self.names if not is_found(name)]

    def beats(self, other: Row) -> bool:
        """Whether it is as good in KL, needles and cache, and better in one."""
        mine, theirs = ((row.kl, -row.needles, row.cache) for row in (self, other))
        return all(a <= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs


@dataclass(frozen=True)
class Beside:
    """One found map against the selectors' at its share."""

    name: Name
    row: Row
    selectors: tuple[Row, ...]

    @property
    def higher_kl(self) -> int:
        """Selectors' maps with a higher KL."""
        return sum(own.kl > self.row.kl for own in self.selectors)

    @property
    def fewer_needles(self) -> int:
        """Selectors' maps that find fewer needles."""
        return sum(own.needles < self.row.needles for own in self.selectors)

    @property
    def beaten_by(self) -> list[str]:
        """Selectors' maps that are as good in KL, needles and cache, and better in one."""
        return [name_text(own.chosen[0]) for own in self.selectors if own.beats(self.row)]

    @property
    def text(self) -> str:
        """A line."""
        count = len(self.selectors)
        beaten = " and ".join(self.beaten_by) or "none"
        return (
            f"{name_text(self.name)}: KL {self.row.kl:.4f}, below that of {self.higher_kl} of {count} selectors' maps; "
            f"needles {self.row.needles:.3f}, above those of {self.fewer_needles}; beaten in KL, needles and cache by {beaten}"
        )


def rows_at(table: Table, share: float) -> list[Row]:
    """The maps of a share with figures: those of searches first, then by KL."""
    needles, rows = Needles.of(table), []
    for line in means(table.lines):
        names = tuple(n for n in line.names if n[2] == share and n[0] != CONTROL)
        if names:
            answered = needles.found(line.row[VALUES]) or 0.0
            rows.append(Row(names, line, table.bytes_of(line.head_map), answered))
    return sorted(rows, key=lambda row: (not any(map(is_found, row.names)), row.kl))


def beside(rows: Sequence[Row]) -> list[Beside]:
    """Every found map of a share against the selectors'."""
    selectors = tuple(row for row in rows if row.chosen)
    found = [(name, row) for row in rows for name in row.names if is_found(name)]
    named = sorted(found, key=lambda pair: pair[0][:2])
    return [Beside(name, row, selectors) for name, row in named]


def show_share(table: Table, share: float) -> str:
    """The maps of a share as Markdown, a line on every found one, and who failed."""
    needles, rows = Needles.of(table), rows_at(table, share)
    others = [name for name in table.teacher if name.startswith("kl_")]
    head = [f"map at {share:g} after {table.last:,} tokens", "FA share", "cache", "KL"]
    head += [*others, *needles.kinds, "needles", "their NLL"]
    cells = [_cells("teacher", "1", "", table.teacher, others, needles)]
    for row in rows:
        # What it is best by stands in the lines below.
        name = "; ".join(name_text(name).partition(BEST)[0] for name in row.names)
        share_text = f"{row.line.head_map.fa_share:.3f}"
        values = row.line.row[VALUES]
        cells.append(_cells(name, share_text, bytes_text(row.cache), values, others, needles))
    failed = [
        f"{'; '.join(map(name_text, line.names))}: {line.row[FAILED]}"
        for line in table.lines
        if FAILED in line.row and any(name[2] == share for name in line.names)
    ]
    return "\n".join([markdown(head, cells), "", *(b.text for b in beside(rows)), *failed])


def _cells(
    name: str,
    share: str,
    cache: str,
    values: Mapping[str, float],
    others: Sequence[str],
    needles: Needles,
) -> list[str]:
    answered = [*(needles.found(values, own) for own in needles.kinds.values())]
    answered += [needles.found(values)]
    nll = retrieval_nll(values, needles.columns)
    return [
        name,
        share,
        cache,
        *(f"{values[metric]:.4f}" for metric in ("kl", *others)),
        *(NONE if share is None else f"{share:.3f}" for share in answered),
        NONE if nll is None else f"{nll:.3f}",
    ]


def record_share(book: LabBook, table: Table, share: float) -> None:
    """Adds a record for every found map and for the selectors' best; every reading has its own (record_readings)."""
    rows = rows_at(table, share)
    at = f"share {share:g}, {table.last} tokens"
    for one in beside(rows):
        text = f"kl, found by {name_text(one.name)}, {at}"
        book.add(
            text,
            short(one.row.kl),
            "nats/token",
            f"{len(one.selectors)} selectors' maps at the share",
            **_facts(one.row),
            higher_kl=one.higher_kl,
            fewer_needles=one.fewer_needles,
            beaten_by=one.beaten_by,
        )
    selectors = [row for row in rows if row.chosen]
    if selectors:
        low, most = min(selectors, key=lambda r: r.kl), max(selectors, key=lambda r: r.needles)
        book.add(f"kl, lowest of selectors, {at}", short(low.kl), "nats/token", None, **_facts(low))
        book.add(
            f"needles, most of selectors, {at}", short(most.needles), "share", None, **_facts(most)
        )


def _facts(row: Row) -> dict[str, Any]:
    return {
        "names": [name_text(name) for name in row.names],
        "fa_share": row.line.head_map.fa_share,
        "cache_bytes": row.cache,
        "kl_on_heldout": short(row.kl),
        "needles_found": short(row.needles),
    }


def name_text(name: Name) -> str:
    """A selector and its unit, or a search, what the map is best by, and the candidate's number."""
    selector, unit, _, number = name
    if is_found(name):
        return f"{selector}: candidate {number} {unit}"
    drawn = f" {number + 1}" if selector == "random" else ""
    return f"{selector}{drawn} by {unit}"
