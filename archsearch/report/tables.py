"""The tables of a report as plain rows of text, for HTML and Markdown alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .records import (
    MAIN_METRICS,
    METHOD_TITLES,
    OUTSIDE,
    Candidate,
    Objective,
    Rung,
    RunSummary,
    bytes_text,
    quantity,
)

WIDEST = 8
"""Most metrics that a table shows without leaving some to a second one."""


@dataclass(frozen=True)
class Table:
    """A heading row and rows of cells; `note` says how to read them, `strong` are (row, column) to stress."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    strong: frozenset[tuple[int, int]] = frozenset()


def after(rung: Rung) -> str:
    """How long the candidates of a rung were distilled, for headings."""
    if not rung.proxy_tokens:
        return "without distillation"
    final = "" if rung.confidence is None else ", on text and prompts that no trial saw"
    return f"after {rung.proxy_tokens:,} distillation tokens{final}"


def hypervolume_table(summary: RunSummary) -> Table:
    """Hypervolumes of the front, of the seeds alone and of the random control, a row a rung."""
    names = {"front": "front", "seeds": "seeds alone", "random": "random, equal trials"}
    present = [key for key in names if any(key in rung.hypervolume for rung in summary.rungs)]
    rows = tuple(
        (
            f"{rung.proxy_tokens:,}" + ("" if rung.confidence is None else " (final stage)"),
            str(len(rung.front)),
            str(sum(c.group == "search" for c in rung.front)),
            *(_volume(rung, key) for key in present),
        )
        for rung in summary.rungs
    )
    columns = ("proxy tokens", "points on the front", "of these found by the search")
    return Table(
        "Hypervolume",
        (*columns, *(names[key] for key in present)),
        rows,
        " ".join(
            [
                "The share of the box between the best values seen and the reference point that is dominated; larger is better.",
                *["Each row has a box of its own: compare within a row."] * (len(rows) > 1),
                *(f"The {stop}." for stop in summary.stops),
            ]
        ),
    )


def constraint_line(summary: RunSummary) -> str:
    """How many candidates of the last rung meet each constraint, and how near they came where none meets all."""
    if summary.unmet:
        return f"The front is empty: {summary.unmet}."
    return f"Constraints: {'; '.join(summary.met)}." if summary.met else ""


def _volume(rung: Rung, key: str) -> str:
    value = rung.hypervolume.get(key)
    return "" if value is None else f"{value:.4f}"


def share_table(summary: RunSummary, rung: Rung) -> Table:
    """Each seed method beside the best found maps of at most the same FA share: a column a share."""
    objective, cost = summary.quality, "fa_share"
    scored = _comparable(rung, {cost, objective.metric})
    seeds = [c for c in scored if c.group == "seed" and 0 < c.head_map.fa_share < 1]
    levels = _levels(c.metrics[cost] for c in seeds)
    lines: dict[str, list[Candidate | None]] = {}
    for method, title in METHOD_TITLES.items():
        own = [c for c in seeds if method in (c.method, *c.also)]
        if own:
            lines[title] = [_best((c for c in own if _same(c, cost, s)), objective) for s in levels]
    for group, title in {"random": "random control, best", "search": "search, best"}.items():
        own = [c for c in scored if c.group == group]
        if own and levels:
            within = [[c for c in own if c.metrics[cost] <= share + 1e-9] for share in levels]
            lines[title] = [_best(found, objective) for found in within]
    winners = [
        _best(filter(None, column), objective) for column in zip(*lines.values(), strict=True)
    ]
    strong = {
        (row, column + 1)
        for row, line in enumerate(lines.values())
        for column, (c, winner) in enumerate(zip(line, winners, strict=True))
        if c is not None and c is winner
    }
    return Table(
        f"Best found beside the seeds at each share of full-attention heads, {after(rung)}",
        (cost, *(f"{share:.1%}" for share in levels)),
        tuple(
            (title, *(_cell(c, objective.metric) for c in line)) for title, line in lines.items()
        ),
        f"{objective.metric} ({'smaller' if objective.minimize else 'larger'} is better) and the cache; "
        f"the last rows take the best map of at most that share.{_left_out(rung)}",
        frozenset(strong),
    )


def _comparable(rung: Rung, metrics: set[str]) -> list[Candidate]:
    """The candidates that meet the constraints and have these metrics."""
    return [c for c in rung.candidates if c.feasible and metrics <= c.metrics.keys()]


def _left_out(rung: Rung) -> str:
    count = sum(not c.feasible for c in rung.candidates)
    return f" Left out: {count} candidate{'s' * (count > 1)} {OUTSIDE}." if count else ""


def _levels(values: Iterable[float]) -> list[float]:
    """The distinct FA shares, largest first; shares within 2% of each other count as one."""
    levels: list[float] = []
    for value in sorted(values, reverse=True):
        if not levels or levels[-1] - value > 0.02:
            levels.append(value)
    return levels


def _same(c: Candidate, cost: str, limit: float) -> bool:
    return -1e-9 <= limit - c.metrics[cost] <= 0.02


def _best(candidates: Iterable[Candidate], objective: Objective) -> Candidate | None:
    chosen: Candidate | None = None
    for c in candidates:
        if chosen is None or objective.better(
            c.metrics[objective.metric], chosen.metrics[objective.metric]
        ):
            chosen = c
    return chosen


