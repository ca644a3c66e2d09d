"""Expected gains against brute force: hypervolumes with and without a point, and draws."""

from __future__ import annotations

import moocore
import numpy as np
import pytest

from archsearch.search.proposals.improvement import Boxes, front_rows
from archsearch.search.proposals.units import Row


def hypervolume(losses: Row, reference: Row) -> float:
    inside = losses[(losses < reference).all(axis=1)]
    if losses.shape[1] == 1:
        return float(max(0.0, reference[0] - losses.min(initial=reference[0])))
    return float(moocore.hypervolume(inside, ref=reference)) if len(inside) else 0.0


@pytest.mark.parametrize("num_objectives", [1, 2, 3])
@pytest.mark.parametrize("num_points", [0, 1, 12])
def test_a_certain_guess_gains_what_it_adds(num_objectives: int, num_points: int) -> None:
    rng = np.random.default_rng(num_objectives)
    # Some of them beyond the reference, some equal in an objective.
    front = np.round(rng.random((num_points, num_objectives)) * 1.2, 1)
    points = rng.random((30, num_objectives)) * 1.2 - 0.1
    reference = np.ones(num_objectives)
    gains = Boxes.of(front, reference).gains(points, np.zeros_like(points))
    before = hypervolume(front, reference)
    for point, gain in zip(points, gains, strict=True):
        added = hypervolume(np.vstack([front, point]), reference) - before
        assert gain == pytest.approx(added, abs=1e-9)


@pytest.mark.parametrize("num_objectives", [2, 3])
def test_an_uncertain_guess_gains_the_mean_over_draws(num_objectives: int) -> None:
    rng = np.random.default_rng(5)
    front, reference = rng.random((6, num_objectives)), np.ones(num_objectives)
    mean, deviation = np.full((1, num_objectives), 0.4), np.full((1, num_objectives), 0.2)
    deviation[0, -1] = 0
    boxes = Boxes.of(front, reference)
    draws = rng.logistic(mean, deviation * np.sqrt(3) / np.pi, (40_000, num_objectives))
    expected = boxes.gains(draws, np.zeros_like(draws)).mean()
    assert boxes.gains(mean, deviation)[0] == pytest.approx(expected, rel=0.05)


def test_front_rows_leave_out_what_is_dominated_or_repeated() -> None:
    losses = np.array([[2.0, 2.0], [1.0, 3.0], [1.0, 3.0], [3.0, 2.0], [0.5, 4.0]])
    assert front_rows(losses).tolist() == [4, 1, 0]
    assert front_rows(losses[:, :1]).tolist() == [4]


def test_a_long_front_in_three_objectives_is_thinned() -> None:
    rng = np.random.default_rng(0)
    sphere = np.abs(rng.standard_normal((400, 3)))
    sphere /= np.linalg.norm(sphere, axis=1, keepdims=True)
    boxes = Boxes.of(1.0 - sphere, np.ones(3))
    assert len(boxes.low_BD) < 2_000
