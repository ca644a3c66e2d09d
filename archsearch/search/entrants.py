"""Who is evaluated in a study of a rung: seeds, maps to be proposed, those that go on, and the random control."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random

from ..config import RunConfig
from ..headmap import HeadMap, ModelShape
from .bounds import broken_bound
from .front import CONTROL, Candidate
from .promotion import Promotion
from .rung import Job, Say
from .samplers import derive_seed
from .seeds import Seed
from .space import full_head_range, random_map
from .stopping import Stop

_ENDS = ("all_full", "all_gdn")


@dataclass(frozen=True)
class Group:
    """What one study of a rung has to evaluate, those first that matter most."""

    jobs: Sequence[Job]
    control: bool = False
    promotion: Promotion | None = None
    """Whom of the rung before it goes on with; None at the first rung."""
    tokens_before: int = 0
    stop: Stop | None = None

    @property
    def wanted(self) -> bool:
        """Whether it needs a study."""
        pruned = self.promotion is not None and self.promotion.pruned
        return not self.control or bool(self.jobs or pruned)

    def within(self, count: int, reason: str, begun: Collection[int] = ()) -> Group:
        """With as many of its jobs as make count candidates together with those that were begun in an earlier call.

        These stay whatever the count, of the others the first; the rest is left out for that reason.
        """
        new = [job for job in self.jobs if job.candidate not in begun]
        left = {job.candidate for job in new[max(0, count - len(begun)) :]}
        if not left:
            return self
        jobs = [job for job in self.jobs if job.candidate not in left]
        numbers = {job.candidate for job in jobs}
        promotion = self.promotion and self.promotion.only(numbers, reason)
        wanted = len(self.jobs) if self.stop is None else self.stop.wanted
        return replace(self, jobs=jobs, promotion=promotion, stop=Stop(reason, len(jobs), wanted))


def repeats(candidates: Sequence[Candidate]) -> list[Job]:
    """Jobs for candidates of an earlier rung."""
    return [Job(c.candidate, c.head_map, c.source, c.also) for c in candidates]


def within_bounds(config: RunConfig, seeds: Sequence[Seed], say: Say) -> list[Seed]:
    """The seeds that meet every bound on a cost; the two ends stay, as what all others are compared with."""
    kept, left_out = [], []
    for seed in seeds:
        broken = broken_bound(seed.head_map, config.search.constraints, config.cost)
        if broken is None or seed.method in _ENDS:
            kept.append(seed)
        else:
            left_out.append(f"{seed.method} ({broken})")
    if left_out:
        say(f"seeds left out, outside search.constraints: {', '.join(left_out)}")
    return kept


def random_maps(shape: ModelShape, config: RunConfig, count: int) -> list[HeadMap]:
    """Different random maps within the bounds on costs, the same first ones whatever the count; fewer where there are no more."""
    found: dict[HeadMap, None] = {}
    bounds = config.search.constraints
    low, high = full_head_range(bounds, shape)
    for number in range(count):
        rng = Random(derive_seed(config.seed, CONTROL, number))
        for _ in range(64):
            head_map = random_map(shape, rng, low, high)
            if head_map not in found and broken_bound(head_map, bounds, config.cost) is None:
                found[head_map] = None
                break
    return list(found)
