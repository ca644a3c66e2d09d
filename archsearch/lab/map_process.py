"""A Gaussian process over head maps: what a figure of a map is, from thousands of measured ones. No torch.

Two Matern kernels (5/2), each over squared distances r^2 = sum_f w_f (x_f - x'_f)^2, on a trend in the share of full-attention heads
towards which it falls back far from all measured maps:

- coarse: what the map comes to, as sums of every score over the replaced heads, plain and in logarithms, the share and how it
  lies over the layers;
- fine: which heads, which KV groups are whole or touched, and counts by layer.

Length scales are grouped: w_f = sum_g exp(a_g) b_gf, where b_g weighs heads alike, or as one of the scores does, or picks other features.
The a_g, two variances and the noise maximise the marginal likelihood of a few hundred maps under a wide normal prior.

Shapes: N maps, M measured maps, L layers, H query heads, G KV heads, F features, K figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize

from ..headmap import ModelShape
from ..search.seeds import ScoreTables

Array = NDArray[np.float64]

PARTS = ("coarse", "fine")
LEAST_SUM = 0.003
"""Added to a sum of scores, a share of all of it, before its logarithm."""
TREND_VARIANCE = 25.0
PRIOR = 3.0
"""Standard deviation of the prior of every hyperparameter, a logarithm."""
BOUNDS = (-9.0, 8.0)
STEPS = 40


@dataclass(frozen=True)
class Described:
    """Features of maps: [N, F] of each part, and the trend's [N, 5]."""

    coarse: Array
    fine: Array
    trend: Array

    def __getitem__(self, rows: NDArray[np.integer]) -> Described:
        return Described(self.coarse[rows], self.fine[rows], self.trend[rows])

    def __len__(self) -> int:
        return len(self.trend)


class Descriptor:
    """Turns full_NLH into features for one shape and its scores; groups[part][name] is a b_g over the part's features."""

    def __init__(self, shape: ModelShape, scores: Mapping[str, ScoreTables]) -> None:
        self.shape = shape
        heads = shape.total_heads
        damage = {name: np.array(scores[name].heads).ravel().clip(0) for name in sorted(scores)}
        self._damage_SH = np.array([row / (row.sum() or 1.0) for row in damage.values()])
        num_kv, layers = shape.num_layers * shape.num_kv_heads, shape.num_layers
        sums = 2 * len(damage)
        self.groups: dict[str, dict[str, Array]] = {
            "coarse": _blocks({"sums": sums, "share": 2, "layers": layers}),
            "fine": _blocks({"heads": heads, "touched": num_kv, "whole": num_kv, "counts": layers}),
        }
        rest = np.zeros(2 * num_kv + layers)
        for name, row in zip(damage, self._damage_SH, strict=True):
            self.groups["fine"][f"heads by {name}"] = np.concatenate([row, rest])

    def describe(self, full_NLH: NDArray[np.bool_]) -> Described:
        """Features of maps."""
        bits_NLH = full_NLH.astype(np.float64)
        count, (layers, heads) = len(bits_NLH), bits_NLH.shape[1:]
        groups_NLGS = bits_NLH.reshape(count, layers, self.shape.num_kv_heads, -1)
        share_NL, flat_NH = bits_NLH.mean(2), bits_NLH.reshape(count, layers * heads)
        sums_NS = (1 - flat_NH) @ self._damage_SH.T
        logs_NS = np.log(sums_NS + LEAST_SUM) / 2
        share_N1 = flat_NH.mean(1, keepdims=True)
        log_N1 = np.log(share_N1 + 0.01)
        touched, whole = groups_NLGS.max(3), groups_NLGS.min(3)
        return Described(
            np.hstack([3 * sums_NS, logs_NS, share_N1, log_N1 / 3, np.sqrt(share_NL)]),
            np.hstack([flat_NH, touched.reshape(count, -1), whole.reshape(count, -1), share_NL]),
            np.hstack([np.ones_like(share_N1), share_N1, share_N1**2, np.sqrt(share_N1), log_N1]),
        )


def _blocks(sizes: Mapping[str, int]) -> dict[str, Array]:
    """For each name its block of consecutive features, each feature as the block's mean."""
    total, start, found = sum(sizes.values()), 0, {}
    for name, size in sizes.items():
        found[name] = np.zeros(total)
        found[name][start : start + size] = 1 / max(1, size)
        start += size
    return found


