"""How new maps come from old ones: swap, grow, shrink, whole KV groups, blocks of layers, and from nothing. Numpy only.

Every move is made for many maps at once. keys say how much each unit is needed, with noise, so that the same parent has many children.
Shapes: P maps, U units, G KV groups of all layers, L layers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .units import Bits, Row, Units

NOISES = np.array([0.1, 0.4, 1.5, 6.0])
"""Noise of keys, in standard deviations of what is known of the units: from greedy to blind."""
MOST_CHANGED = 0.15
"""Share of the units that a move drops or adds at the most; most moves change a few."""

Counts = NDArray[np.int64]


def noisy_keys(effects_PU: Row, rng: np.random.Generator) -> Row:
    """Effects with noise of a strength that is drawn for each map."""
    spread = effects_PU.std(axis=1, keepdims=True) + 1e-12
    noise = rng.choice(NOISES, size=(len(effects_PU), 1))
    keys: Row = effects_PU / spread + noise * rng.standard_normal(effects_PU.shape)
    return keys


def change(full_PU: Bits, keys_PU: Row, drop_P: Counts, add_P: Counts) -> Bits:
    """Each map without its drop least needed units and with the add most needed others, as far as there are any."""
    worst = _first(np.where(full_PU, keys_PU, np.inf), drop_P)
    best = _first(np.where(full_PU, np.inf, -keys_PU), add_P)
    changed: Bits = (full_PU & ~worst) | best
    return changed


def mutate(units: Units, full_PU: Bits, effects_PU: Row, rng: np.random.Generator) -> Bits:
    """Each map with a few units, or whole KV groups, swapped, added or dropped."""
    num_maps = len(full_PU)
    keys_PU = noisy_keys(effects_PU, rng)
    drop_P, add_P = _counts(num_maps, units.count, rng)
    if units.units_of_group == 1:
        return change(full_PU, keys_PU, drop_P, add_P)
    group_keys = keys_PU @ units.group_UG
    group_drop_P, group_add_P = _counts(num_maps, units.num_groups, rng)
    kind_P = rng.integers(3, size=num_maps)
    mutated = np.empty_like(full_PU)
    own = kind_P == 0
    mutated[own] = change(full_PU[own], keys_PU[own], drop_P[own], add_P[own])
    own = ~own
    groups_PG = units.groups_PG(full_PU[own])
    changed = change(groups_PG, group_keys[own], group_drop_P[own], group_add_P[own])
    gone, new = (
        np.repeat(g, units.units_of_group, axis=1) for g in (~changed, changed & ~groups_PG)
    )
    mutated[own] = (full_PU[own] & ~gone) | new
    # A KV head that is cached anyway costs nothing more for the rest of its heads.
    own = kind_P == 2
    mutated[own] = np.repeat(units.groups_PG(mutated[own]), units.units_of_group, axis=1)
    return mutated


def cross(units: Units, first_PU: Bits, second_PU: Bits, rng: np.random.Generator) -> Bits:
    """Each first map with a block of neighbouring layers from the second."""
    num_layers = units.shape.num_layers
    ends_P2 = np.sort(rng.integers(num_layers + 1, size=(len(first_PU), 2)), axis=1)
    layers = np.arange(num_layers)
    taken_PL = (layers >= ends_P2[:, :1]) & (layers < ends_P2[:, 1:])
    return np.where(np.repeat(taken_PL, units.units_of_layer, axis=1), second_PU, first_PU)


def build(units: Units, effects_PU: Row, rng: np.random.Generator) -> Bits:
    """The most needed units, or KV groups, of each row: any number of them, small numbers as often as large ones."""
    num_maps = len(effects_PU)
    keys_PU = noisy_keys(effects_PU, rng)
    size_P = _sizes(num_maps, units.count, rng)
    if units.units_of_group == 1:
        return _first(-keys_PU, size_P)
    group_keys = keys_PU @ units.group_UG
    group_size_P = _sizes(num_maps, units.num_groups, rng)
    single = rng.random(num_maps) < 0.5
    built = np.empty(keys_PU.shape, dtype=np.bool_)
    built[single] = _first(-keys_PU[single], size_P[single])
    groups_PG = _first(-group_keys[~single], group_size_P[~single])
    built[~single] = np.repeat(groups_PG, units.units_of_group, axis=1)
    return built


def _first(keys: Row, count_P: Counts) -> Bits:
    """The count smallest finite keys of each row; of equal ones at the edge all."""
    ordered = np.sort(keys, axis=1)
    rows = np.arange(len(keys))
    edge = ordered[rows, np.clip(count_P - 1, 0, keys.shape[1] - 1)]
    edge = np.where(count_P > 0, edge, -np.inf)
    chosen: Bits = (keys <= edge[:, None]) & np.isfinite(keys)
    return chosen


def _counts(num_maps: int, count: int, rng: np.random.Generator) -> tuple[Counts, Counts]:
    """How many to drop and to add: a third of the moves swap, a third grow, a third shrink."""
    most = max(1.0, MOST_CHANGED * count)
    drawn = np.exp(rng.random((2, num_maps)) * np.log(most + 1)).astype(np.int64)
    kind = rng.integers(3, size=num_maps)
    drop = np.where(kind == 1, 0, drawn[0])
    # A swap keeps the number; to change both sides by different numbers, two moves do.
    add = np.where(kind == 2, 0, np.where(kind == 0, drawn[0], drawn[1]))
    return drop, add


def _sizes(num_maps: int, count: int, rng: np.random.Generator) -> Counts:
    """Half of the sizes are uniform, half of them uniform in the logarithm."""
    share = rng.random(num_maps)
    sizes = np.where(rng.random(num_maps) < 0.5, share * (count + 1), (count + 1.0) ** share)
    return np.minimum(count, sizes.astype(np.int64))
