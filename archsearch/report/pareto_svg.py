"""The Pareto plot: search points, seeds by method, the random control and the front, as one SVG element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .records import METHOD_TITLES, OUTSIDE, Candidate, Objective, metric_title, quantity
from .scales import Axis, make_axis

WIDTH, HEIGHT = 1010, 480
LEFT, RIGHT, TOP, BOTTOM = 78, 712, 18, 426
INK, GRID, MUTED = "#1c2733", "#e6e9ee", "#5d6b7a"
FRONT = "#c0392b"


@dataclass(frozen=True)
class Mark:
    """How the points of one method look: a shape around (0, 0) of about radius 5, and its colour."""

    shape: str
    colour: str
    opacity: float = 1.0


CIRCLE = "M-4,0 a4,4 0 1,0 8,0 a4,4 0 1,0 -8,0 Z"
SMALL_CIRCLE = "M-3.2,0 a3.2,3.2 0 1,0 6.4,0 a3.2,3.2 0 1,0 -6.4,0 Z"
SQUARE = "M-4.4,-4.4 H4.4 V4.4 H-4.4 Z"
DIAMOND = "M0,-6 L6,0 L0,6 L-6,0 Z"
UP = "M0,-6 L5.6,4.4 L-5.6,4.4 Z"
DOWN = "M0,6 L5.6,-4.4 L-5.6,-4.4 Z"
RIGHTWARD = "M6,0 L-4.4,5.6 L-4.4,-5.6 Z"
CROSS = "M-5,-3 L-3,-5 L0,-2 L3,-5 L5,-3 L2,0 L5,3 L3,5 L0,2 L-3,5 L-5,3 L-2,0 Z"
PLUS = "M-1.7,-5.6 H1.7 V-1.7 H5.6 V1.7 H1.7 V5.6 H-1.7 V1.7 H-5.6 V-1.7 H-1.7 Z"

LEFTWARD = "M-6,0 L4.4,5.6 L4.4,-5.6 Z"
PENTAGON = "M0,-5.8 L5.5,-1.8 L3.4,4.7 H-3.4 L-5.5,-1.8 Z"
HEXAGON = "M-2.9,-5 H2.9 L5.8,0 L2.9,5 H-2.9 L-5.8,0 Z"
STAR = "M0,-6.4 L1.8,-1.8 L6.4,0 L1.8,1.8 L0,6.4 L-1.8,1.8 L-6.4,0 L-1.8,-1.8 Z"
TALL = "M0,-6.4 L3.6,0 L0,6.4 L-3.6,0 Z"
BAR = "M-6,-2.6 H6 V2.6 H-6 Z"
POST = "M-2.6,-6 H2.6 V6 H-2.6 Z"
ARCH = "M-5,-5 H5 V5 H1.8 V0 H-1.8 V5 H-5 Z"
HOLE = " M-1.8,0 a1.8,1.8 0 1,0 3.6,0 a1.8,1.8 0 1,0 -3.6,0 Z"
"""Added to a method's shape where it keeps whole KV groups."""