@dataclass(frozen=True)
class Hyperparameters:
    """Logarithms: of each group's inverse squared length scale by part and name, of the parts' variances, of the noise's."""

    scales: dict[str, dict[str, float]]
    variances: dict[str, float]
    noise: float

    @classmethod
    def start(cls, descriptor: Descriptor) -> Hyperparameters:
        """Where fitting begins."""
        scales = {
            part: dict.fromkeys(names, 0.0 if part == "coarse" else 1.0)
            for part, names in descriptor.groups.items()
        }
        return cls(scales, {"coarse": 0.0, "fine": -2.0}, -4.0)

    def flat(self) -> Array:
        """All as one vector, in the order of `like`."""
        rows = [self.scales[part][name] for part in PARTS for name in self.scales[part]]
        return np.array([*rows, *(self.variances[part] for part in PARTS), self.noise])

    def like(self, values: Array) -> Hyperparameters:
        """The vector's values under these names."""
        left = iter(values.tolist())
        scales = {part: {name: next(left) for name in self.scales[part]} for part in PARTS}
        return Hyperparameters(scales, {part: next(left) for part in PARTS}, next(left))

    def weights(self, descriptor: Descriptor, part: str) -> Array:
        """w_f of a part."""
        groups = descriptor.groups[part]
        rows = [np.exp(a) * groups[name] for name, a in self.scales[part].items()]
        weight_F: Array = np.sum(rows, axis=0)
        return weight_F


def fit(
    descriptor: Descriptor, maps: Described, figure_N: Array, *, rows: int, seed: int
) -> Hyperparameters:
    """Hyperparameters of a figure of mean 0 and deviation 1, by so many maps at the most."""
    draw = np.random.default_rng(seed)
    chosen = draw.permutation(len(maps))[:rows]
    likelihood = _Likelihood(descriptor, maps[chosen], figure_N[chosen])
    start = likelihood.start.flat()
    found = minimize(
        likelihood,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[BOUNDS] * len(start),
        options={"maxiter": STEPS},
    )
    return likelihood.start.like(found.x)


class _Likelihood:
    """Negative logarithm of marginal likelihood and prior, with its gradient."""

    def __init__(self, descriptor: Descriptor, maps: Described, figure_N: Array) -> None:
        self.start = Hyperparameters.start(descriptor)
        self._figure_N = figure_N
        self._trend_NN = TREND_VARIANCE * maps.trend @ maps.trend.T
        self._squares: dict[str, list[Array]] = {}
        for part in PARTS:
            x_NF = getattr(maps, part)
            weights = [descriptor.groups[part][name] for name in self.start.scales[part]]
            self._squares[part] = [squared_distances(x_NF, x_NF, w) for w in weights]

    def __call__(self, flat: Array) -> tuple[float, Array]:
        now, count = self.start.like(flat), len(self._figure_N)
        kernels, slopes = {}, {}
        for part in PARTS:
            scales = np.exp(list(now.scales[part].values()))
            squares = sum(a * r for a, r in zip(scales, self._squares[part], strict=True))
            variance = np.exp(now.variances[part])
            kernels[part], slopes[part] = variance * matern(squares), variance * _slope(squares)
        noise = np.exp(now.noise)
        factor = cho_factor(
            kernels["coarse"] + kernels["fine"] + self._trend_NN + noise * np.eye(count), lower=True
        )
        alpha_N = cho_solve(factor, self._figure_N)
        value = 0.5 * self._figure_N @ alpha_N + np.log(np.diag(factor[0])).sum()
        # d value = 0.5 tr((K^-1 - alpha alpha^T) dK)
        lever_NN = cho_solve(factor, np.eye(count)) - np.outer(alpha_N, alpha_N)
        gradient = []
        for part in PARTS:
            inner = lever_NN * slopes[part]
            for a, r in zip(now.scales[part].values(), self._squares[part], strict=True):
                gradient.append(0.5 * np.exp(a) * np.vdot(inner, r))
        gradient += [0.5 * np.vdot(lever_NN, kernels[part]) for part in PARTS]
        gradient.append(0.5 * noise * np.trace(lever_NN))
        return value + 0.5 * float(((flat / PRIOR) ** 2).sum()), np.array(
            gradient
        ) + flat / PRIOR**2


