"""Confidence intervals of metrics. They say how much a figure depends on which text and which prompts were drawn, not
how much it would differ after another training.

Means over sequences and nats of answers by the bootstrap: sequences or prompts are drawn anew with replacement, and the
interval is between percentiles of the resampled figures (Efron, 1979). Where all of them agree it says nothing, and there is none.

Shares of prompts as in shares.py: that has a width also where all prompts are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..data.niah import Probe
from .divergence import TeacherReference, divergence_by_sequence
from .retrieval import (
    Answer,
    Place,
    answers,
    figure_name,
    general_places,
    name_figures,
    summarize,
)
from .shares import Interval, mean_interval, share_interval

Samples = NDArray[np.float64]


class Bootstrap:
    """Resamples and their percentiles. The same seed draws the same sequences and prompts for every model."""

    def __init__(self, resamples: int, confidence: float, seed: int) -> None:
        self._resamples, self._confidence, self._seed = resamples, confidence, seed

    def of_sequences(self, values: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
        """Intervals of the means of values, one a sequence; all sequences are of one length."""
        return _real(
            {
                name: self._interval(self._ratios(np.asarray(own), np.ones(len(own))))
                for name, own in values.items()
            }
        )

    def of_answers(self, found: Mapping[Place, Sequence[Answer]]) -> dict[str, Interval]:
        """Intervals of what summarize makes of answers. Prompts are drawn anew within their kind, group and context."""
        return self._of_nats(found) | self._of_matches(found)

    def _of_nats(self, found: Mapping[Place, Sequence[Answer]]) -> dict[str, Interval]:
        samples = {}
        for stream, place in enumerate(sorted(found)):
            nll, tokens, _ = (
                np.array(column, dtype=np.float64) for column in zip(*found[place], strict=True)
            )
            samples[place] = self._ratios(nll, tokens, stream)
        named = [
            name_figures({place: {"nll": float(own[i])} for place, own in samples.items()})
            for i in range(self._resamples)
        ]
        names = named[0] if samples else {}
        return _real(
            {name: self._interval(np.array([row[name] for row in named])) for name in names}
        )

    def _of_matches(self, found: Mapping[Place, Sequence[Answer]]) -> dict[str, Interval]:
        shares = {place: fmean(answer.match for answer in own) for place, own in found.items()}
        intervals = {
            place: share_interval(sum(a.match for a in own), len(own), self._confidence)
            for place, own in found.items()
        }
        named = {figure_name(place, "match"): ends for place, ends in intervals.items()}
        if general := general_places(found):
            own = [shares[place] for place in general]
            named["general_match"] = mean_interval(own, [intervals[place] for place in general])
        return named

    def _ratios(self, values: Samples, weights: Samples, stream: int = 0) -> Samples:
        """Sum of values over sum of weights, of each resample; streams are independent of each other."""
        rng = np.random.default_rng([self._seed, stream])
        chosen = rng.integers(len(values), size=(self._resamples, len(values)))
        ratios: Samples = values[chosen].sum(1) / weights[chosen].sum(1)
        return ratios

    def _interval(self, samples: Samples) -> Interval:
        outside = (1 - self._confidence) / 2
        low, high = np.quantile(samples, [outside, 1 - outside])
        return float(low), float(high)


def _real(intervals: Mapping[str, Interval]) -> dict[str, Interval]:
    """Those with a width: one of none would say that a figure is certain, where too little was seen to tell."""
    return {name: (low, high) for name, (low, high) in intervals.items() if low < high}


class MeasureWithIntervals:
    """Divergence on several texts, by what follows their metrics' names, and answers to probes; each with its interval, if it has one."""

    def __init__(
        self,
        references: Mapping[str, TeacherReference],
        probes: Sequence[Probe],
        bootstrap: Bootstrap,
        *,
        batch_tokens: int,
    ) -> None:
        self._references, self._probes = references, probes
        self._bootstrap, self._batch_tokens = bootstrap, batch_tokens

    def __call__(
        self, student: HydraHeadForCausalLM
    ) -> tuple[dict[str, float], dict[str, Interval]]:
        """Metrics as of divergence and retrieval, and the lower and upper end of each that has an interval."""
        rows = {
            f"{name}{suffix}": values.tolist()
            for suffix, reference in self._references.items()
            for name, values in divergence_by_sequence(student, reference).items()
        }
        metrics = {name: float(np.mean(values)) for name, values in rows.items()}
        found = answers(student, self._probes, batch_tokens=self._batch_tokens)
        intervals = self._bootstrap.of_sequences(rows) | self._bootstrap.of_answers(found)
        return metrics | summarize(found), intervals