MARKS = {
    "random-control": Mark(SMALL_CIRCLE, "#b7bfc9", 0.85),
    "search": Mark(CIRCLE, "#2f74c0", 0.8),
    "all_full": Mark(SQUARE, "#1c2733"),
    "all_gdn": Mark(PLUS, "#1c2733"),
    "causal": Mark(UP, "#d9731a"),
    "causal_per_layer": Mark(DOWN, "#e0a800"),
    "causal_per_layer_groups": Mark(DOWN + HOLE, "#e0a800"),
    "causal_groups": Mark(UP + HOLE, "#d9731a"),
    "attribution": Mark(PENTAGON, "#a3324f"),
    "attribution_groups": Mark(PENTAGON + HOLE, "#a3324f"),
    "retrieval_heads": Mark(HEXAGON, "#c2408f"),
    "retrieval_heads_groups": Mark(HEXAGON + HOLE, "#c2408f"),
    "duo_gates": Mark(STAR, "#5b4bb7"),
    "replacement_kl": Mark(DIAMOND, "#1b8a6b"),
    "replacement_kl_groups": Mark(DIAMOND + HOLE, "#1b8a6b"),
    "replacement_nll": Mark(TALL, "#12a5a0"),
    "replacement_nll_groups": Mark(TALL + HOLE, "#12a5a0"),
    "leave_one_in": Mark(LEFTWARD, "#8a5a2b"),
    "leave_one_in_groups": Mark(LEFTWARD + HOLE, "#8a5a2b"),
    "restoration": Mark(BAR, "#a77fd0"),
    "blend": Mark(RIGHTWARD, "#7aa61b"),
    "blend_groups": Mark(RIGHTWARD + HOLE, "#7aa61b"),
    "program": Mark(POST, "#2a5d8f"),
    "program_groups": Mark(POST + HOLE, "#2a5d8f"),
    "program_bytes": Mark(ARCH, "#2a5d8f"),
    "program_both": Mark(POST, "#8f2a6b"),
    "program_both_groups": Mark(POST + HOLE, "#8f2a6b"),
    "program_both_bytes": Mark(ARCH, "#8f2a6b"),
    "even_layers": Mark(SQUARE, "#7d5ba6"),
    "random": Mark(CROSS, "#6c757d"),
    "random_groups": Mark(CROSS + HOLE, "#6c757d"),
}


def pareto_svg(
    candidates: Sequence[Candidate], x: Objective, y: Objective, *, titles: bool = False
) -> str:
    """Objective y over objective x. With titles, each point carries its text for a plain SVG viewer.

    Points hold their key in data-key for the page's script.
    """
    shown = [c for c in candidates if x.metric in c.metrics and y.metric in c.metrics]
    x_axis = make_axis(x.metric, (c.metrics[x.metric] for c in shown), LEFT, RIGHT)
    y_axis = make_axis(y.metric, (c.metrics[y.metric] for c in shown), BOTTOM, TOP)
    order = sorted(shown, key=lambda c: (c.on_front, list(MARKS).index(_known(c.method))))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pareto" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _grid(x, x_axis, y, y_axis),
        _front_line(shown, x, x_axis, y, y_axis),
        *(_point(c, x, x_axis, y, y_axis, titles=titles) for c in order),
        _legend(shown),
        "</svg>",
    ]
    return "".join(parts)


def _known(method: str) -> str:
    return method if method in MARKS else "search"


def _grid(x: Objective, x_axis: Axis, y: Objective, y_axis: Axis) -> str:
    parts = []
    for tick in x_axis.ticks:
        at = x_axis.pixel(tick)
        parts.append(f'<path d="M{at:.1f},{TOP} V{BOTTOM}" stroke="{GRID}"/>')
        parts.append(
            f'<text x="{at:.1f}" y="{BOTTOM + 18}" text-anchor="middle" fill="{MUTED}">'
            f"{x_axis.text(tick)}</text>"
        )
    for tick in y_axis.ticks:
        at = y_axis.pixel(tick)
        parts.append(f'<path d="M{LEFT},{at:.1f} H{RIGHT}" stroke="{GRID}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="{MUTED}">'
            f"{y_axis.text(tick)}</text>"
        )
    middle = (TOP + BOTTOM) / 2
    parts.append(f'<path d="M{LEFT},{TOP} V{BOTTOM} H{RIGHT}" stroke="{MUTED}" fill="none"/>')
    parts.append(
        f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{_title(x, x_axis, "→", "←")}'
        f'</text><text transform="translate(18,{middle}) rotate(-90)" text-anchor="middle">'
        f"{_title(y, y_axis, '→', '←')}</text>"
    )
    return "".join(parts)


def _title(objective: Objective, axis: Axis, rising: str, falling: str) -> str:
    name = metric_title(objective.metric)
    scale = ", square-root scale" if axis.root else ""
    better = f"{falling} better" if objective.minimize else f"better {rising}"
    return escape(f"{name}{scale}   {better}")


