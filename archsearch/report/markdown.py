"""The report as Markdown, for terminals, issues and lab books."""

from __future__ import annotations

from .records import RunSummary
from .tables import (
    Table,
    after,
    cache_table,
    candidate_table,
    failure_table,
    hypervolume_table,
    share_table,
    stage_table,
)


def markdown_report(summary: RunSummary) -> str:
    """All tables of a run, one after the other."""
    comparisons = [
        table
        for rung in reversed(summary.rungs)
        for table in (share_table(summary, rung), cache_table(summary, rung))
    ]
    tables = [
        hypervolume_table(summary),
        candidate_table(summary.last.front, f"Front {after(summary.last)}"),
        *comparisons,
        failure_table(summary),
        stage_table(summary),
    ]
    text = "\n\n".join(markdown_table(table) for table in tables if table.rows)
    return f"# {summary.name}\n\n{text}\n"


def markdown_table(table: Table) -> str:
    """One table with its title and note; stressed cells in bold."""
    lines = [f"## {table.title}", ""]
    lines.append("| " + " | ".join(table.columns) + " |")
    lines.append("|" + "---|" * len(table.columns))
    for r, row in enumerate(table.rows):
        cells = [_cell(text, strong=(r, i) in table.strong) for i, text in enumerate(row)]
        lines.append("| " + " | ".join(cells) + " |")
    if table.note:
        lines += ["", table.note]
    return "\n".join(lines)


def _cell(text: str, *, strong: bool) -> str:
    escaped = text.replace("|", "\\|").replace("\n", " ")
    return f"**{escaped}**" if strong and escaped else escaped
