"""What is known by the time of a proposal, and what a map would be expected to add to the front. Numpy only.

Shapes: N evaluated maps, P other maps, U units, D objectives, C measured constraints, S posterior draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..front import MARGIN
from .archive import Evidence
from .features import Features
from .improvement import LOGISTIC, Boxes, front_rows
from .surrogate import Settings, Surrogate, choose_settings
from .units import Bits, Costs, Row

DRAWS = 24
MOST_FITTED = 400
"""Maps that a surrogate is fitted to; of more, the latest half and every so many of the others."""
MOST_COMPARED = 200
"""Maps by which settings are chosen."""
MIN_SIZE = 6
"""Fewer evaluated maps than these say nothing: scores alone choose."""
REFITS = 1.3
"""Settings are chosen anew each time there are so many times as many maps."""


class SettingsMemory:
    """Settings of each surrogate: chosen from the first maps of a history, so that they follow from it alone."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...]], Settings] = {}

    def settings(
        self, name: str, features: Features, evidence: Evidence, values_N: Row
    ) -> Settings:
        """Settings for the values of that name."""
        size = MIN_SIZE
        while size * REFITS <= len(values_N):
            size = int(np.ceil(size * REFITS))
        size = min(size, len(values_N))
        rows = np.linspace(0, size - 1, min(size, MOST_COMPARED)).astype(int)
        key = (name, evidence.candidates[:size])
        if key not in self._known:
            self._known = {k: v for k, v in self._known.items() if k[0] != name}
            known = features.of(evidence.shares_NU[rows])
            self._known[key] = choose_settings(known, values_N[rows], features.block_F)
        return self._known[key]


class Screen:
    """The surrogates and the front of one proposal.

    analytic names the cost of each objective that follows from the map, None where it is measured. busy are maps in
    flight: they count as if they had come out as expected.
    """

    def __init__(
        self,
        features: Features,
        costs: Costs,
        analytic: Sequence[tuple[str, float] | None],
        evidence: Evidence,
        busy_PU: Bits,
        memory: SettingsMemory,
        rng: np.random.Generator,
    ) -> None:
        self._features, self._costs, self._analytic = features, costs, analytic
        measured = {
            f"objective {place}": evidence.losses_ND[:, place]
            for place, known in enumerate(analytic)
            if known is None
        }
        bounds = {f"constraint {n}": values for n, values in enumerate(evidence.violations_NC.T)}
        models = _fit(features, evidence, measured | bounds, memory, rng)
        self._models = {name: models[name] for name in measured}
        self._bounds = [models[name] for name in bounds]
        self._low_D = evidence.losses_ND.min(axis=0)
        width_D = evidence.losses_ND.max(axis=0) - self._low_D
        self._width_D = np.where(width_D > 0, width_D, 1.0)
        scaled = (evidence.losses_ND[evidence.feasible_N] - self._low_D) / self._width_D
        front = front_rows(scaled)
        self.front_PU = evidence.shares_NU[evidence.feasible_N][front] > 0.5
        """The front's maps; units that are partly full attention by the larger part."""
        expected = self.losses(busy_PU)[0]
        reference_D = np.full(len(analytic), 1 + MARGIN)
        self._boxes = Boxes.of(np.concatenate([scaled[front], expected]), reference_D)

    def losses(self, full_PU: Bits) -> tuple[Row, Row]:
        """Expected losses and their deviations, in units of the range seen, [P, D] each."""
        return self._losses(full_PU, self._features.of(full_PU.astype(np.float64)))

    def _losses(self, full_PU: Bits, features_PF: Row) -> tuple[Row, Row]:
        means, deviations = [], []
        costs = self._costs.of(full_PU)
        for place, known in enumerate(self._analytic):
            if known is None:
                draws_PS = self._models[f"objective {place}"].draws(features_PF)
                means.append(draws_PS.mean(axis=1))
                deviations.append(draws_PS.std(axis=1))
            else:
                means.append(known[1] * costs[known[0]])
                deviations.append(np.zeros(len(full_PU)))
        mean_PD, deviation_PD = np.stack(means, axis=1), np.stack(deviations, axis=1)
        return (mean_PD - self._low_D) / self._width_D, deviation_PD / self._width_D

    def gains(self, full_PU: Bits) -> Row:
        """Expected gain in hypervolume times the chance to meet the constraints, [P]."""
        features_PF = self._features.of(full_PU.astype(np.float64))
        gains_P = self._boxes.gains(*self._losses(full_PU, features_PF))
        for model in self._bounds:
            draws_PS = model.draws(features_PF)
            scale_P = LOGISTIC * draws_PS.std(axis=1) + 1e-12
            gains_P = gains_P / (1 + np.exp(np.clip(draws_PS.mean(axis=1) / scale_P, -50, 50)))
        return gains_P

    def effects(self) -> Row:
        """What replacing each unit alone does, by every draw of every surrogate, [draws, U]."""
        models = [*self._models.values(), *self._bounds]
        if not models:
            return np.zeros((1, self.front_PU.shape[1]))
        return np.concatenate([self._features.effects(model.weights_FS) for model in models])


def _fit(
    features: Features,
    evidence: Evidence,
    figures: Mapping[str, Row],
    memory: SettingsMemory,
    rng: np.random.Generator,
) -> dict[str, Surrogate]:
    """A surrogate of each figure, [N], by name."""
    rows = _fitted_rows(len(evidence.shares_NU))
    features_NF = features.of(evidence.shares_NU[rows])
    found = {}
    for name, values_N in figures.items():
        settings = memory.settings(name, features, evidence, values_N)
        found[name] = Surrogate.fit(
            features_NF, values_N[rows], features.block_F, settings, DRAWS, rng
        )
    return found


def _fitted_rows(count: int) -> NDArray[np.int64]:
    if count <= MOST_FITTED:
        return np.arange(count)
    late = MOST_FITTED // 2
    early = np.linspace(0, count - late - 1, MOST_FITTED - late).astype(int)
    return np.concatenate([early, np.arange(count - late, count)])
