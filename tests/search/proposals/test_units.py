"""Bits of head maps and their costs, by heads and by KV groups."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from archsearch.config import CostConfig
from archsearch.headmap import HeadMap
from archsearch.search.proposals.units import Costs, Units
from archsearch.search.space import analytic_costs, random_map
from tests.search.proposals.damage import SHAPE


@pytest.mark.parametrize("whole_groups", [False, True])
def test_bits_become_maps_and_costs(whole_groups: bool) -> None:
    units = Units(SHAPE, whole_groups=whole_groups)
    full_PU = np.random.default_rng(0).random((20, units.count)) < 0.3
    maps = [units.to_map(full_U) for full_U in full_PU]
    assert (units.of_maps(maps) == full_PU).all()
    cost = CostConfig(context=777)
    found = Costs(units, cost).of(full_PU)
    for place, head_map in enumerate(maps):
        for name, value in analytic_costs(head_map, cost).items():
            assert found[name][place] == pytest.approx(value)


def test_a_group_that_is_split_is_a_share() -> None:
    units = Units(SHAPE, whole_groups=True)
    shares_U = units.of_maps([HeadMap.from_full_heads(SHAPE, [(1, 0), (1, 3), (1, 4)])])[0]
    assert shares_U[2:4].tolist() == pytest.approx([1 / 3, 2 / 3])
    assert shares_U.sum() == pytest.approx(1)


def test_groups_with_a_head() -> None:
    units = Units(SHAPE, whole_groups=False)
    head_map = random_map(SHAPE, Random(1), 9, 20)
    full_PU = units.of_maps([head_map]) > 0.5
    expected = [any(h in head_map.full_heads() for h in group) for group in SHAPE.groups()]
    assert units.groups_PG(full_PU)[0].tolist() == expected
