"""Correlation, regret and what is lost of a front: known orders give known numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest

from archsearch.fidelity import agreement
from archsearch.fidelity.agreement import (
    front_lost,
    interval,
    noise_deviation,
    regret,
    regret_rows,
    reliability,
    spearman,
    spearman_rows,
)

RNG = np.random.default_rng(4)


def test_an_order_agrees_with_itself_and_not_with_its_reverse() -> None:
    truth = RNG.permutation(12).astype(float)
    assert spearman(np.exp(truth), truth) == pytest.approx(1)
    assert spearman(-(truth**3), truth) == pytest.approx(-1)


def test_spearman_of_a_few_swaps_is_the_textbook_value() -> None:
    proxy, truth = [1, 2, 3, 4, 5], [10, 30, 20, 50, 40]
    # 1 - 6 sum d^2 / (n (n^2 - 1)), d = 0, 1, 1, 1, 1.
    assert spearman(proxy, truth) == pytest.approx(1 - 6 * 4 / (5 * 24))


def test_tied_values_share_the_mean_of_their_ranks() -> None:
    proxy, truth = np.array([1.0, 1, 2, 2, 3]), np.array([1.0, 2, 3, 3, 3])
    ranks_x, ranks_y = [0.5, 0.5, 2.5, 2.5, 4], [0, 1, 3, 3, 3]
    assert spearman(proxy, truth) == pytest.approx(float(np.corrcoef(ranks_x, ranks_y)[0, 1]))


def test_a_proxy_that_is_the_same_for_all_tells_nothing() -> None:
    assert spearman([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == 0


def test_regret_is_what_the_proxys_best_lacks() -> None:
    proxy, truth = [3.0, 1.0, 2.0, 4.0], [0.1, 0.4, 0.2, 0.3]
    assert regret(proxy, truth) == pytest.approx(0.3)
    assert regret(proxy, truth, keep=2) == pytest.approx(0.1)
    assert regret(proxy, truth, keep=3) == 0
    assert regret(truth, truth) == 0


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 5])
def test_regret_over_ties_is_the_mean_of_all_choices(keep: int) -> None:
    proxy = np.array([1.0, 2, 2, 2, 3])
    truth = RNG.random(5)
    sure = [index for index in range(5) if proxy[index] < np.sort(proxy)[keep - 1]]
    tied = [index for index in range(5) if proxy[index] == np.sort(proxy)[keep - 1]]
    chosen = [[*sure, *more] for more in combinations(tied, keep - len(sure))]
    expected = np.mean([truth[choice].min() for choice in chosen]) - truth.min()
    assert regret(proxy, truth, keep) == pytest.approx(expected)


def test_rows_are_what_each_alone_gives() -> None:
    proxy, truth = RNG.integers(4, size=(2, 6, 9)).astype(float)
    expected = [spearman(p, t) for p, t in zip(proxy, truth, strict=True)]
    np.testing.assert_allclose(spearman_rows(proxy, truth), expected)
    expected = [regret(p, t) for p, t in zip(proxy, truth, strict=True)]
    np.testing.assert_allclose(regret_rows(proxy, truth), expected)


def test_the_interval_holds_the_value_and_narrows_with_more_maps() -> None:
    def width(count: int) -> float:
        truth = RNG.normal(size=count)
        proxy = truth + 0.7 * RNG.normal(size=count)
        low, high = interval(spearman_rows, proxy, truth)
        assert low <= spearman(proxy, truth) <= high
        assert (low, high) == interval(spearman_rows, proxy, truth), "the same each time"
        return high - low

    assert width(200) < width(12) / 2


def test_front_lost_counts_what_the_proxys_front_misses() -> None:
    truth, cost = np.array([0.0, 0.5, 1.0]), np.array([1.0, 0.5, 0.0])
    assert front_lost(truth, truth, cost) == pytest.approx(0)
    # By this proxy the middle map is dominated by the last. What it alone dominates: a square of 0.5.
    proxy = np.array([0.0, 2.0, 1.0])
    outer = 1.1**2 - 1
    assert front_lost(proxy, truth, cost) == pytest.approx(0.25 / (outer + 0.25))


def test_noise_is_told_from_what_a_seed_changes_for_all() -> None:
    truth = RNG.normal(size=4000)
    noise = 0.3 * RNG.normal(size=(2, 4000))
    first, second = truth + noise[0], truth + noise[1] + 5
    assert noise_deviation(first, second) == pytest.approx(0.3, rel=0.05)
    assert reliability(first, second, first) == pytest.approx(1 / 1.09, rel=0.05)
    assert reliability(first, first, first) == 1
    assert reliability(noise[0], noise[1], noise[0]) == pytest.approx(0, abs=0.05)


Statistic = Callable[[list[float], list[float]], object]
STATISTICS: dict[str, Statistic] = {
    "spearman": spearman,
    "regret": regret,
    "interval": lambda proxy, truth: interval(spearman_rows, proxy, truth),
    "front_lost": lambda proxy, truth: front_lost(proxy, truth, [1.0] * len(proxy)),
    "noise_deviation": noise_deviation,
    "reliability": lambda proxy, truth: reliability(proxy, truth, truth),
}


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    good, broken = [1.0, 2.0, 3.0], [1.0, bad, 3.0]
    for proxy, truth in ((broken, good), (good, broken)):
        with pytest.raises(ValueError, match="not finite"):
            STATISTICS[name](proxy, truth)


@pytest.mark.parametrize("name", STATISTICS)
def test_too_few_or_uneven_values_are_refused(name: str) -> None:
    for proxy, truth in (([1.0], [1.0]), ([1.0, 2.0], [1.0, 2.0, 3.0])):
        with pytest.raises(ValueError, match="two rows of 2 or more"):
            STATISTICS[name](proxy, truth)


@pytest.mark.parametrize("keep", [0, 4])
def test_regret_keeps_some_and_not_more_than_all(keep: int) -> None:
    with pytest.raises(ValueError, match="keep"):
        regret([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], keep)


def test_draws_are_as_many_as_said() -> None:
    rows = []

    def count(proxy: agreement.Array, truth: agreement.Array) -> agreement.Array:
        rows.append(proxy.shape)
        return spearman_rows(proxy, truth)

    interval(count, [1.0, 2.0, 3.0], [1.0, 3.0, 2.0], resamples=17)
    assert rows == [(17, 3)]
