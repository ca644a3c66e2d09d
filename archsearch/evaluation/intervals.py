"""Confidence intervals of metrics by the bootstrap: sequences or prompts are drawn anew with replacement.

Percentiles of the resampled figures (Efron, 1979). They say how much a figure depends on which text and which prompts
were drawn, not how much it would differ after another training. Prompts that are all answered, or none, look the same however
they are drawn anew: the share that is answered is drawn from its posterior under Jeffreys' prior instead (Brown, Cai and
DasGupta, 2001), so that few prompts are never certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..data.niah import Probe
from .divergence import TeacherReference, divergence_by_sequence
from .retrieval import Answer, Place, answers, name_figures, summarize

Interval = tuple[float, float]
Samples = NDArray[np.float64]


class Bootstrap:
    """Resamples and their percentiles. The same seed draws the same sequences and prompts for every model."""

    def __init__(self, resamples: int, confidence: float, seed: int) -> None:
        self._resamples, self._confidence, self._seed = resamples, confidence, seed

    def of_sequences(self, values: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
        """Intervals of the means of values, one a sequence; all sequences are of one length."""
        return {
            name: self._interval(
                self._ratios(np.asarray(own), np.ones(len(own))), float(np.mean(own))
            )
            for name, own in values.items()
        }

    def of_answers(self, found: Mapping[Place, Sequence[Answer]]) -> dict[str, Interval]:
        """Intervals of what summarize makes of answers. Prompts are drawn anew within their kind, group and context."""
        samples = {}
        for stream, place in enumerate(sorted(found)):
            own = found[place]
            nll, tokens, match = (
                np.array(column, dtype=np.float64) for column in zip(*own, strict=True)
            )
            samples[place] = {
                "nll": self._ratios(nll, tokens, stream),
                "match": self._shares(match, stream),
            }
        named = [
            name_figures(
                {
                    p: {key: float(values[i]) for key, values in own.items()}
                    for p, own in samples.items()
                }
            )
            for i in range(self._resamples)
        ]
        measured = summarize(found) if samples else {}
        return {
            name: self._interval(np.array([row[name] for row in named]), value)
            for name, value in measured.items()
        }

    def _ratios(self, values: Samples, weights: Samples, stream: int = 0) -> Samples:
        """Sum of values over sum of weights, of each resample; streams are independent of each other."""
        rng = np.random.default_rng([self._seed, stream])
        chosen = rng.integers(len(values), size=(self._resamples, len(values)))
        ratios: Samples = values[chosen].sum(1) / weights[chosen].sum(1)
        return ratios

    def _shares(self, match: Samples, stream: int) -> Samples:
        """The share of prompts that are answered, of each resample; match is 1 where one is, else 0."""
        rng = np.random.default_rng([self._seed, stream, 1])
        hits = match.sum()
        shares: Samples = rng.beta(hits + 0.5, len(match) - hits + 0.5, size=self._resamples)
        return shares

    def _interval(self, samples: Samples, value: float) -> Interval:
        """The percentiles, and what was measured within them."""
        outside = (1 - self._confidence) / 2
        low, high = np.quantile(samples, [outside, 1 - outside])
        return float(min(low, value)), float(max(high, value))


class MeasureWithIntervals:
    """Divergence on several texts, by what follows their metrics' names, and answers to probes; each with its interval."""

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
        """Metrics as of divergence and retrieval, and the lower and upper end of each."""
        rows = {
            f"{name}{suffix}": values.tolist()
            for suffix, reference in self._references.items()
            for name, values in divergence_by_sequence(student, reference).items()
        }
        metrics = {name: float(np.mean(values)) for name, values in rows.items()}
        found = answers(student, self._probes, batch_tokens=self._batch_tokens)
        intervals = self._bootstrap.of_sequences(rows) | self._bootstrap.of_answers(found)
        return metrics | summarize(found), intervals
