"""A linear fit finds what is linear, and no map has a part in its own prediction."""

from __future__ import annotations

import numpy as np
import pytest

from archsearch.fidelity.agreement import spearman
from archsearch.fidelity.correction import held_out_predictions

RNG = np.random.default_rng(5)


def test_finds_what_two_features_say_together() -> None:
    features = RNG.normal(size=(24, 3))
    target = features[:, 0] - 0.8 * features[:, 1] + 0.05 * RNG.normal(size=24)
    assert spearman(features[:, 0], target) < 0.9
    assert spearman(held_out_predictions(features, target), target) > 0.97


def test_units_and_useless_columns_do_not_matter() -> None:
    features = RNG.normal(size=(20, 2))
    target = features @ [1.0, 0.5]
    plain = held_out_predictions(features, target)
    scaled = held_out_predictions(features * [1e6, 1e-6] + 3, target)
    np.testing.assert_allclose(plain, scaled, rtol=1e-6)
    constant = np.column_stack([features, np.full(20, 7.0)])
    np.testing.assert_allclose(held_out_predictions(constant, target), plain, rtol=1e-9)


def test_a_maps_own_result_has_no_part_in_its_prediction() -> None:
    features, target = RNG.normal(size=(15, 2)), RNG.normal(size=15)
    before = held_out_predictions(features, target)
    target[6] += 100
    after = held_out_predictions(features, target)
    assert after[6] == before[6]
    assert (np.delete(after, 6) != np.delete(before, 6)).all()


def test_more_features_than_maps_are_kept_in_check() -> None:
    features, target = RNG.normal(size=(10, 40)), RNG.normal(size=10)
    found = held_out_predictions(features, target)
    assert np.isfinite(found).all()
    assert np.abs(found - target.mean()).max() < 4 * target.std()


@pytest.mark.parametrize(
    ("features", "target"),
    [
        (np.zeros((5, 2)), np.zeros(5)),
        (np.zeros((8, 2)), np.zeros(7)),
        (np.zeros(8), np.zeros(8)),
        (np.full((8, 2), np.nan), np.zeros(8)),
        (np.zeros((8, 2)), np.full(8, np.inf)),
    ],
)
def test_what_cannot_be_fitted_is_refused(features: np.ndarray, target: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"allowed|not finite"):
        held_out_predictions(features, target)
