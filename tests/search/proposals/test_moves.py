"""Moves: what they keep, and that they follow what is known of the units."""

from __future__ import annotations

import numpy as np
import pytest

from archsearch.search.proposals.moves import build, change, cross, mutate
from archsearch.search.proposals.units import Bits, Units
from tests.search.proposals.damage import SHAPE


def some_bits(units: Units, count: int, seed: int = 0) -> Bits:
    rng = np.random.default_rng(seed)
    bits: Bits = rng.random((count, units.count)) < rng.random((count, 1))
    return bits


@pytest.fixture(params=[False, True], ids=["free", "groups"])
def units(request: pytest.FixtureRequest) -> Units:
    return Units(SHAPE, whole_groups=request.param)


def test_change_drops_the_least_and_adds_the_most_needed() -> None:
    full = np.array([[True, True, False, False], [True, False, False, False]])
    keys = np.array([[3.0, 1.0, 2.0, 5.0], [1.0, 2.0, 3.0, 4.0]])
    changed = change(full, keys, np.array([1, 5]), np.array([1, 0]))
    assert changed.tolist() == [[True, False, False, True], [False, False, False, False]]


def test_mutations_are_many_small_and_need_not_keep_the_number(units: Units) -> None:
    parents = some_bits(units, 300)
    effects = np.random.default_rng(1).random(parents.shape)
    children = mutate(units, parents, effects, np.random.default_rng(2))
    moved = (parents ^ children).sum(axis=1)
    assert (moved > 0).mean() > 0.6
    assert np.median(moved) <= 0.15 * units.count
    sizes = children.sum(axis=1) - parents.sum(axis=1)
    assert (sizes > 0).any()
    assert (sizes < 0).any()
    assert ((sizes == 0) & (moved > 0)).any()


def test_needed_units_are_dropped_less_often(units: Units) -> None:
    parents = np.ones((500, units.count), dtype=np.bool_)
    effects = np.tile(np.arange(units.count, dtype=np.float64), (500, 1))
    dropped = ~mutate(units, parents, effects, np.random.default_rng(0))
    half = units.count // 2
    assert dropped[:, :half].sum() > 2 * dropped[:, half:].sum()


def test_crossover_takes_one_block_of_layers(units: Units) -> None:
    first = np.zeros((200, units.count), dtype=np.bool_)
    children = cross(units, first, ~first, np.random.default_rng(0))
    by_layer = children.reshape(200, SHAPE.num_layers, -1)
    assert (by_layer.all(axis=2) == by_layer.any(axis=2)).all()
    starts = (np.diff(by_layer[:, :, 0].astype(int), axis=1, prepend=0) == 1).sum(axis=1)
    assert set(starts) == {0, 1}


def test_built_maps_have_every_size_and_the_best_units(units: Units) -> None:
    effects = np.tile(np.arange(units.count, dtype=np.float64), (400, 1))
    built = build(units, effects, np.random.default_rng(0))
    sizes = built.sum(axis=1)
    assert sizes.min() <= 1
    assert sizes.max() > 0.8 * units.count
    assert built[:, units.count // 2 :].sum() > 2 * built[:, : units.count // 2].sum()
