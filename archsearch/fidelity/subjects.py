"""Which head maps a study trains long: good ones of one FA share, hard to tell apart, and others at shares of all sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, product
from random import Random

from ..config import SeedConfig, SeedMethod
from ..errors import ConfigError
from ..headmap import Head, HeadMap, ModelShape
from ..search.front import Candidate
from ..search.seeds import SELECTORS, ScoreTables, num_full_heads, ranks, seed_maps
from .records import Group, Subject

GOOD_SELECTORS: tuple[SeedMethod, ...] = (
    "blend",
    "replacement_kl",
    "causal",
    "replacement_nll",
    "leave_one_in",
    "attribution",
    "retrieval_heads",
    "causal_per_layer",
)
"""Those that choose single heads by a score, as far as the run has it."""
MIXED_SELECTORS: tuple[SeedMethod, ...] = (
    "replacement_kl",
    "even_layers",
    "blend",
    "random",
    "causal",
    "causal_groups",
    "replacement_kl_groups",
)
NEAR_SHARE = 1.5
"""A front's map counts among the good ones if its FA share is within this factor of theirs."""
BASE_SHARE = 0.5
"""Most of the good maps that are not swaps around others."""
_TRIES = 64


class TooManyMaps(ConfigError):
    """There are not as many maps as are asked for; found says how many of each group there are."""

    def __init__(self, message: str, found: Mapping[Group, int]) -> None:
        super().__init__(message)
        self.found = found


def choose_subjects(
    shape: ModelShape,
    scores: Mapping[str, ScoreTables],
    front: Sequence[Candidate],
    *,
    share: float,
    counts: Mapping[Group, int],
    shares: Sequence[float],
    seed: int,
    kept: Sequence[Subject] = (),
) -> list[Subject]:
    """Different head maps, counts of each group at the most; those in `kept` come first and count.

    The good ones have as many FA heads as share asks for: the front's nearest maps, brought to that number, what the
    selectors choose, and swaps of contested heads around both. The mixed ones are spread over the front's FA shares, then
    the selectors' at `shares` and half the least of them. A larger count only adds maps. An all-FA map is none: it is
    the teacher. Raises TooManyMaps where there are not so many, ConfigError where no score is there to swap by.
    """
    found = {subject.head_map.layers: subject for subject in kept}
    makers: dict[Group, Iterable[Subject]] = {
        "good": _good(shape, scores, front, share, counts["good"], seed),
        "mixed": _mixed(shape, scores, front, shares, seed),
    }
    lacking: dict[Group, int] = {}
    for group, maker in makers.items():
        missing = counts[group] - sum(s.group == group for s in kept)
        for subject in maker:
            if missing <= 0:
                break
            if subject.head_map.layers not in found and subject.head_map.fa_share < 1:
                found[subject.head_map.layers] = subject
                missing -= 1
        if missing > 0:
            lacking[group] = missing
    if lacking:
        group, missing = next(iter(lacking.items()))
        raise TooManyMaps(
            f"--maps: {missing} {group} maps too many for {shape.total_heads} heads; allowed: fewer",
            {name: count - lacking.get(name, 0) for name, count in counts.items()},
        )
    return list(found.values())


def _good(
    shape: ModelShape,
    scores: Mapping[str, ScoreTables],
    front: Sequence[Candidate],
    share: float,
    wanted: int,
    seed: int,
) -> Iterator[Subject]:
    num_full, need = num_full_heads(shape, share), _need(shape, scores)
    near = [c for c in front if share / NEAR_SHARE <= c.head_map.fa_share <= share * NEAR_SHARE]
    near.sort(key=lambda c: (abs(len(c.head_map.full_heads()) - num_full), c.candidate))
    bases: dict[HeadMap, Subject] = {}
    for candidate in near:
        head_map = _fitted(candidate.head_map, num_full, need)
        changed = "" if head_map == candidate.head_map else f", now of {num_full} FA heads"
        bases.setdefault(
            head_map, Subject(f"front #{candidate.candidate}{changed}", "good", head_map)
        )
    for seed_map in seed_maps(shape, scores, _seeds(scores, GOOD_SELECTORS, share), seed):
        bases.setdefault(seed_map.head_map, Subject(seed_map.method, "good", seed_map.head_map))
    chosen = list(bases.values())
    first = chosen[: max(1, round(BASE_SHARE * wanted))]
    yield from first
    yield from _swaps(first, need, seed)