def _cell(c: Candidate | None, metric: str) -> str:
    if c is None:
        return "–"
    cache = c.metrics.get("cache_bytes")
    return quantity(metric, c.metrics[metric]) + (f" · {bytes_text(cache)}" if cache else "")


def cache_table(summary: RunSummary, rung: Rung) -> Table:
    """Each seed beside the best found map that needs no more cache than it."""
    objective = summary.quality
    scored = _comparable(rung, {"cache_bytes", objective.metric})
    rows: list[tuple[str, ...]] = []
    strong: set[tuple[int, int]] = set()
    for seed in sorted(scored, key=lambda c: -c.metrics["cache_bytes"]):
        if seed.group != "seed" or seed.head_map.fa_share == 1:
            continue
        within = [
            c
            for c in scored
            if c.group == "search" and c.metrics["cache_bytes"] <= seed.metrics["cache_bytes"]
        ]
        found = _best(within, objective)
        if found is not None and objective.better(
            found.metrics[objective.metric], seed.metrics[objective.metric]
        ):
            strong.add((len(rows), 4))
        rows.append(
            (
                seed.label,
                f"{seed.head_map.fa_share:.1%}",
                bytes_text(seed.metrics["cache_bytes"]),
                quantity(objective.metric, seed.metrics[objective.metric]),
                _cell(found, objective.metric),
                "" if found is None else f"#{found.candidate}",
            )
        )
    return Table(
        f"Best found at no more cache than each seed, {after(rung)}",
        ("seed", "FA share", "cache", objective.metric, "search, best", "candidate"),
        tuple(rows),
        f"Equal head counts hide cost under grouped-query attention; this compares at equal memory.{_left_out(rung)}",
        frozenset(strong),
    )


def candidate_tables(
    candidates: Sequence[Candidate], title: str, objectives: Sequence[Objective]
) -> list[Table]:
    """The metrics of the given candidates, a row each: the main ones, and a second table of any others."""
    main, others = split_metrics(candidates, objectives)
    tables = [_candidate_table(candidates, title, main)]
    if others:
        tables.append(_candidate_table(candidates, f"{title}: other metrics", others))
    return tables


def split_metrics(
    candidates: Iterable[Candidate], objectives: Sequence[Objective]
) -> tuple[list[str], list[str]]:
    """The metrics that these have: those that a table has room for, objectives first, and the others."""
    found = list(dict.fromkeys(name for c in candidates for name in c.metrics))
    first = [*(objective.metric for objective in objectives), *MAIN_METRICS]
    main = [name for name in dict.fromkeys(first) if name in found]
    others = [name for name in found if name not in main]
    if len(found) <= WIDEST:
        return [*main, *others], []
    return main, others


def _candidate_table(candidates: Sequence[Candidate], title: str, metrics: Sequence[str]) -> Table:
    rows = tuple(
        (
            str(c.candidate),
            METHOD_TITLES.get(c.method, c.method) + ("" if c.feasible else f", {OUTSIDE}"),
            *(c.shown(m) for m in metrics),
        )
        for c in candidates
    )
    note = (
        "In brackets: confidence interval of the final stage, Wilson's for matches, a bootstrap's for the others, "
        "none where nothing that was measured differs."
    ) * any(c.intervals for c in candidates)
    return Table(title, ("candidate", "source", *metrics), rows, note)


def stage_table(summary: RunSummary) -> Table:
    """Seconds and peak memory by stage, then the seconds of each scoring method."""
    rows = [
        (
            str(stage["stage"]),
            f"{stage['seconds']:.1f}",
            bytes_text(stage["peak_bytes"]) if stage.get("peak_bytes") else "",
        )
        for stage in summary.stages
    ]
    rows += [(f"scores: {row['method']}", f"{row['seconds']:.1f}", "") for row in summary.methods]
    note = "Over all calls of the run."
    return Table("Stages", ("stage", "seconds", "peak host memory"), tuple(rows), note)


def failure_table(summary: RunSummary) -> Table:
    """Trials that gave no result, and why."""
    rows = tuple(
        (str(f.candidate), METHOD_TITLES.get(f.method, f.method), f"{f.proxy_tokens:,}", f.reason)
        for f in summary.failures
    )
    return Table("Failed trials", ("candidate", "source", "proxy tokens", "reason"), rows)


def pruned_table(summary: RunSummary) -> Table:
    """Who did not go on from proxy to proxy, by reason; the random control apart from the others."""
    found: dict[tuple[int, bool, str], list[int]] = {}
    for row in summary.pruned:
        key = (row.proxy_tokens, row.method == "random-control", row.reason)
        found.setdefault(key, []).append(row.candidate)
    rows = tuple(
        (
            f"{tokens:,}",
            "random control" if control else "",
            reason,
            str(len(numbers)),
            ", ".join(map(str, numbers)),
        )
        for (tokens, control, reason), numbers in sorted(found.items(), key=lambda item: item[0])
    )
    columns = ("proxy tokens not reached", "of", "reason", "candidates", "numbers")
    return Table(
        "Pruned candidates", columns, rows, "They keep what was measured after the proxies before."
    )
