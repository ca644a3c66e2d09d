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
    seeds: bool = True
    """The front of the seeds goes on too, so that the search is compared with them at their best."""
