"""Rank correlation against its definition, and halves of pairs."""

from __future__ import annotations

import random
import statistics

import pytest
import torch

from archsearch.lab.agreement import (
    AMONG_TOP,
    SHARED,
    WHOLE,
    agreement,
    halves,
    overlap,
    rank_correlation,
    tables_of,
)


def counted_ranks(values: list[float]) -> list[float]:
    """Average ranks by counting: those below, and half of those beside."""
    return [
        sum(other < value for other in values) + sum(other == value for other in values) / 2
        for value in values
    ]


@pytest.mark.parametrize("seed", range(4))
def test_rank_correlation_is_the_correlation_of_average_ranks(seed: int) -> None:
    rng = random.Random(seed)
    # Most heads are at exactly zero, as in a causal score.
    first, second = ([max(0.0, rng.gauss(-0.5, 1)) for _ in range(40)] for _ in range(2))
    expected = statistics.correlation(counted_ranks(first), counted_ranks(second))
    assert rank_correlation(first, second) == pytest.approx(expected)
    assert rank_correlation(first, [-value for value in first]) == pytest.approx(-1)


def test_rank_correlation_of_tied_values_and_of_different_lengths() -> None:
    assert rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0
    # Ranks 0, 1.5, 1.5, 3 and 0, 2, 1, 3: covariance 4.5 over the root of 4.5 and 5.
    found = rank_correlation([1.0, 2.0, 2.0, 3.0], [1.0, 3.0, 2.0, 4.0])
    assert found == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    with pytest.raises(ValueError, match="3 and 2 values"):
        rank_correlation([1.0, 2.0, 3.0], [1.0, 2.0])


def test_halves_are_disjoint_and_short_subprobes_are_cut_in_half() -> None:
    # Pair p of a sub-probe holds the number p everywhere.
    pairs = torch.arange(8.0)[:, None, None].expand(-1, 2, 3)
    bank = {"retrieval": {"single": pairs, "tracking": pairs[:5], "multikey": pairs[:1]}}
    first, second = halves(bank, 3, random.Random(0))
    assert set(first["retrieval"]) == set(second["retrieval"]) == {"single", "tracking"}
    for kind, size in (("single", 3), ("tracking", 2)):
        drawn = [half["retrieval"][kind][:, 0, 0].tolist() for half in (first, second)]
        assert [len(each) for each in drawn] == [size, size]
        assert len({*drawn[0], *drawn[1]}) == 2 * size


def test_scores_of_effects_agree_where_the_effects_do() -> None:
    generator = torch.Generator().manual_seed(0)
    true_LH = torch.rand(4, 5, generator=generator)
    noisy = {
        name: {
            kind: true_LH + 1e-4 * torch.randn(6, 4, 5, generator=generator)
            for kind in ("one", "two")
        }
        for name in ("retrieval", "general")
    }
    first, second = (tables_of(half, 0.0) for half in halves(noisy, 3, random.Random(1)))
    assert set(first) == {"retrieval", "general", WHOLE}
    # Both capabilities have the same effects, so that the composite is min-max of either.
    scaled_LH = (true_LH - true_LH.min()) / (true_LH.max() - true_LH.min())
    torch.testing.assert_close(torch.tensor(first[WHOLE]), scaled_LH, atol=1e-3, rtol=0)
    found = agreement(first, second, top={0, 3, 7, 12}, best=3)
    assert found[WHOLE] > 0.99
    assert found[AMONG_TOP] == pytest.approx(1)
    assert found[SHARED] == 1


def test_overlap_counts_the_best_heads_in_common() -> None:
    first, second = [[9.0, 8.0, 1.0], [7.0, 0.0, 0.0]], [[9.0, 0.0, 8.0], [0.0, 7.0, 0.0]]
    assert overlap(first, second, 1) == 1
    assert overlap(first, second, 3) == pytest.approx(1 / 3)
