"""The table of what the found map of few full-attention heads keeps of the teacher's accuracy, beside baselines."""

from __future__ import annotations

from ..cost import cache_bytes
from ..evaluation.shares import share_interval
from ..headmap import HeadMap, ModelShape
from ..metrics import metric_name
from ..search.retention import FOUND, TEACHER, Kept, Retention
from .records import METHOD_TITLES, RunSummary, bytes_text, quantity
from .tables import Table

CONFIDENCE = 0.95


def retention_tables(summary: RunSummary) -> list[Table]:
    """A table a kind of prompts; none where the run did not measure it."""
    retention = summary.retention
    if retention is None or summary.shape is None:
        return []
    return [_table(summary, retention, summary.shape, kind) for kind in retention.kinds]


def _table(summary: RunSummary, retention: Retention, shape: ModelShape, kind: str) -> Table:
    name = metric_name(kind)
    match, nll = f"{name}_match", f"{name}_nll"
    contexts = summary.config["probes"]["contexts"]
    count = retention.prompts * len(contexts)
    teacher = next((kept for kept in retention.maps if kept.source == TEACHER), None)
    whole = teacher.metrics.get(match) if teacher else None
    cost, rows = summary.config["cost"], []
    for kept in retention.maps:
        head_map = HeadMap(shape, kept.layers)
        stored = cache_bytes(head_map, cost["context"], element_bytes=cost["element_bytes"])
        found = kept.metrics.get(match)
        rows.append(
            (
                _title(kept),
                f"{head_map.fa_share:.1%}",
                bytes_text(stored),
                kept.reason or "" if found is None else quantity(match, found),
                "" if found is None or not whole else _kept(kept, found, whole, count),
                quantity(nll, kept.metrics[nll]) if nll in kept.metrics else "",
            )
        )
    strong = {(row, 4) for row, kept in enumerate(retention.maps) if kept.source == FOUND}
    return Table(
        f"Kept of the teacher's {kind} accuracy with at most {retention.fa_share:.1%} full-attention heads",
        ("map", "FA share", "cache", match, "of the teacher's", nll),
        tuple(rows),
        f"{count} prompts that no trial was asked (in brackets the {CONFIDENCE:.0%} interval of so many, "
        f"with the teacher's own share taken as it is), {retention.tokens:,} distillation tokens each. The best of the front is chosen by the trials' "
        f"{summary.quality.metric}; a baseline by whole layers has the nearest share that it can.",
        frozenset(strong),
    )


def _title(kept: Kept) -> str:
    number = "" if kept.candidate is None else f"#{kept.candidate} "
    if kept.source == TEACHER:
        return TEACHER
    if kept.source == FOUND:
        return f"{number}best of the front ({METHOD_TITLES.get(kept.method or '', kept.method)})"
    return number + METHOD_TITLES.get(kept.source, kept.source)


def _kept(kept: Kept, found: float, whole: float, count: int) -> str:
    """The share of the teacher's, and Wilson's interval of what was found: the teacher's own is taken as it is."""
    if kept.source == TEACHER:
        return "100%"
    low, high = share_interval(round(found * count), count, CONFIDENCE)
    return f"{found / whole:.1%} ({low / whole:.1%} to {high / whole:.1%})"
