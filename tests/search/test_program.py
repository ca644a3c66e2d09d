"""The integer program of heads against every choice that there is."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from archsearch.headmap import Head, ModelShape
from archsearch.search.program import Budget, Table, shares_of_total, solve

SHAPE = ModelShape("llama", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
MEMBERS = {group[0][0] * 2 + group[0][1] // 2: set(group) for group in SHAPE.groups()}


def draw(rng: random.Random, width: int, scale: float) -> Table:
    return [[rng.uniform(-0.2, 1) * scale for _ in range(width)] for _ in range(SHAPE.num_layers)]


def damage(kept: set[Head], heads: Table, groups: Table | None) -> float:
    """What the heads that go cost together."""
    total = 0.0
    for number, members in MEMBERS.items():
        gone = members - kept
        if gone == members and groups is not None:
            total += groups[number // 2][number % 2]
        else:
            total += sum(heads[layer][head] for layer, head in gone)
    return total


def choices() -> list[set[Head]]:
    every = SHAPE.heads()
    return [set(found) for count in range(9) for found in combinations(every, count)]


@pytest.mark.parametrize("scale", [1.0, 1e-5])
@pytest.mark.parametrize("with_groups", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_no_choice_of_as_many_heads_costs_less(seed: int, with_groups: bool, scale: float) -> None:
    rng = random.Random(seed)
    heads, groups = draw(rng, 4, scale), draw(rng, 2, 2 * scale) if with_groups else None
    for count in (1, 3, 5, 8):
        found = set(solve(SHAPE, heads, Budget(count), groups=groups))
        assert len(found) == count
        best = min(damage(kept, heads, groups) for kept in choices() if len(kept) == count)
        assert damage(found, heads, groups) == pytest.approx(best, abs=1e-9 * scale)


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_within_the_bytes_costs_less(seed: int) -> None:
    rng = random.Random(seed)
    heads, groups = draw(rng, 4, 1e-3), draw(rng, 2, 2e-3)

    def size(kept: set[Head]) -> int:
        return 4096 * sum(bool(members & kept) for members in MEMBERS.values()) + 256 * (
            8 - len(kept)
        )

    for most in (8 * 256, 4096 + 6 * 256, 4096 + 7 * 256, 3 * 4096, 1 << 20):
        budget = Budget(max_bytes=most, kv_head_bytes=4096, state_bytes=256)
        found = set(solve(SHAPE, heads, budget, groups=groups))
        assert size(found) <= most
        best = min(damage(kept, heads, groups) for kept in choices() if size(kept) <= most)
        assert damage(found, heads, groups) == pytest.approx(best, abs=1e-9)


def test_whole_groups_stay_whole() -> None:
    heads = [[1.0, 0.0, 0.4, 0.4], [0.0, 0.9, 0.3, 0.3]]
    assert solve(SHAPE, heads, Budget(4), whole_groups=True) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_budgets_that_no_choice_keeps_are_refused() -> None:
    heads = [[1.0] * 4] * 2
    with pytest.raises(ValueError, match="integer program"):
        solve(SHAPE, heads, Budget(3), whole_groups=True)
    with pytest.raises(ValueError, match="integer program"):
        solve(SHAPE, heads, Budget(max_bytes=7, kv_head_bytes=8, state_bytes=4))
    with pytest.raises(ValueError, match="budget"):
        solve(SHAPE, heads, Budget())


def test_kinds_of_damage_weigh_the_same_whatever_their_unit() -> None:
    rng = random.Random(5)
    kl, nll = (draw(rng, 4, 1e-4), draw(rng, 2, 1e-4)), (draw(rng, 4, 30.0), draw(rng, 2, 30.0))
    heads, groups = shares_of_total([kl, nll])
    total_kl, total_nll = (sum(abs(v) for row in pair[0] for v in row) for pair in (kl, nll))
    for layer in range(2):
        for head in range(4):
            wanted = kl[0][layer][head] / total_kl + nll[0][layer][head] / total_nll
            assert math.isclose(heads[layer][head], wanted, rel_tol=1e-12)
        for group in range(2):
            wanted = kl[1][layer][group] / total_kl + nll[1][layer][group] / total_nll
            assert math.isclose(groups[layer][group], wanted, rel_tol=1e-12)
