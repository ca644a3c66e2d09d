"""Maps that searches found within a share of full-attention heads, and maps that selectors choose at it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..config import ObjectiveConfig, SearchConfig
from ..headmap import HeadMap
from ..metrics import COSTS
from ..rundir import RunDir, score_file
from ..search.front import SEARCH, Candidate
from ..search.seeds import within_share
from .search_runs import Search
from .selection_maps import CONTROL, METHODS, Entry, needed_scores
from .selection_tables import Name

BEST = ", best "
"""Before what a found map is best by, in its name."""


def found_entries(searches: Sequence[Search], shares: Sequence[float]) -> list[Entry]:
    """What each search came to within each share, by each objective that is no cost, after each length of training.

    The best of all its candidates, and the best that no seed supplied where that is another. In an entry's names stand
    the search, who supplied the map and what it is best by, the share and the candidate's number.
    """
    found: dict[HeadMap, Entry] = {}
    for share in shares:
        for search in searches:
            for best, by in chosen_within(search, share):
                name = (search.name, f"from {best.source}{BEST}{by}", share, best.candidate)
                found.setdefault(best.head_map, Entry(best.head_map)).names.append(name)
    return list(found.values())


def chosen_within(search: Search, share: float) -> list[tuple[Candidate, str]]:
    """Each candidate that is best by something, and by what: `kl after 0 and 131,072 tokens; unseen_single_nll after 0 tokens`."""
    chosen: dict[int, Candidate] = {}
    by: dict[int, dict[str, list[str]]] = {}
    for rung in search.rungs:
        for objective in qualities(search.config.search):
            for best in picks(rung.candidates, objective, share):
                chosen[best.candidate] = best
                lengths = by.setdefault(best.candidate, {}).setdefault(objective.metric, [])
                lengths.append(f"{rung.tokens:,}")
    return [
        (
            chosen[number],
            "; ".join(
                f"{metric} after {' and '.join(lengths)} tokens"
                for metric, lengths in metrics.items()
            ),
        )
        for number, metrics in by.items()
    ]


def qualities(config: SearchConfig) -> list[ObjectiveConfig]:
    """The objectives that are no cost."""
    return [objective for objective in config.objectives if objective.metric not in COSTS]


def picks(
    candidates: Sequence[Candidate], objective: ObjectiveConfig, share: float
) -> list[Candidate]:
    """The best feasible candidate with no more full-attention heads than a selector takes at the share, and the best of
    those that no seed supplied."""
    sign = 1 if objective.direction == "minimize" else -1
    within = [c for c in candidates if c.feasible and within_share(c.head_map, share)]
    chosen: list[Candidate] = []
    for pool in (within, [c for c in within if c.source == SEARCH]):
        best = min(
            pool, key=lambda c: (sign * c.metrics[objective.metric], c.candidate), default=None
        )
        if best is not None and best not in chosen:
            chosen.append(best)
    return chosen


def is_found(name: Name) -> bool:
    """Whether a name of an entry is a search's and no selector's."""
    return name[0] not in METHODS and name[0] != CONTROL


def merged(first: Iterable[Entry], others: Iterable[Entry]) -> list[Entry]:
    """The entries of both, a map once with all its names."""
    found: dict[HeadMap, Entry] = {}
    for entry in (*first, *others):
        found.setdefault(entry.head_map, Entry(entry.head_map)).names.extend(entry.names)
    return list(found.values())


def missing_scores(run: RunDir) -> dict[str, list[str]]:
    """Selectors that a run lacks scores for, and which."""
    lacking = {
        name: sorted(str(m) for m in needed_scores([name]) if not (run / score_file(m)).exists())
        for name in METHODS
    }
    return {name: methods for name, methods in lacking.items() if methods}
