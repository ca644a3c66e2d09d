"""What chooses head maps: a proposal for each candidate that is not given, from all that is known by then."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from optuna.distributions import BaseDistribution

from ...headmap import HeadMap


@dataclass(frozen=True)
class Evaluated:
    """A candidate whose evaluation is over. values: the objectives' in their order, None where it failed or was pruned.

    violations: how far outside each constraint it lies, 0 or less within.
    """

    candidate: int
    head_map: HeadMap
    values: tuple[float, ...] | None
    violations: tuple[float, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Proposal:
    """A head map to evaluate; params are the trial's parameters."""

    head_map: HeadMap
    params: Mapping[str, Any] = field(default_factory=dict)


class Proposals(Protocol):
    """Chooses the head maps of a search's first rung. One thread of the driver uses it."""

    @property
    def distributions(self) -> Mapping[str, BaseDistribution]:
        """The parameters of a trial, by name; none where a map is all that a trial has."""
        ...

    def propose(
        self, candidate: int, history: Sequence[Evaluated], busy: Collection[HeadMap]
    ) -> Proposal:
        """A map that is neither in history nor busy and meets the bounds that need no evaluation.

        history only grows from call to call, by candidate number where an earlier process evaluated them; busy are maps that run or are sure to.
        The same seed, candidate, history and busy maps give the same map, in every process. Raises ConfigError where none is left.
        """
        ...

    def describe(self, head_map: HeadMap) -> Mapping[str, Any]:
        """The parameters that stand for a map which was not proposed."""
        ...
