"""The picture of a head map: layers from left to right, query heads from top to bottom by KV group."""

from __future__ import annotations

from ..headmap import HeadMap, Operator
from .scales import layer_step

COLOURS = {Operator.FULL: "#1d4f8b", Operator.GDN: "#f0c36d", Operator.NHA: "#2a9d8f"}
NAMES = {
    Operator.FULL: "full attention",
    Operator.GDN: "Gated DeltaNet",
    Operator.NHA: "native hybrid attention",
}
OUTLINE = "#0b1f38"
MARGIN_LEFT, MARGIN_TOP = 22.0, 4.0
GROUP_GAP = 4.0


def headmap_svg(head_map: HeadMap, *, cell: float = 10.0) -> str:
    """The map as an SVG element. A KV head that must be cached in full is outlined around its group."""
    shape = head_map.model
    column = cell + 2
    height = MARGIN_TOP + shape.num_heads * cell + (shape.num_kv_heads - 1) * GROUP_GAP + 16
    width = MARGIN_LEFT + shape.num_layers * column + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="headmap" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" font-family="sans-serif" font-size="8">'
        f"<title>{_caption(head_map)}</title>"
    ]
    for group in range(shape.num_kv_heads):
        middle = _top(head_map, group * shape.group_size, cell) + shape.group_size * cell / 2 + 3
        parts.append(f'<text x="2" y="{middle:g}" fill="#667">kv{group}</text>')
    for layer in range(shape.num_layers):
        parts.append(_layer(head_map, layer, MARGIN_LEFT + layer * column, cell))
        if layer % layer_step(shape.num_layers) == 0:
            x = MARGIN_LEFT + layer * column + cell / 2
            label = f'<text x="{x:g}" y="{height - 4:g}" text-anchor="middle" fill="#667">{layer}</text>'
            parts.append(label)
    return "".join([*parts, "</svg>"])


def legend_svg(head_map: HeadMap | None = None) -> str:
    """Swatches of the operators that occur (all, without a map) and of a cached KV head."""
    letters = set("".join(head_map.layers)) if head_map else {op.value for op in Operator}
    x, parts = 0.0, []
    for operator, name in NAMES.items():
        if operator.value not in letters:
            continue
        parts.append(f'<rect x="{x:g}" y="2" width="12" height="12" fill="{COLOURS[operator]}"/>')
        parts.append(f'<text x="{x + 17:g}" y="12">{name}</text>')
        x += 34 + 6.4 * len(name)
    parts.append(
        f'<rect x="{x + 1:g}" y="2" width="11" height="11" fill="none" stroke="{OUTLINE}" '
        f'stroke-width="1.6"/><text x="{x + 18:g}" y="12">KV head cached in full</text>'
    )
    width = x + 160
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="16" '
        f'viewBox="0 0 {width:g} 16" font-family="sans-serif" font-size="11.5" fill="#334">'
        + "".join(parts)
        + "</svg>"
    )


def _layer(head_map: HeadMap, layer: int, x: float, cell: float) -> str:
    size = head_map.model.group_size
    parts = []
    for head, letter in enumerate(head_map.layers[layer]):
        y = _top(head_map, head, cell)
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{cell:g}" height="{cell - 1:g}" '
            f'fill="{COLOURS[Operator(letter)]}"/>'
        )
    for group in head_map.kv_heads(layer, Operator.FULL):
        y = _top(head_map, group * size, cell)
        parts.append(
            f'<rect x="{x - 0.5:g}" y="{y - 0.8:g}" width="{cell + 1:g}" '
            f'height="{size * cell + 0.6:g}" fill="none" stroke="{OUTLINE}" stroke-width="1.4"/>'
        )
    return "".join(parts)


def _top(head_map: HeadMap, head: int, cell: float) -> float:
    return MARGIN_TOP + head * cell + (head // head_map.model.group_size) * GROUP_GAP


def _caption(head_map: HeadMap) -> str:
    full = len(head_map.full_heads())
    return f"{full} of {head_map.model.total_heads} heads keep full attention"
