"""The Gaussian process over head maps against plain formulas, and what validation makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from archsearch.lab.map_process import (
    TREND_VARIANCE,
    Descriptor,
    Hyperparameters,
    Process,
    _Likelihood,
    fit,
    matern,
    predict_together,
    squared_distances,
)
from archsearch.lab.map_validation import (
    Agreement,
    Subject,
    cross_validate,
    extrapolate,
    learning_curve,
    leave_best_out,
)
from archsearch.lab.search_evaluator import figure_of, subjects

from .map_tables import SHAPE, made_up_table, random_scores

ROWS = 60


def _subject(count: int = 120) -> Subject:
    return subjects(made_up_table(count, 3), random_scores(3))["kl"]


def test_gradient_of_the_likelihood() -> None:
    subject, draw = _subject(30), np.random.default_rng(0)
    likelihood = _Likelihood(subject.descriptor, subject.maps, draw.standard_normal(30))
    at = likelihood.start.flat() + draw.normal(0, 0.5, len(likelihood.start.flat()))
    _, gradient = likelihood(at)
    for place in range(len(at)):
        step = np.zeros(len(at))
        step[place] = 1e-5
        slope = (likelihood(at + step)[0] - likelihood(at - step)[0]) / 2e-5
        assert gradient[place] == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_process_against_the_plain_formula() -> None:
    subject, draw = _subject(60), np.random.default_rng(1)
    hyper = Hyperparameters.start(subject.descriptor)
    hyper = hyper.like(hyper.flat() + draw.normal(0, 0.5, len(hyper.flat())))
    maps, figure_NK = subject.maps, draw.standard_normal((60, 2))
    known, others = np.arange(40), np.arange(40, 60)
    cover = TREND_VARIANCE * maps.trend @ maps.trend.T
    for part in ("coarse", "fine"):
        x_NF, weight_F = getattr(maps, part), hyper.weights(subject.descriptor, part)
        squares = (((x_NF[:, None] - x_NF[None]) ** 2) * weight_F).sum(-1)
        np.testing.assert_allclose(squares, squared_distances(x_NF, x_NF, weight_F), atol=1e-9)
        cover += np.exp(hyper.variances[part]) * matern(squares)
    mean_K, std_K = figure_NK[known].mean(0), figure_NK[known].std(0)
    inverse = np.linalg.inv(cover[:40, :40] + np.exp(hyper.noise) * np.eye(40))
    expected = cover[40:, :40] @ inverse @ ((figure_NK[known] - mean_K) / std_K) * std_K + mean_K
    left = np.diag(cover[40:, 40:] - cover[40:, :40] @ inverse @ cover[:40, 40:])
    process = Process(subject.descriptor, maps[known], figure_NK[known], hyper)
    np.testing.assert_allclose(process.predict(maps[others]), expected, atol=1e-6)
    other = Process(
        subject.descriptor, maps[known], figure_NK[known] * 3, hyper.like(hyper.flat() / 2)
    )
    for alone, together in zip(
        (process, other), predict_together([process, other], maps[others]), strict=True
    ):
        np.testing.assert_allclose(together, alone.predict(maps[others]), atol=1e-9)
    np.testing.assert_allclose(process.deviation(maps[others]), np.sqrt(left) * std_K[0], rtol=1e-4)


def test_a_whole_layer_lost_is_no_sum_over_heads_and_is_learned() -> None:
    found = cross_validate(_subject(), ROWS, 0)
    assert found["all"].maps == 120
    assert found["all"].spearman > 0.97


def test_held_out_maps_are_not_seen() -> None:
    """A figure of noise alone cannot be told, however near its maps lie."""
    subject, draw = _subject(), np.random.default_rng(5)
    noise = Subject(
        subject.descriptor,
        subject.maps,
        draw.standard_normal(120),
        subject.share_N,
        subject.family_N,
        subject.families,
    )
    assert abs(cross_validate(noise, ROWS, 0)["all"].spearman) < 0.35


def test_more_maps_say_more_and_the_best_are_left_out_of_every_band() -> None:
    subject = _subject()
    hyper = subject.fit(np.arange(120), ROWS, 0)
    curve = learning_curve(subject, hyper, 0, parts=(0.25, 1.0))
    assert list(curve) == [20, 90]
    assert curve[90].rmse < curve[20].rmse
    assert leave_best_out(subject, ROWS, 0).maps == sum(
        int(0.1 * band.sum()) for band in subject.bands().values()
    )


def test_extrapolation_follows_a_power_law() -> None:
    curve = {n: Agreement(9, 1 - 10 / n, 2 * n**-0.5, 0.0) for n in (100, 200, 400)}
    rho, rmse = extrapolate(curve, 1600)
    assert rho == pytest.approx(1 - 10 / 1600)
    assert rmse == pytest.approx(2 / 40)


def test_every_head_and_group_is_told_apart() -> None:
    descriptor, table = Descriptor(SHAPE, random_scores(0)), made_up_table(100, 0)
    maps = descriptor.describe(table.full_NLH)
    rows = {row.tobytes() for row in maps.fine}
    assert len(rows) == 100
    weights = Hyperparameters.start(descriptor).weights(descriptor, "fine")
    assert weights.shape == (maps.fine.shape[1],)
    assert (weights > 0).all()


def test_fitting_raises_the_likelihood() -> None:
    subject = _subject(80)
    figure_N = figure_of(made_up_table(80, 3), "kl")
    figure_N = (figure_N - figure_N.mean()) / figure_N.std()
    hyper = fit(subject.descriptor, subject.maps, figure_N, rows=80, seed=0)
    likelihood = _Likelihood(subject.descriptor, subject.maps, figure_N)
    assert likelihood(hyper.flat())[0] < likelihood(likelihood.start.flat())[0] - 10
