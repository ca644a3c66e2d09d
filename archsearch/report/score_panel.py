"""One heat map of heads: layers from left to right, query heads from top to bottom by KV group.

A number a KV group is drawn as a strip under the heads. Legend: L layers, H query heads, G KV heads a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from .scales import Axis, colour, colour_axis, layer_step
from .score_records import Rows

INK, MUTED, BAND, LINE = "#1c2733", "#5d6b7a", ("#e3e7ec", "#f3f5f7"), "#8793a1"
LEFT, TOP = 30.0, 24.0
GROUP_GAP = 3.0
BAR, MIN_WIDTH = 150.0, 236.0
BAR_PIECES = 30


@dataclass(frozen=True)
class Panel:
    """What one heat map shows.

    values [L][H], one group of rows a KV head; text(layer, head) is what a head says on hover; groups [L][G] is the
    strip.
    """

    title: str
    values: Rows
    num_kv_heads: int
    text: Callable[[int, int], str]
    groups: Rows | None = None


def panel_size(panel: Panel, cell: float) -> tuple[float, float]:
    """Width and height in pixels of a panel whose heads are squares of `cell` pixels."""
    bars = 1 if panel.groups is None else 2
    width = LEFT + len(panel.values) * (cell + 1)
    return max(width, MIN_WIDTH), _axis_top(panel, cell) + 20 + bars * 28


def panel_svg(panel: Panel, cell: float) -> str:
    """The panel as an SVG group with its corner at the origin."""
    axis = colour_axis((v for row in panel.values for v in row), root=True)
    size = len(panel.values[0]) // panel.num_kv_heads
    parts = [
        f'<g class="panel"><text x="{LEFT:g}" y="13" font-size="12" font-weight="600" fill="{INK}">'
        f"{escape(panel.title)}</text>",
        _bands(panel, cell, size),
        *_cells(panel.values, "head", axis, cell, lambda h: _top(h, size, cell), panel.text),
    ]
    bottom = _axis_top(panel, cell)
    bars = [("heads", axis)]
    if panel.groups is not None:
        group_axis = colour_axis((v for row in panel.groups for v in row), root=True)
        parts += _strip(panel, panel.groups, group_axis, cell)
        bars.append(("KV groups", group_axis))
    for layer in range(0, len(panel.values), layer_step(len(panel.values))):
        x = LEFT + layer * (cell + 1) + cell / 2
        parts.append(_label(x, bottom + 9, str(layer), "middle"))
    for number, (name, scale) in enumerate(bars):
        parts.append(colour_bar(scale, LEFT, bottom + 18 + number * 28, name))
    return "".join([*parts, "</g>"])


def colour_bar(axis: Axis, x: float, y: float, name: str, width: float = BAR) -> str:
    """The colours of an axis with their values beneath, and what they are of beside."""
    piece = width / BAR_PIECES
    parts = [
        f'<rect x="{x + i * piece:.2f}" y="{y:g}" width="{piece + 0.3:.2f}" height="8" '
        f'fill="{colour((i + 0.5) / BAR_PIECES)}"/>'
        for i in range(BAR_PIECES)
    ]
    parts.append(_label(x + width + 6, y + 7.5, name, "start"))
    for share, text in _bar_labels(axis, apart=30 / width):
        at = x + share * width
        parts.append(f'<path d="M{at:.1f},{y + 8:g} v2.5" stroke="{MUTED}" stroke-width="0.8"/>')
        parts.append(_label(at, y + 18, text, "middle"))
    return f'<g class="bar">{"".join(parts)}</g>'


def _bar_labels(axis: Axis, apart: float) -> list[tuple[float, str]]:
    """Both ends of a bar as (share, text), and the ticks between that leave room for them."""
    labels = [(0.0, f"{axis.low:z.2g}")]
    for tick in axis.ticks:
        share = axis.pixel(tick)
        if labels[-1][0] + apart <= share <= 1 - apart:
            labels.append((share, axis.text(tick)))
    return [*labels, (1.0, f"{axis.high:.2g}")]


def cell_size(num_layers: int) -> float:
    """Pixels of a head, larger for models of few layers."""
    return min(18.0, max(7.0, 372 / num_layers - 1))


def _bands(panel: Panel, cell: float, size: int) -> str:
    """A labelled band beside each KV group, and a thin line between two of them."""
    right = LEFT + len(panel.values) * (cell + 1) - 1
    parts = []
    for group in range(panel.num_kv_heads):
        y, height = _top(group * size, size, cell), size * (cell + 1) - 1
        parts.append(_band(group, y, height))
        if group:
            line = y - (GROUP_GAP + 1) / 2
            parts.append(
                f'<path class="kv-line" d="M2,{line:g} H{right:g}" stroke="{LINE}" stroke-width="0.6"/>'
            )
    return "".join(parts)


def _band(group: int, y: float, height: float) -> str:
    label = _label(LEFT - 5, y + height / 2 + 2.8, f"kv{group}", "end")
    return (
        f'<rect class="band" x="2" y="{y:g}" width="{LEFT - 4:g}" height="{height:g}" '
        f'fill="{BAND[group % 2]}"/>{label}'
    )


def _strip(panel: Panel, groups: Rows, axis: Axis, cell: float) -> list[str]:
    top = _strip_top(panel, cell)

    def at(group: int) -> float:
        return top + group * (cell + 1)

    def text(layer: int, group: int) -> str:
        return f"layer {layer}, KV head {group}\nwhole group {groups[layer][group]:z.3g}"

    caption = (
        f'<text x="{LEFT:g}" y="{top - 4:g}" font-size="9.5" fill="{MUTED}">whole KV groups</text>'
    )
    bands = [_band(group, at(group), cell) for group in range(panel.num_kv_heads)]
    return [caption, *bands, *_cells(groups, "group", axis, cell, at, text)]


def _cells(
    values: Rows,
    kind: str,
    axis: Axis,
    cell: float,
    top: Callable[[int], float],
    text: Callable[[int, int], str],
) -> list[str]:
    return [
        f'<rect class="{kind}" x="{LEFT + layer * (cell + 1):g}" y="{top(row):g}" width="{cell:g}" '
        f'height="{cell:g}" fill="{colour(axis.pixel(value))}"><title>{escape(text(layer, row))}</title></rect>'
        for layer, column in enumerate(values)
        for row, value in enumerate(column)
    ]


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="8.5" text-anchor="{anchor}" fill="{MUTED}">'
        f"{escape(text)}</text>"
    )


def _top(head: int, group_size: int, cell: float) -> float:
    return TOP + head * (cell + 1) + (head // group_size) * GROUP_GAP


def _heads_bottom(panel: Panel, cell: float) -> float:
    heads = len(panel.values[0])
    return _top(heads - 1, heads // panel.num_kv_heads, cell) + cell


def _strip_top(panel: Panel, cell: float) -> float:
    return _heads_bottom(panel, cell) + 20


def _axis_top(panel: Panel, cell: float) -> float:
    """Where the numbers of the layers begin: under the strip, or under the heads where there is none."""
    if panel.groups is None:
        return _heads_bottom(panel, cell) + 2
    return _strip_top(panel, cell) + panel.num_kv_heads * (cell + 1) + 1
