"""The report as Markdown, for terminals, issues and lab books."""

from __future__ import annotations

from .fidelity_tables import fidelity_tables
from .records import RunSummary
from .retention_table import retention_tables
from .score_tables import score_tables
from .similarity_svg import similarity_caption
from .tables import (
    Table,
    after,
    cache_table,
    candidate_tables,
    constraint_line,
    failure_table,
    hypervolume_table,
    pruned_table,
    share_table,
    stage_table,
)


def markdown_report(summary: RunSummary) -> str:
    """All tables of a run, one after the other."""
    tables = _search_tables(summary) if summary.rungs else []
    tables += fidelity_tables(summary.fidelity)
    tables += [
        *score_tables(summary.scores),
        failure_table(summary),
        pruned_table(summary),
        stage_table(summary),
    ]
    parts = [markdown_table(table) for table in tables if table.rows]
    if said := constraint_line(summary):
        parts.insert(0, _cell(said, strong=bool(summary.unmet)))
    if summary.scores.similarity is not None:
        parts.append(f"## Similarity\n\n{similarity_caption(summary.scores.similarity)}")
    text = "\n\n".join(parts)
    return f"# {summary.name}\n\n{text}\n"


def _search_tables(summary: RunSummary) -> list[Table]:
    comparisons = [
        table
        for rung in reversed(summary.rungs)
        for table in (share_table(summary, rung), cache_table(summary, rung))
    ]
    title = f"Front {after(summary.last)}"
    front = candidate_tables(summary.last.front, title, summary.objectives)
    return [hypervolume_table(summary), *front, *retention_tables(summary), *comparisons]


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
