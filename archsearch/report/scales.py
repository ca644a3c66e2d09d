"""Axes of a plot: from metric values to pixels, with round ticks; and from values to colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..metrics import is_loss, is_share
from .records import bytes_text

RAMP = ("#ece6d6", "#cbdcc4", "#8fc7bb", "#4a9fb2", "#2a6aa3", "#142f63")
"""Colours of low to high values. Each is darker than the one before, so that hue need not be told apart."""


@dataclass(frozen=True)
class Axis:
    """Maps values in [low, high] to pixels in [start, stop], by the square root where root."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...]
    text: Callable[[float], str]
    root: bool = False

    def pixel(self, value: float) -> float:
        """The pixel of a value; values outside are held at the edge."""
        warp = math.sqrt if self.root else float
        low, high = warp(self.low), warp(self.high)
        share = (warp(min(max(value, self.low), self.high)) - low) / (high - low)
        return self.start + share * (self.stop - self.start)


def make_axis(metric: str, values: Iterable[float], start: float, stop: float) -> Axis:
    """An axis for a metric that shows all values.

    Divergences and losses are never negative and crowd near zero, so their axis is a square root.
    """
    found = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    root = is_loss(metric)
    low = 0.0 if root or metric in ("cache_bytes", "fa_share") else min(found)
    high = max(found)
    if high <= low:
        high = low + (abs(low) or 1.0)
    unit = _byte_unit(high) if metric == "cache_bytes" else 1.0
    ticks = _root_ticks(high) if root else _linear_ticks(low, high, unit)
    pad = 0.04 * (high - low)
    top = high + pad
    bottom = low if low == 0 else low - pad
    shown = tuple(tick for tick in ticks if bottom <= tick <= top)
    return Axis(bottom, top, start, stop, shown, _tick_text(metric), root)


def colour_axis(values: Iterable[float], *, root: bool) -> Axis:
    """An axis from values to shares of RAMP, 0 to 1.

    With root, as scores of heads are drawn (few large, most near zero): by the square root and from zero on, and
    negative values look like zero. Without, from the least value to the largest.
    """
    found = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(found), max(found)
    root = root and high > 0
    if root:
        low = 0.0
    if high <= low:
        high = low + (abs(low) or 1.0)
    ticks = _root_ticks(high) if root else _linear_ticks(low, high, 1.0)
    shown = tuple(tick for tick in ticks if low <= tick <= high)
    return Axis(low, high, 0.0, 1.0, shown, _tick_text(""), root)


def colour(share: float) -> str:
    """The colour at a share of RAMP between 0 and 1."""
    at = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    index = min(int(at), len(RAMP) - 2)
    below, above = (_channels(RAMP[i]) for i in (index, index + 1))
    mixed = (round(a + (at - index) * (b - a)) for a, b in zip(below, above, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def layer_step(num_layers: int) -> int:
    """Every which layer gets its number written under it."""
    return 1 if num_layers <= 12 else 5


def _channels(text: str) -> tuple[int, ...]:
    return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))


def _tick_text(metric: str) -> Callable[[float], str]:
    if metric == "cache_bytes":
        return lambda value: "0" if value == 0 else bytes_text(value)
    if is_share(metric):
        return lambda value: f"{100 * value:.4g}%"
    return lambda value: f"{value:.4g}"


def _byte_unit(high: float) -> float:
    return float(1024 ** int(math.log(max(high, 1.0), 1024)))


def _step(span: float, count: int = 6) -> float:
    """The round step (1, 2, 2.5 or 5 times a power of ten) that cuts span into about count parts."""
    raw = span / count
    power = 10 ** math.floor(math.log10(raw))
    return float(next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999))


def _linear_ticks(low: float, high: float, unit: float) -> list[float]:
    step = _step((high - low) / unit) * unit
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [step * i for i in range(first, last + 2)]


def _root_ticks(high: float, count: int = 6) -> list[float]:
    """Round values about evenly apart under a square root, zero first."""
    ticks = [0.0]
    for i in range(1, count + 1):
        value = high * (i / count) ** 2
        power = 10 ** math.floor(math.log10(value))
        rounded = min((power * m for m in (1, 2, 3, 5, 7, 10)), key=lambda t: abs(t - value))
        if rounded > ticks[-1]:
            ticks.append(float(rounded))
    return ticks
