"""Bayesian linear regression of a figure on a map's features, closed form, with posterior draws. Numpy only.

The figure is bent by u -> log(1 + c u) / log(1 + c), u from 0 at its lowest to 1 at its highest; c, the variances of the feature
blocks and that of the noise are the likeliest of a small grid. Draws come by Matheron's rule: a draw from the prior,
corrected by what it misses of the data.

Shapes: N evaluated maps, F features, S draws, P other maps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .features import BLOCKS
from .units import Row

BENDS = (0.0, 4.0, 40.0)
"""Values of c; 0 is a straight line."""
SCALES = tuple(itertools.product((1.0, 3.0), (0.03, 0.1, 0.3, 1.0), (0.03, 0.1, 0.3)))
"""Standard deviations of what each block of features adds, in those of the figure, in order of BLOCKS."""
NOISES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Variances of the noise, in that of the figure."""


@dataclass(frozen=True)
class Settings:
    """What the grid is searched for: a bend, a scale a block, and the noise."""

    bend: float = 0.0
    scales: tuple[float, ...] = (1.0, 0.1, 0.1)
    noise: float = 0.003


@dataclass(frozen=True)
class Bend:
    """The bent figure and back."""

    low: float
    width: float
    bend: float

    @classmethod
    def of(cls, values_N: Row, bend: float) -> Bend:
        """The bend over the range of values."""
        low, high = float(values_N.min()), float(values_N.max())
        return cls(low, (high - low) or 1.0, bend)

    def apply(self, values: Row) -> Row:
        """Bent values."""
        u = (values - self.low) / self.width
        return np.log1p(self.bend * u) / np.log1p(self.bend) if self.bend else u

    def undo(self, bent: Row) -> Row:
        """Values of bent ones."""
        u = np.expm1(bent * np.log1p(self.bend)) / self.bend if self.bend else bent
        return self.low + self.width * u

    def log_slope(self, values: Row) -> float:
        """Sum of the logarithms of the bend's slope, for likelihoods of one figure bent differently."""
        if not self.bend:
            return 0.0
        u = (values - self.low) / self.width
        slopes = self.bend / (1 + self.bend * u) / np.log1p(self.bend)
        return float(np.log(slopes).sum())


@dataclass(frozen=True)
class Surrogate:
    """Posterior draws of the weights of features. predict's figures are in the unit of the values."""

    bend: Bend
    mean: float
    deviation: float
    centre_F: Row
    weights_FS: Row

    @classmethod
    def fit(
        cls,
        features_NF: Row,
        values_N: Row,
        block_F: NDArray[np.int64],
        settings: Settings,
        draws: int,
        rng: np.random.Generator,
    ) -> Surrogate:
        """Fits N values; as many posterior draws as asked for."""
        bend = Bend.of(values_N, settings.bend)
        bent = bend.apply(values_N)
        mean, deviation = float(bent.mean()), float(bent.std()) or 1.0
        y_N = (bent - mean) / deviation
        scale_F = np.array(settings.scales)[block_F]
        # Centred, as the values are: the level is learnt freely, without a prior.
        centre_F = features_NF.mean(axis=0)
        scaled_NF = (features_NF - centre_F) * scale_F
        prior_FS = rng.standard_normal((len(scale_F), draws))
        noise_NS = np.sqrt(settings.noise) * rng.standard_normal((len(y_N), draws))
        missed_NS = y_N[:, None] - scaled_NF @ prior_FS - noise_NS
        cov_NN = scaled_NF @ scaled_NF.T
        cov_NN[np.diag_indices_from(cov_NN)] += settings.noise
        weights_FS = prior_FS + scaled_NF.T @ np.linalg.solve(cov_NN, missed_NS)
        return cls(bend, mean, deviation, centre_F, weights_FS * scale_F[:, None])

    def draws(self, features_PF: Row) -> Row:
        """What each draw says of other maps, [P, S]."""
        return self.bend.undo(
            self.mean + self.deviation * ((features_PF - self.centre_F) @ self.weights_FS)
        )


def choose_settings(features_NF: Row, values_N: Row, block_F: NDArray[np.int64]) -> Settings:
    """The settings of the grid under which N values are likeliest."""
    bends = [Bend.of(values_N, bend) for bend in BENDS]
    bent = [bend.apply(values_N) for bend in bends]
    deviations = [float(b.std()) or 1.0 for b in bent]
    y_NB = np.stack([(b - b.mean()) / d for b, d in zip(bent, deviations, strict=True)], axis=1)
    # Densities of one figure that is bent differently compare after the slope of the bend.
    slope_B = np.array([b.log_slope(values_N) for b in bends]) - len(values_N) * np.log(deviations)
    centred_NF = features_NF - features_NF.mean(axis=0)
    parts = [centred_NF[:, block_F == block] for block in range(len(BLOCKS))]
    squares = [part @ part.T for part in parts]
    best, chosen = -np.inf, Settings()
    for scales in SCALES:
        cov_NN = sum(scale**2 * square for scale, square in zip(scales, squares, strict=True))
        eigenvalues_N, vectors_NN = np.linalg.eigh(cov_NN)
        square_NB = (vectors_NN.T @ y_NB) ** 2
        for noise in NOISES:
            spread_N1 = (np.maximum(eigenvalues_N, 0) + noise)[:, None]
            likelihood_B = slope_B - 0.5 * (square_NB / spread_N1 + np.log(spread_N1)).sum(axis=0)
            place = int(likelihood_B.argmax())
            if likelihood_B[place] > best:
                best, chosen = likelihood_B[place], Settings(BENDS[place], scales, noise)
    return chosen
