"""The report as one static page: no network, nothing to serve, everything inside the file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from itertools import combinations
from typing import Any

from .fidelity_tables import fidelity_tables
from .headmap_svg import COLOURS, OUTLINE, headmap_svg, legend_svg
from .html_table import folded_html, table_html
from .pareto_svg import pareto_svg
from .records import COST_METRICS, Candidate, Objective, Rung, RunSummary, quantity
from .retention_table import retention_tables
from .scores_html import scores_html
from .tables import (
    after,
    cache_table,
    candidate_tables,
    constraint_line,
    failure_table,
    hypervolume_table,
    pruned_table,
    share_table,
    split_metrics,
    stage_table,
)


def html_report(summary: RunSummary) -> str:
    """The page of a run: key figures, Pareto plots, the front's head maps, comparisons, head scores, all candidates."""
    body = [
        f"<h1>{escape(summary.name)}</h1>",
        f'<p class="lead">{escape(_lead(summary))}</p>',
        *(_result(summary) if summary.rungs else []),
        *(table_html(table) for table in fidelity_tables(summary.fidelity)),
        *scores_html(summary.scores),
        *(_earlier_plots(summary, rung) for rung in reversed(summary.rungs[:-1])),
        table_html(failure_table(summary)),
        table_html(pruned_table(summary)),
        table_html(stage_table(summary)),
        *(_all_candidates(summary, rung) for rung in reversed(summary.rungs)),
        '<div id="tip" role="status"></div>',
        f'<script type="application/json" id="candidates">{_data(summary.rungs)}</script>',
        f"<script>{_asset('page.js')}</script>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(summary.name)}: search report</title><style>{_asset('page.css')}</style>"
        f"</head><body><main>{''.join(part for part in body if part)}</main></body></html>\n"
    )


def plot_axes(objectives: tuple[Objective, ...]) -> list[tuple[Objective, Objective]]:
    """The (x, y) of each plot: all pairs of objectives, costs to the right of qualities."""
    pairs = []
    for first, second in combinations(objectives, 2):
        swap = second.metric in COST_METRICS and first.metric not in COST_METRICS
        pairs.append((second, first) if swap else (first, second))
    if not pairs:
        pairs.append((Objective("cache_bytes", minimize=True), objectives[0]))
    return pairs


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _result(summary: RunSummary) -> list[str]:
    """What the search came to: its last rung first."""
    rung = summary.last
    alarm = f'<p class="alarm">{escape(constraint_line(summary))}</p>'
    return [
        alarm * bool(summary.unmet),
        _tiles(summary, rung),
        *(_plot(rung, x, y) for x, y in plot_axes(summary.objectives)),
        _front(summary, rung),
        *(table_html(table) for table in retention_tables(summary)),
        table_html(hypervolume_table(summary)),
        *(_comparisons(summary, r) for r in reversed(summary.rungs)),
    ]


def _lead(summary: RunSummary) -> str:
    source = summary.config.get("teacher", {}).get("source", "")
    if not summary.rungs:
        return f"{source}: heads are scored; no candidate has been evaluated yet."
    rung = summary.last
    counts = {
        group: sum(c.group == group for c in rung.candidates)
        for group in ("search", "seed", "random")
    }
    goals = ", ".join(
        f"{'smallest' if o.minimize else 'largest'} {o.metric}" for o in summary.objectives
    )
    return (
        f"{source}: {counts['search']} maps found by the search, {counts['seed']} seeds and "
        f"{counts['random']} of the random control, {after(rung)}; objectives: {goals}."
        + ("" if summary.unmet else f" {constraint_line(summary)}")
    )


def _tiles(summary: RunSummary, rung: Rung) -> str:
    own = sum(c.group == "search" for c in rung.front)
    tiles = [
        (f"{len(rung.front)}", "points on the front"),
        (f"{own}", "of them supplied by no seed"),
    ]
    names = {
        "front": "hypervolume of the front",
        "seeds": "of the seeds alone",
        "random": "of random",
    }
    tiles += [
        (f"{rung.hypervolume[key]:.4f}", name)
        for key, name in names.items()
        if rung.hypervolume.get(key) is not None
    ]
    cells = (f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for value, name in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _plot(rung: Rung, x: Objective, y: Objective) -> str:
    return f'<div class="plot">{pareto_svg(rung.candidates, x, y)}</div>'


def _earlier_plots(summary: RunSummary, rung: Rung) -> str:
    plots = "".join(_plot(rung, x, y) for x, y in plot_axes(summary.objectives))
    return f"<h2>All candidates {after(rung)}</h2>{plots}"


def _comparisons(summary: RunSummary, rung: Rung) -> str:
    return table_html(share_table(summary, rung)) + table_html(cache_table(summary, rung))


def _all_candidates(summary: RunSummary, rung: Rung) -> str:
    title = f"Metrics of all candidates {after(rung)}"
    tables = candidate_tables(rung.candidates, title, summary.objectives)
    return "".join(folded_html(table) for table in tables)


def _front(summary: RunSummary, rung: Rung) -> str:
    if not rung.front:
        return ""
    main, others = split_metrics(rung.front, summary.objectives)
    cards = "".join(_card(c, main, others) for c in rung.front)
    return (
        "<h2>The front</h2>"
        f"<div>{legend_svg(rung.front[len(rung.front) // 2].head_map)}</div>"
        '<p class="note">Layers run from left to right, query heads from top to bottom by KV head. '
        "Export one with <code>archsearch export RUN --candidate N --to DIR</code>.</p>"
        f'<div class="cards">{cards}</div>'
    )


def _card(c: Candidate, main: Sequence[str], others: Sequence[str]) -> str:
    """A point of the front: its label, main metrics and map; the other metrics show on hover."""
    badge = '<span class="badge">new</span>' if c.group == "search" else ""
    metrics = " · ".join(
        f"{escape(name)} <b>{escape(c.shown(name))}</b>" for name in main if name in c.metrics
    )
    rest = "\n".join(f"{m} {c.shown(m)}" for m in others if m in c.metrics)
    title = f' title="{escape(rest)}"' if rest else ""
    number, _, source = c.label.partition(" ")
    return (
        f'<div class="card" id="card-{c.key}"><h3>{number} <span class="from">{escape(source)}</span>'
        f"{badge}</h3><p{title}>{metrics}</p>{headmap_svg(c.head_map, cell=_cell_size(c))}</div>"
    )


def _cell_size(c: Candidate) -> float:
    """Pixels of a head in a card, larger for models of few layers."""
    return min(18.0, max(9.0, 360 / c.head_map.model.num_layers - 2))


def _data(rungs: Sequence[Rung]) -> str:
    """The candidates for the page's script, safe inside a script element."""
    points: dict[str, Any] = {
        c.key: {
            "label": c.label,
            "metrics": [[name, quantity(name, value)] for name, value in c.metrics.items()],
            "layers": list(c.head_map.layers),
        }
        for rung in rungs
        for c in rung.candidates
    }
    sizes = {c.head_map.model.group_size for rung in rungs for c in rung.candidates} or {1}
    data = {
        "groupSize": sizes.pop(),
        "colours": {op.value: colour for op, colour in COLOURS.items()},
        "outline": OUTLINE,
        "points": points,
    }
    return json.dumps(data).replace("</", "<\\/")
