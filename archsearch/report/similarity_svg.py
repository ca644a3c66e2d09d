"""The picture of how alike attention blocks and heads are: layers against layers, and the heads within each.

Legend: L layers, H query heads a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import fmean, quantiles
from textwrap import wrap

from .scales import Axis, colour, colour_axis, layer_step, make_axis
from .score_panel import INK, LINE, MUTED, colour_bar
from .score_records import Rows, Similarity

LEFT, TOP = 34.0, 42.0
PLOT_GAP, PLOT_WIDTH = 56.0, 400.0
GRID, SELF = "#e6e9ee", "#d5dae0"
HEADS, BLOCKS = "#2a6aa3", "#d9731a"
CLEARLY = 0.75
"""Heads count as less alike than layers where their mean is below this share of the layers'."""
MEASURES = {"cka": "linear CKA", "cosine": "cosine"}


def similarity_svg(similarity: Similarity) -> str:
    """Left: every two layers. Right, a row a layer: its heads, pair by pair, and the layer's neighbours."""
    layers = len(similarity.blocks)
    cell = min(30.0, max(4.0, 380 / layers))
    side = layers * cell
    plot = LEFT + max(side, 190.0) + PLOT_GAP
    spreads = head_spreads(similarity)
    width = plot + PLOT_WIDTH + 24 if spreads else plot
    lines = wrap(similarity_caption(similarity), int(width / 6.6))
    height = TOP + side + 58 + 14 * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="similarity" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" font-family="sans-serif" font-size="10">'
        "<title>How alike attention blocks and heads are</title>"
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        _heading(LEFT, "Attention blocks of two layers"),
        _blocks(similarity.blocks, cell),
    ]
    if spreads:
        parts += [
            _heading(plot, "Two heads of the same layer"),
            _plot(similarity.blocks, spreads, plot, cell),
        ]
    for number, line in enumerate(lines):
        y = TOP + side + 56 + 14 * number
        parts.append(f'<text x="10" y="{y:g}" font-size="11" fill="{INK}">{escape(line)}</text>')
    return "".join([*parts, "</svg>"])


def similarity_caption(similarity: Similarity) -> str:
    """What the picture says, in plain words."""
    near = _neighbours(similarity.blocks)
    measure = MEASURES.get(similarity.measure, similarity.measure)
    text = (
        "What attention blocks and heads add to the residual stream, compared"
        f"{f' by {measure}' if measure else ''}: 1 is the same, 0 nothing in common."
    )
    if near:
        text += f" Blocks of neighbouring layers have {_hundredths(fmean(near))} on average."
    pairs = [value for spread in head_spreads(similarity) for value in spread]
    if pairs:
        text += (
            f" Two heads of the same layer have {_hundredths(fmean(pairs))} on average"
            f" (from {_hundredths(min(pairs))} to {_hundredths(max(pairs))})."
        )
    if pairs and near and fmean(pairs) < CLEARLY * fmean(near):
        text += (
            " Heads within a layer differ more than neighbouring layers do, which speaks for choosing head by"
            " head; in part it is that a block is a sum over its heads, and sums are more alike than what they sum."
        )
    return text


def head_spreads(similarity: Similarity) -> list[list[float]]:
    """For each layer the similarity of every two of its heads; empty where heads come alone or unmeasured."""
    tables = similarity.heads or []
    found = [
        [table[a][b] for a in range(len(table)) for b in range(a + 1, len(table))]
        for table in tables
    ]
    return found if all(found) else []


def _neighbours(blocks: Rows) -> list[float]:
    """The similarity of each layer and the next."""
    return [blocks[layer][layer + 1] for layer in range(len(blocks) - 1)]


