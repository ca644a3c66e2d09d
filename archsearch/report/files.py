"""Writes a report's files into the run directory."""

from __future__ import annotations

from pathlib import Path

from ..rundir import RunDir
from .headmap_svg import headmap_svg
from .html import html_report, plot_axes
from .markdown import markdown_report
from .pareto_svg import pareto_svg
from .records import RunSummary
from .scores_svg import scores_svg
from .similarity_svg import similarity_svg
from .summary import read_summary

FOLDER = "report"


def write_report(run_dir: RunDir) -> Path:
    """Writes report/index.html, summary.md and the pictures of what there is: the Pareto plots and a picture of each
    front map, scores.svg, similarity.svg.

    Returns the page's path.
    """
    summary = read_summary(run_dir)
    if summary.rungs:
        _write_search(run_dir, summary)
    scores = summary.scores
    if scores.causal is not None:
        run_dir.write_text(f"{FOLDER}/scores.svg", scores_svg(scores.causal))
    if scores.similarity is not None:
        run_dir.write_text(f"{FOLDER}/similarity.svg", similarity_svg(scores.similarity))
    run_dir.write_text(f"{FOLDER}/summary.md", markdown_report(summary))
    return run_dir.write_text(f"{FOLDER}/index.html", html_report(summary))


def _write_search(run_dir: RunDir, summary: RunSummary) -> None:
    for number, (x, y) in enumerate(plot_axes(summary.objectives)):
        name = "pareto.svg" if number == 0 else f"pareto-{number + 1}.svg"
        plot = pareto_svg(summary.last.candidates, x, y, titles=True)
        run_dir.write_text(f"{FOLDER}/{name}", plot)
    for old in (run_dir / FOLDER / "headmaps").glob("*.svg"):
        old.unlink()
    for c in summary.last.front:
        run_dir.write_text(f"{FOLDER}/headmaps/{c.candidate}.svg", headmap_svg(c.head_map))
