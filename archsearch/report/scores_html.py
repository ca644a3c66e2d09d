"""The part of the page on head scores: pictures, tables, and the other methods folded away."""

from __future__ import annotations

from .html_table import table_html
from .score_records import ScoreFiles
from .score_tables import score_tables
from .scores_svg import method_svg, scores_svg
from .similarity_svg import similarity_svg


def scores_html(files: ScoreFiles) -> list[str]:
    """The parts, in order; none where nothing was scored."""
    parts = []
    if files.causal is not None:
        parts.append(f'<h2>Head scores</h2><div class="plot">{scores_svg(files.causal)}</div>')
    parts += [table_html(table) for table in score_tables(files)]
    if files.others:
        panels = "".join(method_svg(scores) for scores in files.others)
        title = f"Head scores by {len(files.others)} other method{'s' * (len(files.others) > 1)}"
        parts.append(
            f'<details><summary>{title}</summary><div class="panels">{panels}</div></details>'
        )
    if files.similarity is not None:
        picture = similarity_svg(files.similarity)
        parts.append(f'<h2>How alike layers and heads are</h2><div class="plot">{picture}</div>')
    return parts
