"""Expected gain in hypervolume, exact for independent objectives. Numpy only.

What no point of the front dominates, up to the reference point, is cut into boxes; a map's gain is the sum over boxes of the
product over objectives of the length that it is expected to cover. A guess is taken as logistic: then
E[max(0, u - Y)] = s log(1 + exp((u - mean) / s)), with s = sqrt(3) / pi of its deviation.

Shapes: M points of the front, D objectives (1 to 3, all losses), B boxes, P maps that are guessed at.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import moocore
import numpy as np
from numpy.typing import NDArray

from .units import Row

LOGISTIC = np.sqrt(3) / np.pi
MOST_POINTS = 40
"""Points of a front in three objectives that boxes are made of: their number goes with the square."""


def front_rows(losses_MD: Row) -> NDArray[np.int64]:
    """Rows that no other dominates, of equal ones the first, by their first loss."""
    order = np.lexsort(losses_MD.T[::-1])
    if losses_MD.shape[1] == 1 or not len(order):
        return order[:1]
    kept: NDArray[np.int64] = order[moocore.is_nondominated(losses_MD[order], keep_weakly=False)]
    return kept


@dataclass(frozen=True)
class Boxes:
    """Boxes in which a new point improves the front: corners as places in each objective's bounds."""

    bounds: tuple[Row, ...]
    """Ascending, from minus infinity to the reference, one array an objective."""
    low_BD: NDArray[np.int64]
    high_BD: NDArray[np.int64]

    @classmethod
    def of(cls, losses_MD: Row, reference_D: Row) -> Boxes:
        """The boxes beyond a front's points, those outside the reference left out."""
        num_objectives = len(reference_D)
        inside = losses_MD[(losses_MD < reference_D).all(axis=1)]
        front = inside[front_rows(inside)] if len(inside) else inside
        if num_objectives == 3 and len(front) > MOST_POINTS:
            front = front[np.linspace(0, len(front) - 1, MOST_POINTS).astype(int)]
        bounds = tuple(
            np.concatenate([[-np.inf], np.unique(front[:, d]), [reference_D[d]]])
            for d in range(num_objectives)
        )
        places = np.stack(
            [np.searchsorted(bounds[d], front[:, d]) for d in range(num_objectives)], axis=1
        )
        tops = [len(bound) - 1 for bound in bounds]
        cut = {1: _cut_line, 2: _cut_plane, 3: _cut_space}[num_objectives]
        boxes = np.array(cut(places.tolist(), tops), dtype=np.int64).reshape(-1, 2, num_objectives)
        return cls(bounds, boxes[:, 0], boxes[:, 1])

    def gains(self, means_PD: Row, deviations_PD: Row) -> Row:
        """Expected gain in hypervolume of each map, [P]."""
        gains_PB = np.ones((len(means_PD), len(self.low_BD)))
        for d, bound in enumerate(self.bounds):
            covered = _covered(bound, means_PD[:, d], deviations_PD[:, d])
            gains_PB *= covered[:, self.high_BD[:, d]] - covered[:, self.low_BD[:, d]]
        gains: Row = gains_PB.sum(axis=1)
        return gains


def _covered(bound: Row, mean_P: Row, deviation_P: Row) -> Row:
    """E[max(0, u - Y)] for each bound u; 0 at minus infinity."""
    beyond = bound[None, 1:] - mean_P[:, None]
    scale = LOGISTIC * np.maximum(deviation_P, 1e-12)[:, None]
    covered = np.zeros((len(mean_P), len(bound)))
    covered[:, 1:] = scale * np.logaddexp(0, beyond / scale)
    return covered


Corner = list[int]
Box = tuple[Corner, Corner]


def _cut_line(points: list[Corner], tops: Corner) -> list[Box]:
    return [([0], [min((p[0] for p in points), default=tops[0])])]


def _cut_plane(points: list[Corner], tops: Corner) -> list[Box]:
    """Strips along the first objective; points need not be a front."""
    boxes: list[Box] = []
    left, height = 0, tops[1]
    for x, y in sorted(points):
        if y < height:
            if x > left:
                boxes.append(([left, 0], [x, height]))
            left, height = x, y
    boxes.append(([left, 0], [tops[0], height]))
    return boxes


def _cut_space(points: list[Corner], tops: Corner) -> list[Box]:
    """Slabs along the last objective, in each of them the strips of the points that lie below."""
    levels = [0, *sorted({p[2] for p in points}), tops[2]]
    boxes: list[Box] = []
    for low, high in pairwise(levels):
        below = [p[:2] for p in points if p[2] <= low]
        boxes += [([*a, low], [*b, high]) for a, b in _cut_plane(below, tops[:2])]
    return boxes
