"""Axes and their ticks."""

from __future__ import annotations

import math

import pytest

from archsearch.report.scales import make_axis


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("kl", [0.0, 0.02, 0.7]),
        ("kl", [0.0]),
        ("niah_multikey_nll", [7.4, 7.9]),
        ("cache_bytes", [32_768.0, 9e8]),
        ("fa_share", [0.125, 1.0]),
        ("niah_multikey_match", [0.5, 0.5]),
        ("top1_agreement", []),
    ],
)
def test_shows_all_values_and_a_few_ticks(metric: str, values: list[float]) -> None:
    axis = make_axis(metric, values, 100, 500)
    for value in values:
        assert 100 <= axis.pixel(value) <= 500
    assert 2 <= len(axis.ticks) <= 12
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert all(axis.text(tick) for tick in axis.ticks)


def test_values_keep_their_order() -> None:
    axis = make_axis("kl", [0.0, 1.0], 400, 0)
    pixels = [axis.pixel(v) for v in (0.0, 0.1, 0.5, 1.0)]
    assert pixels == sorted(pixels, reverse=True)


def test_infinite_values_are_left_out() -> None:
    assert make_axis("kl", [1.0, math.inf, math.nan], 0, 10).high < 2
