"""Proposals by search.representation and search.sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...config import RunConfig
from ...headmap import ModelShape
from ..seeds import ScoreTables
from ..space import RankedSpace
from .base import Proposals
from .guided import GuidedProposals
from .ranked import RankedProposals
from .unguided import RandomProposals

BIT_SAMPLERS: dict[
    str, Callable[[RunConfig, ModelShape, Mapping[str, ScoreTables], str], Proposals]
] = {
    "guided": GuidedProposals,
    "random": RandomProposals,
}
"""What chooses bits, one a head or a KV group; samplers.SAMPLERS has what chooses the numbers of `ranked`."""


def make_proposals(
    config: RunConfig, shape: ModelShape, scores: Mapping[str, ScoreTables], name: str
) -> Proposals:
    """What chooses the head maps of a search. scores: the run's tables by method; name: the study's, from which seeds derive."""
    if config.search.representation == "ranked":
        space = RankedSpace(shape, scores, config.search.constraints, config.cost)
        return RankedProposals(config, space, name)
    return BIT_SAMPLERS[config.search.sampler](config, shape, scores, name)
