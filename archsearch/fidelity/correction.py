"""A linear fit of cheap metrics to the result of long training, judged on maps that it was not fitted to.

Shapes: N maps, F features.
"""

from __future__ import annotations

import numpy as np

from .agreement import Array

PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0)
"""Ridge penalties to choose from, as multiples of a standardised feature's variance."""
LEAST_MAPS = 10


def held_out_predictions(features_NF: Array, target_N: Array) -> Array:
    """The prediction of each map by a fit to all the others, [N].

    Ridge regression on standardised features, its penalty chosen among PENALTIES by leave-one-out error within those
    others: nothing of a map's own result has a part in its prediction. Where features say nothing, such predictions are
    the mean of the others and so run against the truth: a correlation near -1 then means no more than 0.
    Raises ValueError for fewer than LEAST_MAPS maps, shapes that do not fit, or values that are not finite.
    """
    features, target = np.asarray(features_NF, dtype=float), np.asarray(target_N, dtype=float)
    if features.ndim != 2 or target.shape != features.shape[:1] or len(target) < LEAST_MAPS:
        raise ValueError(
            f"features {features.shape} and target {target.shape}; allowed: [N, F] and [N], N from {LEAST_MAPS}"
        )
    if not (np.isfinite(features).all() and np.isfinite(target).all()):
        raise ValueError("a feature or target is not finite")
    found = np.empty(len(target))
    for left_out in range(len(target)):
        others = np.arange(len(target)) != left_out
        found[left_out] = _predict(features[others], target[others], features[left_out])
    return found


def _predict(features_NF: Array, target_N: Array, wanted_F: Array) -> float:
    mean_F, scale_F = features_NF.mean(0), features_NF.std(0)
    # A feature that is the same for all says nothing.
    scale_F = np.where(scale_F > 0, scale_F, 1.0)
    x_NF = (features_NF - mean_F) / scale_F
    y_N = target_N - target_N.mean()
    u_NF, s_F, v_FF = np.linalg.svd(x_NF, full_matrices=False)
    penalties = [value * len(y_N) for value in PENALTIES]
    best = min(penalties, key=lambda penalty: _press(u_NF, s_F, y_N, penalty))
    weight_F = v_FF.T @ (s_F / (s_F**2 + best) * (u_NF.T @ y_N))
    return float(((wanted_F - mean_F) / scale_F) @ weight_F + target_N.mean())


def _press(u_NF: Array, s_F: Array, y_N: Array, penalty: float) -> float:
    """The sum of squared leave-one-out errors of a centred ridge regression (Allen's PRESS)."""
    shrink_F = s_F**2 / (s_F**2 + penalty)
    fitted_N = u_NF @ (shrink_F * (u_NF.T @ y_N))
    # The mean is fitted too.
    leverage_N = (u_NF**2 * shrink_F).sum(-1) + 1 / len(y_N)
    return float((((y_N - fitted_N) / (1 - leverage_N)) ** 2).sum())