def _swaps(bases: Sequence[Subject], need: Mapping[Head, float], seed: int) -> Iterator[Subject]:
    """Maps in which a few of the least needed FA heads have changed places with the most needed others."""
    rng = Random(f"{seed}/fidelity")
    for number in count():
        base = bases[number % len(bases)]
        full = base.head_map.full_heads()
        size = 1 + (number // len(bases)) % max(1, len(full) // 4)
        kept = sorted(full, key=lambda head: (need[head], head))
        others = sorted(need.keys() - full, key=lambda head: (-need[head], head))
        if not others or number > _TRIES * len(bases):
            return
        out = rng.sample(kept[: max(size, (len(kept) + 1) // 2)], size)
        into = rng.sample(others[: max(size, len(kept))], min(size, len(others)))
        head_map = HeadMap.from_full_heads(
            base.head_map.model, full.difference(out[: len(into)]) | set(into)
        )
        yield Subject(f"{base.origin}, {len(into)} swapped", "good", head_map)


def _fitted(head_map: HeadMap, num_full: int, need: Mapping[Head, float]) -> HeadMap:
    """The map with so many FA heads: the least needed go, the most needed come."""
    full = head_map.full_heads()
    order = sorted(need, key=lambda head: (head in full, need[head], head), reverse=True)
    return HeadMap.from_full_heads(head_map.model, order[:num_full])


def _need(shape: ModelShape, scores: Mapping[str, ScoreTables]) -> dict[Head, float]:
    """Mean rank of each head over all scores of single heads."""
    tables = [ranks(tables.heads) for name, tables in sorted(scores.items())]
    if not tables:
        raise ConfigError(
            "no head is scored yet: nothing to choose maps by; allowed: `archsearch score` first"
        )
    return {head: sum(rank[head] for rank in tables) / len(tables) for head in shape.heads()}


def _mixed(
    shape: ModelShape,
    scores: Mapping[str, ScoreTables],
    front: Sequence[Candidate],
    shares: Sequence[float],
    seed: int,
) -> Iterator[Subject]:
    for candidate in _spread([c for c in front if c.head_map.fa_share < 1]):
        yield Subject(f"front #{candidate.candidate}", "mixed", candidate.head_map)
    places = [*shares, min(shares) / 2]
    methods = _known(scores, MIXED_SELECTORS)
    # Each share in turn, with another selector each time round.
    pairs = sorted(
        product(range(len(methods)), range(len(places))),
        key=lambda pair: ((pair[0] - pair[1]) % len(methods), pair[1]),
    )
    for method, place in pairs:
        wanted = _seeds(scores, (methods[method],), places[place])
        for seed_map in seed_maps(shape, scores, wanted, seed):
            yield Subject(f"{seed_map.method} at {places[place]:.3g}", "mixed", seed_map.head_map)


def _spread(front: Sequence[Candidate]) -> list[Candidate]:
    """The front's maps, each next one as far as can be in FA share from those before; the extremes first."""
    left = sorted(front, key=lambda c: (c.head_map.fa_share, c.candidate))
    order: list[Candidate] = []
    while left:
        taken = [c.head_map.fa_share for c in order]
        far = [min((abs(c.head_map.fa_share - t) for t in taken), default=0.0) for c in left]
        order.append(left.pop(far.index(max(far))))
    return order


def _seeds(
    scores: Mapping[str, ScoreTables], methods: Sequence[SeedMethod], share: float
) -> SeedConfig:
    return SeedConfig(methods=_known(scores, methods), fa_shares=(share,))


def _known(
    scores: Mapping[str, ScoreTables], methods: Sequence[SeedMethod]
) -> tuple[SeedMethod, ...]:
    """The selectors whose scores are there."""
    return tuple(method for method in methods if {*SELECTORS[method].scores} <= scores.keys())
