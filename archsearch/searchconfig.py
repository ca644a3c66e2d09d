"""The sections of a config that say how long candidates are trained, who goes on, and when a search ends; config.py has the others."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .textconfig import NonNegative, Positive, Section


class HalvingConfig(Section):
    """Who goes on to the next proxy: the lowest ranks of non-dominated sorting, and of the rank that does not fit as a whole
    those that add most hypervolume to it, one after the other."""

    keep: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of a proxy's candidates that go on."""
    bands: Positive = 4
    """Quantiles of the objective that is a cost, of all candidates; one where no objective is."""
    floor: NonNegative = 2
    """Candidates of each band that go on whatever their rank, its best ones; they count among those of keep, which they may exceed."""
    front: bool = True
    """From the second proxy on all of the front goes on, however large: candidates that were good enough once are mostly on it."""
    seeds: bool = True
    """The front of the seeds goes on too, so that the search is compared with them at their best."""


class FinalConfig(Section):
    """After the last proxy: the best points are trained further and measured on text and prompts that no trial saw.

    Prompts of probes.files and tasks of lm-eval are those of trials. pareto.json then holds these points alone, each metric
    with its confidence interval.
    """

    tokens: Positive | None = None
    """Distillation tokens in all, more than the last proxy's; without them there is no such stage."""
    max_points: Positive = 8
    """Most points of the front, and of the seeds' and the random control's, those that add most hypervolume."""
    sequences: Positive | None = None
    """Held-out sequences of each text, those behind the ones of trials; as many as these where not given."""
    prompts: Positive | None = None
    """Prompts of each kind and context, drawn anew; as many as probes.prompts where not given. Those of files are the same."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Of the intervals: Wilson's for shares of prompts; of the others by drawing sequences and prompts anew (bootstrap)."""
    resamples: Annotated[int, Field(ge=10)] = 1000
