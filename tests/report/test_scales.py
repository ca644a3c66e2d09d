"""Axes and their ticks."""

from __future__ import annotations

import math

import pytest

from archsearch.report.scales import RAMP, colour, colour_axis, make_axis


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


def luminance(text: str) -> float:
    """Relative luminance of an sRGB colour (WCAG 2)."""
    channels = (int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_darken_all_the_way_so_that_hue_is_not_needed() -> None:
    shades = [luminance(colour(i / 50)) for i in range(51)]
    assert shades == sorted(shades, reverse=True)
    assert len(set(shades)) == len(shades)
    assert (colour(0), colour(1)) == (RAMP[0], RAMP[-1])
    assert (colour(-3), colour(7)) == (RAMP[0], RAMP[-1])


@pytest.mark.parametrize(
    "values", [[0.0, 0.001, 0.9], [-0.2, 0.1], [-2.0, -1.0], [0.0], [0.5, 0.5], [math.nan, 1.0], []]
)
@pytest.mark.parametrize("root", [True, False])
def test_colour_axis_keeps_order_within_the_ramp(values: list[float], root: bool) -> None:
    axis = colour_axis(values, root=root)
    shares = [axis.pixel(v) for v in sorted(values) if math.isfinite(v)]
    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)


def test_negative_scores_look_like_zero_where_others_are_positive() -> None:
    axis = colour_axis([-0.5, 0.0, 1.0], root=True)
    assert axis.pixel(-0.5) == axis.pixel(0.0) == 0
    assert axis.pixel(0.25) == pytest.approx(0.5)