def _hundredths(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"  # Adding zero turns -0.00 into 0.00.


def _blocks(blocks: Rows, cell: float) -> str:
    """The heat map of L x L, with the numbers of the layers and the bar of colours."""
    others = [v for a, row in enumerate(blocks) for b, v in enumerate(row) if a != b]
    axis = colour_axis(others, root=False)
    parts = []
    for a, row in enumerate(blocks):
        for b, value in enumerate(row):
            fill = SELF if a == b else colour(axis.pixel(value))
            parts.append(
                f'<rect class="pair" x="{LEFT + b * cell:.2f}" y="{TOP + a * cell:.2f}" '
                f'width="{cell + 0.2:.2f}" height="{cell + 0.2:.2f}" fill="{fill}">'
                f"<title>layers {a} and {b}: {value:.3f}</title></rect>"
            )
    bottom = TOP + len(blocks) * cell
    for layer in range(0, len(blocks), layer_step(len(blocks))):
        at = (layer + 0.5) * cell
        parts.append(_label(LEFT + at, bottom + 11, str(layer), "middle"))
        parts.append(_label(LEFT - 5, TOP + at + 3, str(layer), "end"))
    return "".join([*parts, colour_bar(axis, LEFT, bottom + 18, "similarity")])


def _plot(blocks: Rows, spreads: Sequence[Sequence[float]], left: float, cell: float) -> str:
    """A row a layer, level with the heat map's: the pairs of heads, and the layer's neighbours beside them."""
    near = _neighbours(blocks)
    values = [value for spread in spreads for value in spread] + near
    axis = make_axis("similarity", [*values, 0.0, 1.0], left, left + PLOT_WIDTH)
    bottom = TOP + len(blocks) * cell
    parts = [_grid(axis, bottom)]
    for layer, spread in enumerate(spreads):
        y = TOP + (layer + 0.5) * cell
        parts.append(_spread(layer, spread, axis, y, min(6.0, cell * 0.45)))
        if layer % layer_step(len(blocks)) == 0:
            parts.append(_label(left - 8, y + 3, str(layer), "end"))
        beside = near[max(layer - 1, 0) : layer + 1]
        if beside:
            x, r = axis.pixel(fmean(beside)), min(4.0, cell * 0.3)
            parts.append(
                f'<path class="block" d="M{x:.1f},{y - r:.2f} l{r:g},{r:g} l{-r:g},{r:g} l{-r:g},{-r:g} Z" '
                f'fill="{BLOCKS}"><title>layer {layer} and its neighbours: {fmean(beside):.3f}</title></path>'
            )
    return "".join([*parts, _legend(left, bottom + 30)])


def _spread(layer: int, spread: Sequence[float], axis: Axis, y: float, thick: float) -> str:
    """Least to largest as a thin line, the middle half as a thick one, the mean as a white dot."""
    low, high, mean = min(spread), max(spread), fmean(spread)
    quarters = quantiles(spread, method="inclusive") if len(spread) > 1 else [mean] * 3
    first, third = quarters[0], quarters[-1]
    xs = [axis.pixel(value) for value in (low, high, first, third, mean)]
    text = (
        f"layer {layer}: two heads have {mean:.3f} on average, "
        f"from {low:.3f} to {high:.3f}, half of them from {first:.3f} to {third:.3f}"
    )
    return (
        f'<g class="spread"><title>{text}</title>'
        f'<path d="M{xs[0]:.1f},{y:.2f} H{xs[1]:.1f}" stroke="{HEADS}" stroke-width="1.2"/>'
        f'<path d="M{xs[2]:.1f},{y:.2f} H{xs[3]:.1f}" stroke="{HEADS}" stroke-width="{thick:.2f}"/>'
        f'<circle cx="{xs[4]:.1f}" cy="{y:.2f}" r="{thick / 3:.2f}" fill="#fff" '
        f'stroke="{HEADS}" stroke-width="0.8"/></g>'
    )


def _grid(axis: Axis, bottom: float) -> str:
    parts = []
    for tick in axis.ticks:
        x = axis.pixel(tick)
        parts.append(f'<path d="M{x:.1f},{TOP:g} V{bottom:g}" stroke="{GRID}"/>')
        parts.append(_label(x, bottom + 11, axis.text(tick), "middle"))
    line = f'<path d="M{axis.start:g},{TOP:g} V{bottom:g} H{axis.stop:g}" stroke="{LINE}" fill="none"/>'
    return "".join([*parts, line])


def _legend(x: float, y: float) -> str:
    return (
        f'<path d="M{x:g},{y - 3:g} h26" stroke="{HEADS}" stroke-width="1.2"/>'
        f'<path d="M{x + 7:g},{y - 3:g} h12" stroke="{HEADS}" stroke-width="6"/>'
        f'<circle cx="{x + 13:g}" cy="{y - 3:g}" r="2" fill="#fff" stroke="{HEADS}" stroke-width="0.8"/>'
        + _label(x + 32, y, "two heads: range, middle half, mean", "start")
        + f'<path d="M{x + 264:g},{y - 7:g} l4,4 l-4,4 l-4,-4 Z" fill="{BLOCKS}"/>'
        + _label(x + 274, y, "neighbouring layers", "start")
    )


def _heading(x: float, text: str) -> str:
    return f'<text x="{x:g}" y="22" font-size="12" font-weight="600" fill="{INK}">{text}</text>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{MUTED}">{escape(text)}</text>'
    )
