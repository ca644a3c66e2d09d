"""Which head maps the comparison of selectors trains: every selector at every share, or the best of a stage before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, get_args

from ..config import CostConfig, ScoreMethod, SeedConfig, SeedMethod
from ..headmap import HeadMap, ModelShape
from ..metrics import GeneralKind
from ..search.seeds import SELECTORS, UNIFORM, ScoreTables, needed_by_seeds, seed_maps

METHODS: dict[str, dict[str, SeedMethod]] = {
    "causal": {"head": "causal", "group": "causal_groups"},
    "causal_per_layer": {"head": "causal_per_layer", "group": "causal_per_layer_groups"},
    "duo_gates": {"group": "duo_gates"},
    "retrieval_heads": {"head": "retrieval_heads", "group": "retrieval_heads_groups"},
    "replacement_kl": {"head": "replacement_kl", "group": "replacement_kl_groups"},
    "replacement_nll": {"head": "replacement_nll", "group": "replacement_nll_groups"},
    "blend": {"head": "blend", "group": "blend_groups"},
    "leave_one_in": {"head": "leave_one_in", "group": "leave_one_in_groups"},
    "program": {"head": "program", "group": "program_groups", "bytes": "program_bytes"},
    "program_both": {
        "head": "program_both",
        "group": "program_both_groups",
        "bytes": "program_both_bytes",
    },
    "restoration": {"layer": "restoration"},
    "even_layers": {"layer": "even_layers"},
    "random": {"head": "random", "group": "random_groups"},
}
"""Selectors, and the seed method of each unit that they choose by. Budgets are a share of that unit, or for bytes the cache
of evenly spaced layers at that share."""
UNITS = {"head": ("head", "layer"), "kv": ("group", "bytes", "layer")}
"""What is compared with each other: maps by single heads, and maps by what the cache is made of; whole layers are both."""
LAYERS = "even_layers"
CONTROL = "all_full"
RANDOM_MAPS = 3
_GENERAL = {"general", *get_args(GeneralKind)}
DECIDES = 0.9
"""Least share of a kind of prompts that the teacher answers where it is to decide anything."""


@dataclass(frozen=True)
class Stage:
    """What is trained and how long. best: how many selectors of the stage before, with evenly spaced layers beside them."""

    shares: tuple[float, ...]
    readings: tuple[int, ...]
    seeds: int = 1
    before: str = ""
    best: int = 0
    units: tuple[str, ...] = ("head", "kv")


STAGES: dict[str, Stage] = {
    "A": Stage((1 / 2, 1 / 4, 1 / 8, 1 / 16), (0, 500_000)),
    "B": Stage((1 / 4, 1 / 8, 1 / 16), (2_000_000,), before="A", best=8),
    "C": Stage((1 / 8, 1 / 16), (2_000_000, 8_000_000), 3, before="B", best=3, units=("head",)),
}


@dataclass(frozen=True)
class Entry:
    """A map, and the selectors that chose it: (selector, unit, share, number of the draw)."""

    head_map: HeadMap
    names: list[tuple[str, str, float, int]] = field(default_factory=list)


def needed_scores(selectors: Iterable[str]) -> set[ScoreMethod]:
    """The scoring methods whose tables the selectors read."""
    methods = tuple(method for name in selectors for method in METHODS[name].values())
    return needed_by_seeds(SeedConfig(methods=methods))


def entries_of(
    shape: ModelShape,
    scores: Mapping[str, ScoreTables],
    selectors: Sequence[str],
    shares: Sequence[float],
    units: Sequence[str],
    *,
    seed: int,
    cost: CostConfig,
) -> list[Entry]:
    """The distinct maps of the selectors, the full-attention control first."""
    control = Entry(HeadMap.uniform(shape, UNIFORM[CONTROL]), [(CONTROL, "head", 1.0, 0)])
    found = {control.head_map: control}
    wanted = {unit for name in units for unit in UNITS[name]}
    for selector in selectors:
        for unit, method in METHODS[selector].items():
            for share in shares if unit in wanted else ():
                config = SeedConfig(methods=(method,), fa_shares=(share,), random_maps=RANDOM_MAPS)
                assert method in SELECTORS
                for number, made in enumerate(seed_maps(shape, scores, config, seed, cost)):
                    entry = found.setdefault(made.head_map, Entry(made.head_map))
                    entry.names.append((selector, unit, share, number))
    return list(found.values())


def retrieval_columns(names: Iterable[str]) -> list[str]:
    """The finest kinds of retrieval prompts among metrics, as `KIND` or `KIND@CONTEXT`: without totals over others of them."""
    found = {}
    for name in names:
        kind, _, rest = name.rpartition("_nll")
        if kind and (not rest or rest.startswith("@")) and kind not in _GENERAL:
            found[kind, rest] = f"{kind}{rest}"
    kinds = {kind for kind, _ in found}
    parts = {kind for kind in kinds if any(other.startswith(f"{kind}_") for other in kinds)}
    several = {kind for kind, rest in found if rest}
    return [
        column
        for (kind, rest), column in found.items()
        if kind not in parts and (rest or kind not in several)
    ]


def metric_of(column: str, figure: str) -> str:
    """The metric of a column: its nll or match."""
    kind, at, context = column.partition("@")
    return f"{kind}_{figure}{at}{context}"


def deciding(columns: Iterable[str], teacher: Mapping[str, float]) -> list[str]:
    """The columns that the teacher answers well enough."""
    return [c for c in columns if teacher.get(metric_of(c, "match"), 0.0) >= DECIDES]


def retrieval_nll(values: Mapping[str, float], columns: Sequence[str]) -> float | None:
    """Mean answer NLL over columns, None without any."""
    return fmean(values[metric_of(c, "nll")] for c in columns) if columns else None


Values = Callable[[Entry], Mapping[str, Any] | None]
"""The figures of a map at the reading that decides, None where it has none."""


def ranked(
    entries: Sequence[Entry], values_of: Values, columns: Sequence[str], units: Sequence[str]
) -> list[tuple[str, float]]:
    """Selectors from best to worst, each with its mean place: 0 where it is the best everywhere, 1 where the worst.

    Places are among the maps of one share that are compared (UNITS), by KL and by the NLL of the retrieval prompts that
    decide, which weigh the same. Of drawn maps, the mean figure counts; whole layers have a place among either.
    """
    places: dict[str, list[float]] = {}
    shares = sorted({share for entry in entries for *_, share, _ in entry.names})
    for share in shares:
        for unit in units:
            for figure in _figures(entries, values_of, columns, share, UNITS[unit]):
                order = sorted(figure, key=lambda name: figure[name])
                for place, name in enumerate(order):
                    places.setdefault(name[0], []).append(place / max(1, len(order) - 1))
    found = {name: fmean(own) for name, own in places.items()}
    return sorted(found.items(), key=lambda item: (item[1], item[0]))


def _figures(
    entries: Sequence[Entry],
    values_of: Values,
    columns: Sequence[str],
    share: float,
    units: Sequence[str],
) -> list[dict[tuple[str, str], float]]:
    """KL, and where prompts decide their NLL, by (selector, unit) at one share."""
    kl: dict[tuple[str, str], list[float]] = {}
    nll: dict[tuple[str, str], list[float]] = {}
    for entry in entries:
        values = values_of(entry)
        if values is None:
            continue
        for selector, unit, own, _ in entry.names:
            if own == share and unit in units and selector != CONTROL:
                kl.setdefault((selector, unit), []).append(values["kl"])
                mean = retrieval_nll(values, columns)
                if mean is not None:
                    nll.setdefault((selector, unit), []).append(mean)
    return [{name: fmean(own) for name, own in found.items()} for found in (kl, nll) if found]
