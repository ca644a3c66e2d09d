"""The picture of head scores: a heat map of the composite and one a capability, as one SVG element."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap

from .records import METHOD_TITLES
from .score_panel import MUTED, Panel, cell_size, panel_size, panel_svg
from .score_records import CapabilityScores, Rows, Scores

MAX_WIDTH = 980
GAP, MARGIN = 24.0, 8.0
NOTE = (
    "Layers run from left to right, query heads from top to bottom; those between two lines share a KV head. Darker "
    "heads need full attention more. Each panel has its own colours, by the square root of the score; negative "
    "scores look like zero."
)


def scores_svg(scores: Scores) -> str:
    """The composite with its KV groups, and a panel for each capability."""
    panels = [
        _capability_panel(scores, name, capability, rows)
        for name, capability in scores.capabilities.items()
        if (rows := capability.shown) is not None
    ]
    title = f"{METHOD_TITLES.get(scores.method, scores.method)} of every head"
    return _picture([_composite_panel(scores, "composite"), *panels], title, NOTE)


def method_svg(scores: Scores) -> str:
    """One panel: what one method says of every head and KV group."""
    title = METHOD_TITLES.get(scores.method, scores.method)
    return _picture([_composite_panel(scores, title)], f"{title} of every head")


def head_text(scores: Scores, layer: int, head: int) -> str:
    """A head in a few plain lines: where it is, its composite, and the evidence by capability."""
    lines = [
        _place(scores, layer, head),
        f"composite {value_text(scores.composite, scores.spread, layer, head)}",
    ]
    for name, capability in scores.capabilities.items():
        lines.append(f"{name}: {', '.join(_evidence(capability, layer, head))}")
    return "\n".join(lines)


def value_text(values: Rows, spread: Rows | None, layer: int, head: int) -> str:
    """A head's composite in 3 digits, with its standard error where it was measured."""
    text = f"{values[layer][head]:z.3g}"
    return text if spread is None else f"{text} ± {spread[layer][head]:.2g}"


def effect_text(values: Rows, spread: Rows | None, layer: int, head: int) -> str:
    """An effect on a head in 3 decimals: 1 is the whole difference between clean and corrupt."""
    text = f"{values[layer][head]:z.3f}"
    return text if spread is None else f"{text} ± {spread[layer][head]:.3f}"


def _evidence(capability: CapabilityScores, layer: int, head: int) -> list[str]:
    parts = {
        "score": (capability.score, None),
        "recv": (capability.recv, capability.recv_spread),
        "send": (capability.send, capability.send_spread),
        "consistency": (capability.consistency, None),
    }
    return [
        f"{name} {effect_text(rows, spread, layer, head)}"
        for name, (rows, spread) in parts.items()
        if rows is not None
    ]


def _capability_panel(scores: Scores, name: str, capability: CapabilityScores, rows: Rows) -> Panel:
    def text(layer: int, head: int) -> str:
        lines = [_place(scores, layer, head), name, *_evidence(capability, layer, head)]
        return "\n".join(lines)

    return Panel(name, rows, scores.num_kv_heads, text)


def _place(scores: Scores, layer: int, head: int) -> str:
    return f"layer {layer}, head {head}, KV head {scores.kv_head(head)}"


def _composite_panel(scores: Scores, title: str) -> Panel:
    def text(layer: int, head: int) -> str:
        return head_text(scores, layer, head)

    return Panel(title, scores.composite, scores.num_kv_heads, text, scores.groups)


def _picture(panels: Sequence[Panel], title: str, note: str = "") -> str:
    """The panels in as many columns as fit, each in the shortest so far, with the note under them."""
    cell = cell_size(len(panels[0].values))
    sizes = [panel_size(panel, cell) for panel in panels]
    step = max(width for width, _ in sizes) + GAP
    columns = max(1, min(len(panels), int((MAX_WIDTH + GAP) // step)))
    width, bottoms, parts = columns * step - GAP + 2 * MARGIN, [MARGIN] * columns, []
    for panel, (_, height) in zip(panels, sizes, strict=True):
        column = bottoms.index(min(bottoms))
        at = f"{MARGIN + column * step:g},{bottoms[column]:g}"
        parts.append(f'<g transform="translate({at})">{panel_svg(panel, cell)}</g>')
        bottoms[column] += height + MARGIN
    y = max(bottoms)
    for line in wrap(note, int(width / 5.7)):
        y += 12
        parts.append(f'<text x="10" y="{y - 4:g}" font-size="9.5" fill="{MUTED}">{line}</text>')
    height = y + (4 if note else 0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="scores" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" font-family="sans-serif">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>{"".join(parts)}</svg>'
    )
