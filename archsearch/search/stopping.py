"""When a search begins nothing more: its trials, its minutes, its tokens, or no gain in hypervolume, whichever comes first.

Minutes and tokens are shared by the rungs: of R rungs the first may use 1/R, the first two 2/R and so on, so that what one
leaves over the next ones have, and candidates without training cannot use up all of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import RunConfig, SearchConfig
from .front import dominated_share, scaled_losses
from .proposals.base import Evaluated

Limit = Callable[[Sequence[Evaluated]], str | None]
"""From what is over, in the order in which it ended: why nothing more is to be begun, None where nothing speaks against it."""

SAVE_SECONDS = 5.0
"""How often the time used is written down at most; it is at the end of every candidate too."""
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Stop:
    """Why a study has fewer candidates than were wanted, and how many were begun."""

    reason: str
    begun: int
    wanted: int

    def __str__(self) -> str:
        return f"{self.reason}: {self.begun} of {self.wanted} candidates"


LIMITS = ("trials", "max_retries", "max_minutes", "max_tokens", "patience", "min_gain")
"""Fields of a config's section search that end it. With a higher one it goes on, but for min_gain: with a lower one."""


def limits_of(config: SearchConfig) -> dict[str, Any]:
    """The limits of a search by name."""
    return {name: getattr(config, name) for name in LIMITS}


def changed_limits(old: Mapping[str, Any], config: SearchConfig) -> tuple[list[str], list[str]]:
    """The limits that allow more than the old ones did, and those that allow less; one that old lacks has not changed."""
    more, less = list[str](), list[str]()
    for name, now in limits_of(config).items():
        was = old.get(name, now)
        if was != now:
            is_more = now is None or (was is not None and now > was)
            (more if is_more != (name == "min_gain") else less).append(name)
    return more, less


class Clock:
    """The seconds of a search by part, the first rung's search being part 0, those of earlier calls included.

    save is called with them now and then.
    """

    def __init__(self, used: Sequence[float], save: Callable[[list[float]], None]) -> None:
        self._used, self._save, self._part = list(used), save, 0
        self._start = self._saved = time.monotonic()

    def begin(self, part: int) -> None:
        """Counts for that part from here on."""
        self._settle()
        self._part = part

    def seconds(self) -> float:
        """The seconds of the part that runs and of all before it: what later ones took in an earlier call is theirs."""
        self._settle()
        if self._start - self._saved >= SAVE_SECONDS:
            self.save()
        return sum(self._used[: self._part + 1])

    def left(self, minutes: float, share: float) -> float:
        """Seconds until the parts so far have had this share of minutes, or all parts together all of them."""
        return min(60 * minutes * share - self.seconds(), 60 * minutes - sum(self._used))

    def save(self) -> None:
        """Writes them down."""
        self._settle()
        self._saved = self._start
        self._save(list(self._used))

    def _settle(self) -> None:
        now = time.monotonic()
        self._used += [0.0] * (self._part + 1 - len(self._used))
        self._used[self._part] += now - self._start
        self._start = now


def never(history: Sequence[Evaluated]) -> str | None:
    """The limit of a search that has none."""
    return None


def time_limit(config: SearchConfig, clock: Clock, share: float) -> Limit:
    """Ends after this share of search.max_minutes."""
    minutes = config.max_minutes
    if minutes is None:
        return never
    reason = f"search.max_minutes {minutes:g}"
    return lambda history: reason if clock.left(minutes, share) <= 0 else None


def patience_limit(config: SearchConfig, num_seeds: int) -> Limit:
    """Ends when the last search.patience candidates, none of them a seed, added no hypervolume beyond search.min_gain.

    While nothing is feasible it does not end: there is no volume yet that could grow.
    """
    patience = config.patience
    if patience is None:
        return never
    reason = _patience(config)

    def limit(history: Sequence[Evaluated]) -> str | None:
        if len(history) < num_seeds + patience:
            return None
        gain = hypervolume_gain(config, history, patience)
        return reason if gain is not None and gain <= config.min_gain + _ROUNDING else None

    return limit


def hypervolume_gain(config: SearchConfig, history: Sequence[Evaluated], last: int) -> float | None:
    """What the last candidates of history add to the dominated share of the box that spans all; None while none is feasible."""
    done = [e for e in history if e.values is not None]
    kept = np.array([all(value <= 0 for value in e.violations) for e in done], dtype=bool)
    if not kept.any():
        return None
    losses = scaled_losses(config.objectives, [e.values or () for e in done])
    before = kept.copy()
    before[sum(e.values is not None for e in history[:-last]) :] = False
    whole = dominated_share(losses[kept])
    return whole - (dominated_share(losses[before]) if before.any() else 0.0)


def standing(config: SearchConfig, history: Sequence[Evaluated]) -> str:
    """What the feasible candidates of history have come to: their hypervolume, or with one objective its best value."""
    done = [e for e in history if e.values is not None]
    kept = np.array([all(value <= 0 for value in e.violations) for e in done], dtype=bool)
    if not kept.any():
        return "nothing feasible yet"
    values = np.array([e.values for e in done], dtype=np.float64)
    if len(config.objectives) == 1:
        (objective,), own = config.objectives, values[kept, 0]
        best = own.min() if objective.direction == "minimize" else own.max()
        return f"{objective.metric} {best:.4g} at best"
    losses = scaled_losses(config.objectives, values.tolist())
    return f"hypervolume {dominated_share(losses[kept]):.4f}"


def first_of(*limits: Limit) -> Limit:
    """Ends when one of them does."""
    return lambda history: next((reason for end in limits if (reason := end(history))), None)


def affordable_candidates(
    config: RunConfig, rung: int, spent: int, groups: int, later: int = 0
) -> tuple[int, str] | None:
    """How many candidates a group of a rung may have by search.max_tokens, and what says so; None where it sets no bound.

    spent: tokens of all rungs before; later: what earlier calls have spent on those after it. What a candidate needs is known beforehand, so that the count is the same in every call.
    """
    most, price = config.search.max_tokens, candidate_tokens(config, rung)
    if most is None or not price:
        return None
    lengths = config.search.lengths
    left = min(most * (rung + 1) / len(lengths), most - later) - spent
    return max(0, math.floor(left / (price * groups) + 1e-9)), f"search.max_tokens {most}"


def candidate_tokens(config: RunConfig, rung: int) -> int:
    """Tokens of a candidate's training at a rung, which goes on from where its rate had not fallen yet at the one before.

    With a decay_share of 1 it goes on from the end of that.
    """
    lengths, share = config.search.lengths, config.distill.decay_share
    before = lengths[rung - 1] if rung else 0
    return lengths[rung] - (before if share == 1 else math.floor((1 - share) * before))


def ended_by_patience(config: SearchConfig, stop: Stop) -> bool:
    """Whether an earlier call ended so, by the rule of now: with several workers the order of then is not known any more."""
    return config.patience is not None and stop.reason == _patience(config)


def _patience(config: SearchConfig) -> str:
    return f"search.patience {config.patience}, no gain in hypervolume above {config.min_gain:g}"