def _front_line(
    shown: Sequence[Candidate], x: Objective, x_axis: Axis, y: Objective, y_axis: Axis
) -> str:
    """The staircase of the points that these two objectives alone leave undominated."""
    front = _pairwise_front([c for c in shown if c.on_front], x, y)
    if len(front) < 2:
        return ""
    pixels = [(x_axis.pixel(c.metrics[x.metric]), y_axis.pixel(c.metrics[y.metric])) for c in front]
    path = f"M{pixels[0][0]:.1f},{pixels[0][1]:.1f}"
    for px, py in pixels[1:]:
        path += f" H{px:.1f} V{py:.1f}" if x.minimize else f" V{py:.1f} H{px:.1f}"
    return f'<path d="{path}" fill="none" stroke="{FRONT}" stroke-width="1.6" opacity="0.75"/>'


def _pairwise_front(front: Sequence[Candidate], x: Objective, y: Objective) -> list[Candidate]:
    def dominated(c: Candidate) -> bool:
        return any(
            not x.better(c.metrics[x.metric], d.metrics[x.metric])
            and not y.better(c.metrics[y.metric], d.metrics[y.metric])
            and (
                x.better(d.metrics[x.metric], c.metrics[x.metric])
                or y.better(d.metrics[y.metric], c.metrics[y.metric])
            )
            for d in front
        )

    return sorted((c for c in front if not dominated(c)), key=lambda c: c.metrics[x.metric])


def _point(
    c: Candidate, x: Objective, x_axis: Axis, y: Objective, y_axis: Axis, *, titles: bool
) -> str:
    mark = MARKS[_known(c.method)]
    at = f"{x_axis.pixel(c.metrics[x.metric]):.1f},{y_axis.pixel(c.metrics[y.metric]):.1f}"
    edge = (
        f'stroke="{FRONT}" stroke-width="2"' if c.on_front else 'stroke="#fff" stroke-width="0.7"'
    )
    opacity = 1.0 if c.on_front else mark.opacity
    if not c.feasible:
        # Transparent, so that the pointer still finds it.
        edge, opacity = f'stroke="{mark.colour}" stroke-width="1.2"', 0.0
    text = f"<title>{escape(point_text(c))}</title>" if titles else ""
    focus = ' tabindex="0"' if c.on_front else ""
    return (
        f'<path class="point" data-key="{c.key}"{focus} fill-rule="evenodd" '
        f'd="{mark.shape}" transform="translate({at})" fill="{mark.colour}" '
        f'fill-opacity="{opacity:g}" {edge}>{text}</path>'
    )


def point_text(c: Candidate) -> str:
    """A candidate in a few plain lines: label, metrics, map."""
    metrics = "  ".join(f"{name} {quantity(name, value)}" for name, value in c.metrics.items())
    return f"{c.label}\n{metrics}\n{'/'.join(c.head_map.layers)}"


def _legend(candidates: Sequence[Candidate]) -> str:
    methods = {_known(c.method) for c in candidates}
    x, y, parts = RIGHT + 28, TOP + 12.0, []
    if any(c.on_front for c in candidates):
        parts.append(
            f'<path d="M{x - 8},{y} H{x + 8}" stroke="{FRONT}" stroke-width="1.6"/>'
            f'<path d="{CIRCLE}" transform="translate({x},{y})" fill="#fff" stroke="{FRONT}" '
            f'stroke-width="2"/><text x="{x + 16}" y="{y + 4}">on the front</text>'
        )
        y += 26
    if not all(c.feasible for c in candidates):
        parts.append(
            f'<path d="{CIRCLE}" transform="translate({x},{y})" fill="none" stroke="{MUTED}" '
            f'stroke-width="1.2"/><text x="{x + 16}" y="{y + 4}">hollow: {OUTSIDE}</text>'
        )
        y += 26
    order = [
        "search",
        *[m for m in MARKS if m not in ("search", "random-control")],
        "random-control",
    ]
    shown = [method for method in order if method in methods]
    step = min(22.0, (BOTTOM - y) / max(len(shown), 1))
    for method in shown:
        mark = MARKS[method]
        parts.append(
            f'<path d="{mark.shape}" transform="translate({x},{y:g})" fill="{mark.colour}" fill-rule="evenodd" '
            f'fill-opacity="{mark.opacity:g}"/><text x="{x + 16}" y="{y + 4:g}">'
            f"{METHOD_TITLES[method]}</text>"
        )
        y += step
    return "".join(parts)
