"""Agreement of two orders of the same maps: rank correlation, regret, and what chance leaves of either.

Everything is a loss here: smaller is better, in a proxy and in the truth that it stands for.
Shapes: N maps, B draws of a bootstrap.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb

import moocore
import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Statistic = Callable[[Array, Array], Array]
"""A number for each row of two [B, N] arrays."""

RESAMPLES = 1000
LEVEL = 0.95
MARGIN = 0.1


def spearman(proxy_N: ArrayLike, truth_N: ArrayLike) -> float:
    """Spearman's rank correlation, -1 to 1; tied values share the mean of their ranks.

    0 where one of the two is the same for all: it then tells no map from another. Raises ValueError for fewer than two
    maps, lengths that differ, and values that are not finite.
    """
    proxy, truth = _checked(proxy_N, truth_N)
    return float(spearman_rows(proxy[None], truth[None])[0])


def regret(proxy_N: ArrayLike, truth_N: ArrayLike, keep: int = 1) -> float:
    """What choosing the `keep` best by the proxy costs: the best truth among them, less the best of all.

    Of maps that the proxy cannot tell apart at the border, any choice is as likely: the mean over these. Raises ValueError
    as spearman does, and unless keep is from 1 to N.
    """
    proxy, truth = _checked(proxy_N, truth_N)
    if not 1 <= keep <= len(proxy):
        raise ValueError(f"keep {keep} is not from 1 to {len(proxy)}")
    border = np.sort(proxy)[keep - 1]
    sure, tied = truth[proxy < border], np.sort(truth[proxy == border])
    drawn = keep - len(sure)
    ahead = float(sure.min()) if len(sure) else np.inf
    # The least of `drawn` out of m tied ones is the i-th least in so many of all draws.
    ways = [comb(len(tied) - 1 - i, drawn - 1) for i in range(len(tied))]
    least = float(np.minimum(tied, ahead) @ np.array(ways, dtype=float)) / comb(len(tied), drawn)
    return least - float(truth.min())


def interval(
    statistic: Statistic,
    proxy_N: ArrayLike,
    truth_N: ArrayLike,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> tuple[float, float]:
    """Percentile bootstrap over maps: the range that holds `level` of the statistic's values on maps drawn with replacement.

    Raises ValueError as spearman does.
    """
    proxy, truth = _checked(proxy_N, truth_N)
    drawn = np.random.default_rng(seed).integers(len(proxy), size=(resamples, len(proxy)))
    values = statistic(proxy[drawn], truth[drawn])
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def spearman_rows(proxy_BN: Array, truth_BN: Array) -> Array:
    """Spearman's correlation of each row, [B]."""
    x, y = _centred_ranks(proxy_BN), _centred_ranks(truth_BN)
    scale = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    found: Array = np.divide((x * y).sum(-1), scale, out=np.zeros_like(scale), where=scale > 0)
    return found


def regret_rows(proxy_BN: Array, truth_BN: Array) -> Array:
    """The regret of choosing each row's best, [B]."""
    best = proxy_BN == proxy_BN.min(-1, keepdims=True)
    chosen = (truth_BN * best).sum(-1) / best.sum(-1)
    found: Array = chosen - truth_BN.min(-1)
    return found


def front_lost(proxy_N: ArrayLike, truth_N: ArrayLike, cost_N: ArrayLike) -> float:
    """What of the front of (truth, cost) is lost by taking only maps on the front of (proxy, cost), 0 to 1.

    The share of the true front's hypervolume that these maps' own truths do not reach; its reference point lies a tenth of
    each range beyond the worst value. Raises ValueError as spearman does.
    """
    proxy, truth = _checked(proxy_N, truth_N)
    cost, _ = _checked(cost_N, truth_N)
    chosen = moocore.is_nondominated(np.stack([proxy, cost], axis=1), keep_weakly=True)
    points = np.stack([_unit(truth), _unit(cost)], axis=1)
    reached, whole = (
        float(moocore.hypervolume(part, ref=[1 + MARGIN] * 2)) for part in (points[chosen], points)
    )
    return 1 - reached / whole


def _unit(values_N: Array) -> Array:
    """Values from 0, the best, to 1, the worst."""
    spread = np.ptp(values_N)
    found: Array = (values_N - values_N.min()) / (spread if spread > 0 else 1.0)
    return found


def reliability(first_R: ArrayLike, second_R: ArrayLike, truth_N: ArrayLike) -> float:
    """How much of the variance among maps is not noise, 0 to 1, from R of them that were trained twice.

    1 - s^2 / var(truth), s being noise_deviation: the correlation to expect between two runs of the same maps. Unlike
    the correlation over the R maps themselves it rests on the spread of all N. 0 where all is noise. Raises ValueError
    as spearman does.
    """
    truth, _ = _checked(truth_N, truth_N)
    variance, noise = truth.var(ddof=1), noise_deviation(first_R, second_R)
    return float(max(0.0, 1 - noise**2 / variance)) if variance > 0 else 0.0


def noise_deviation(first_R: ArrayLike, second_R: ArrayLike) -> float:
    """Standard deviation of one run of a map about the mean of such runs, from R maps that were trained twice.

    What the second seed changes for all maps alike, which no order depends on, is no noise. Raises ValueError as spearman
    does.
    """
    first, second = _checked(first_R, second_R)
    return float(np.sqrt((first - second).var(ddof=1) / 2))


def _centred_ranks(values_BN: Array) -> Array:
    """Ranks about their mean; tied values share theirs."""
    below = (values_BN[:, None, :] < values_BN[:, :, None]).sum(-1)
    above = (values_BN[:, None, :] > values_BN[:, :, None]).sum(-1)
    centred: Array = (below - above) / 2
    return centred


def _checked(proxy_N: ArrayLike, truth_N: ArrayLike) -> tuple[Array, Array]:
    proxy, truth = np.asarray(proxy_N, dtype=np.float64), np.asarray(truth_N, dtype=np.float64)
    if proxy.ndim != 1 or proxy.shape != truth.shape or len(proxy) < 2:
        raise ValueError(
            f"values have shapes {proxy.shape} and {truth.shape}; allowed: two rows of 2 or more"
        )
    if not (np.isfinite(proxy).all() and np.isfinite(truth).all()):
        raise ValueError("a value is not finite")
    return proxy, truth
