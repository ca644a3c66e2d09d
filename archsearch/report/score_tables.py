"""The tables of head scores: pairs by sub-probe, and the heads that score highest."""

from __future__ import annotations

from .records import METHOD_TITLES
from .score_records import PairCounts, ScoreFiles, Scores
from .scores_svg import effect_text, value_text
from .tables import Table

TOP_HEADS = 10


def score_tables(files: ScoreFiles) -> list[Table]:
    """All tables that the score files give rise to; those without a row are left out."""
    shown = files.others if files.causal is None else (files.causal,)
    tables = [*map(top_table, shown), pair_table(files.pairs)]
    return [table for table in tables if table.rows]


def pair_table(pairs: PairCounts) -> Table:
    """How many of the pairs drawn the teacher answers, a row a sub-probe."""
    rows = []
    for name, probes in pairs.items():
        for probe, counts in probes.items():
            kept, drawn = counts["kept"], counts["drawn"]
            share = f"{kept / drawn:.0%}" if drawn else ""
            rows.append((name, probe, str(kept), str(drawn), share))
    return Table(
        "Pairs that heads are scored by",
        ("capability", "sub-probe", "kept", "drawn", "share"),
        tuple(rows),
        "A pair counts where the teacher itself answers it; the others are dropped.",
    )


def top_table(scores: Scores, count: int = TOP_HEADS) -> Table:
    """The heads with the largest composite, and what each capability says of them."""
    places = sorted(
        ((layer, head) for layer in range(scores.num_layers) for head in range(scores.num_heads)),
        key=lambda place: -scores.composite[place[0]][place[1]],
    )
    evidence = [
        (f"{name} {key}", rows, spread)
        for name, c in scores.capabilities.items()
        for key, rows, spread in (
            ("recv", c.recv, c.recv_spread),
            ("send", c.send, c.send_spread),
            ("consistency", c.consistency, None),
        )
        if rows is not None
    ]
    rows = tuple(
        (
            str(layer),
            str(head),
            str(scores.kv_head(head)),
            value_text(scores.composite, scores.spread, layer, head),
            *(effect_text(values, spread, layer, head) for _, values, spread in evidence),
        )
        for layer, head in places[:count]
    )
    title = METHOD_TITLES.get(scores.method, scores.method)
    return Table(
        f"Highest heads by {title}",
        ("layer", "head", "KV head", "composite", *(name for name, _, _ in evidence)),
        rows,
        "± is the standard error over pairs." if scores.spread else "",
    )
