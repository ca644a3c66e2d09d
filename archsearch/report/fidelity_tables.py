"""The tables of a study of proxies: which short look orders head maps as long training does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..fidelity.records import Agreement, Ceiling, Study
from ..metrics import is_loss
from .tables import Table

NOTE = (
    "Spearman's rank correlation with the long training over the maps of each column (in brackets where 95% of bootstrap "
    "draws of maps fall). Regret is what training only the proxy's best map costs in the metric; where FA shares differ, "
    "the share of the front's hypervolume (metric against cache) that is lost by training only the proxy's own front. A "
    "linear fit predicts each map from a fit to the others of its column."
)


def fidelity_tables(study: Study | None) -> list[Table]:
    """A table a metric of the long training: a row a proxy, cheapest first, and one of two seeds of the long training itself."""
    if study is None:
        return []
    metrics = dict.fromkeys(row.metric for row in study.agreements)
    return [_table(study, metric) for metric in metrics]


def _table(study: Study, metric: str) -> Table:
    rows = [row for row in study.agreements if row.metric == metric and _shown(row.proxy)]
    groups = list(dict.fromkeys(row.group for row in rows))
    by_place = {(row.proxy, row.tokens, row.group): row for row in rows}
    places = sorted(
        dict.fromkeys((row.proxy, row.tokens) for row in rows),
        key=lambda place: (place[1], -_best(by_place, place, groups)),
    )
    lines = [
        (
            *_title(place, study.settings.tokens),
            *(cell for group in groups for cell in _cells(by_place.get((*place, group)))),
        )
        for place in places
    ]
    ceilings = [row for row in study.ceilings if row.metric == metric]
    if ceilings:
        lines.append(("the long training with another seed", "100%", *_ceilings(ceilings, groups)))
    columns = [name for group in groups for name in _columns(rows, group)]
    own = ", ".join(f"{tokens:,}" for tokens in study.settings.proxies)
    trials = f" At {own} tokens maps are trained as the search's trials are." if own else ""
    return Table(
        f"How well a short look predicts {metric} after {study.settings.tokens:,} tokens",
        ("proxy", "tokens", *columns),
        tuple(lines),
        f"{NOTE}{trials}{_noise(ceilings)}",
        frozenset(_strong(by_place, places, groups)),
    )


def _shown(proxy: str) -> bool:
    """Exact matches and single contexts are too coarse to rank by; fidelity.json has them."""
    return "@" not in proxy and not proxy.endswith("_match")


def _title(place: tuple[str, int], whole: int) -> tuple[str, str]:
    proxy, tokens = place
    return proxy, f"{tokens:,} ({tokens / whole:.1%})" if tokens else "0"


def _columns(rows: Sequence[Agreement], group: str) -> tuple[str, str]:
    first = next(row for row in rows if row.group == group)
    cost = "front lost" if first.regret is None else "regret"
    return f"{group} ({first.maps} maps): Spearman", cost


def _cells(row: Agreement | None) -> tuple[str, str]:
    if row is None:
        return "–", "–"
    low, high = row.spearman_range
    correlation = f"{row.spearman:.2f} ({low:.2f} to {high:.2f})"
    if row.regret is None:
        return correlation, "–" if row.front_lost is None else f"{row.front_lost:.1%}"
    return correlation, _amount(row.metric, row.regret)


def _amount(metric: str, value: float) -> str:
    return f"{value:.4f}" if is_loss(metric) else f"{value:.1%}"


def _ceilings(ceilings: Iterable[Ceiling], groups: Sequence[str]) -> list[str]:
    found = {row.group: row for row in ceilings}
    cells = []
    for group in groups:
        row = found.get(group)
        text = "–" if row is None else f"{row.spearman:.2f} over {row.maps}"
        cells += [text, "" if row is None else f"reliability {row.reliability:.2f}"]
    return cells


def _noise(ceilings: Sequence[Ceiling]) -> str:
    if not ceilings:
        return ""
    row = ceilings[0]
    return (
        f" Another seed changes the order of the batches: {row.maps} maps were trained twice, and one run has a standard "
        f"deviation of {_amount(row.metric, row.deviation)}. Reliability is the share of the maps' variance that is not that "
        "noise, the correlation to expect between two seeds over all maps of a column."
    )


def _best(
    by_place: dict[tuple[str, int, str], Agreement], place: tuple[str, int], groups: Sequence[str]
) -> float:
    """The mean correlation of a proxy over the groups, for the order of rows."""
    found = [row.spearman for group in groups if (row := by_place.get((*place, group)))]
    return sum(found) / len(found)


def _strong(
    by_place: dict[tuple[str, int, str], Agreement],
    places: Sequence[tuple[str, int]],
    groups: Sequence[str],
) -> Iterable[tuple[int, int]]:
    """The best correlation at 0 tokens in each group: what the search gets for nothing."""
    for index, group in enumerate(groups):
        free = [
            (row.spearman, number)
            for number, place in enumerate(places)
            if not place[1] and (row := by_place.get((*place, group)))
        ]
        if free:
            yield max(free)[1], 2 + 2 * index