class Process:
    """What figures of measured maps say of others. Columns of figure_MK share hyperparameters, which are those of the first."""

    def __init__(
        self, descriptor: Descriptor, maps: Described, figure_MK: Array, hyper: Hyperparameters
    ) -> None:
        self.maps, self._hyper = maps, hyper
        self._weights = {part: hyper.weights(descriptor, part) for part in PARTS}
        self._norms = {part: getattr(maps, part) ** 2 @ self._weights[part] for part in PARTS}
        self._mean_K, deviation_K = figure_MK.mean(0), figure_MK.std(0)
        self._deviation_K = np.where(deviation_K > 0, deviation_K, 1.0)
        kernel_MM = self._kernel(maps)
        kernel_MM[np.diag_indices(len(maps))] += np.exp(hyper.noise)
        self._factor = cho_factor(kernel_MM, lower=True, overwrite_a=True)
        self._alpha_MK = cho_solve(self._factor, (figure_MK - self._mean_K) / self._deviation_K)

    def predict(self, maps: Described, products: Mapping[str, Array] | None = None) -> Array:
        """The expected figures of maps, [N, K]. products: those of predict_together, where they are known."""
        alpha_MK, deviation_K = self._alpha_MK, self._deviation_K
        figure_NK: Array = self._kernel(maps, products) @ alpha_MK * deviation_K + self._mean_K
        return figure_NK

    def deviation(self, maps: Described) -> Array:
        """The standard deviation of the first figure of maps, noise left out, [N]."""
        solved_MN = solve_triangular(self._factor[0], self._kernel(maps).T, lower=True)
        prior = sum(np.exp(v) for v in self._hyper.variances.values())
        prior_N = prior + TREND_VARIANCE * (maps.trend**2).sum(1)
        variance_N = (prior_N - (solved_MN**2).sum(0)).clip(0)
        deviation_N: Array = np.sqrt(variance_N) * self._deviation_K[0]
        return deviation_N

    def weighted(self, maps: Described, part: str) -> Array:
        """Features of a part times -2 w_f, [N, F]."""
        weighted_NF: Array = getattr(maps, part) * (-2 * self._weights[part])
        return weighted_NF

    def _kernel(self, maps: Described, products: Mapping[str, Array] | None = None) -> Array:
        """Covariances with the measured maps, [N, M]."""
        found: Array = TREND_VARIANCE * maps.trend @ self.maps.trend.T
        for part in PARTS:
            weight_F, x_NF = self._weights[part], getattr(maps, part)
            squares = (
                self.weighted(maps, part) @ getattr(self.maps, part).T
                if products is None
                else products[part]
            )
            squares = squares + (x_NF**2 @ weight_F)[:, None] + self._norms[part]
            found += np.exp(self._hyper.variances[part]) * matern(squares)
        return found


def predict_together(processes: Sequence[Process], maps: Described) -> list[Array]:
    """What processes of the same measured maps say of others, [N, K] each, reading the measured ones once for all of them."""
    products = {}
    for part in PARTS:
        rows = np.vstack([process.weighted(maps, part) for process in processes])
        measured_MF = getattr(processes[0].maps, part)
        products[part] = np.split(rows @ measured_MF.T, len(processes))
    return [
        process.predict(maps, {part: products[part][place] for part in PARTS})
        for place, process in enumerate(processes)
    ]


def squared_distances(x_NF: Array, y_MF: Array, weight_F: Array) -> Array:
    """sum_f w_f (x_f - y_f)^2, [N, M]."""
    cross = (x_NF * weight_F) @ y_MF.T
    found = (x_NF**2 @ weight_F)[:, None] + (y_MF**2 @ weight_F) - 2 * cross
    return found.clip(0)


def matern(squares: Array) -> Array:
    """The Matern 5/2 kernel at squared distances."""
    root = np.sqrt(5 * squares.clip(0))
    found: Array = (1 + root + root**2 / 3) * np.exp(-root)
    return found


def _slope(squares: Array) -> Array:
    """Its derivative by the squared distance."""
    root = np.sqrt(5 * squares.clip(0))
    found: Array = -5 / 6 * (1 + root) * np.exp(-root)
    return found
