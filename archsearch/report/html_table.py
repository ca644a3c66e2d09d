"""Tables as HTML."""

from __future__ import annotations

from html import escape

from .tables import Table

LONGEST = 30
"""Most rows of a table that is shown unasked."""


def table_html(table: Table) -> str:
    """A table under its title, with its note; nothing where it has no rows, folded away where it is long."""
    if not table.rows:
        return ""
    if len(table.rows) > LONGEST:
        return folded_html(table)
    return f"<h2>{escape(table.title)}</h2>{_rows(table)}"


def folded_html(table: Table) -> str:
    """A table that its title unfolds."""
    return f"<details><summary>{escape(table.title)}</summary>{_rows(table)}</details>"


def _rows(table: Table) -> str:
    # Long metric names may break after an underscore, so that they do not widen their column.
    names = (escape(column).replace("_", "_<wbr>") for column in table.columns)
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = []
    for r, row in enumerate(table.rows):
        cells = (
            f'<td class="strong">{escape(text)}</td>'
            if (r, i) in table.strong
            else f"<td>{escape(text)}</td>"
            for i, text in enumerate(row)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{note}"
    )
