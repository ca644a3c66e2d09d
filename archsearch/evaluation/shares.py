"""Confidence intervals of shares of prompts. No torch.

Wilson's score interval (1927) has a width also where all prompts are right or all are wrong, where a bootstrap has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

Interval = tuple[float, float]


def share_interval(right: int, count: int, confidence: float) -> Interval:
    """Wilson's interval of a share that was counted among so many."""
    from scipy.stats import binomtest  # Loads in a second or more.

    found = binomtest(right, count).proportion_ci(confidence, method="wilson")
    return float(found.low), float(found.high)


def mean_interval(shares: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """The interval of the mean of independent shares from their own (Zou and Donner, 2008); of one it is its own."""
    mean, size = fmean(shares), len(shares)
    below = math.hypot(*(share - low for share, (low, _) in zip(shares, intervals, strict=True)))
    above = math.hypot(*(high - share for share, (_, high) in zip(shares, intervals, strict=True)))
    return max(0.0, mean - below / size), min(1.0, mean + above / size)
