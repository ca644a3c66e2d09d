"""The comparisons of a report."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from archsearch.config import Metric
from archsearch.headmap import HeadMap
from archsearch.report.markdown import markdown_report, markdown_table
from archsearch.report.records import Objective, Rung, quantity
from archsearch.report.tables import (
    Table,
    cache_table,
    candidate_tables,
    hypervolume_table,
    share_table,
    stage_table,
)

from .runs import OBJECTIVES, SHAPE, made_candidate, made_rung, made_scores, made_summary


def test_share_table_compares_at_most_the_same_share() -> None:
    heads = SHAPE.heads()
    quarter = HeadMap.from_full_heads(SHAPE, heads[:6])
    more = HeadMap.from_full_heads(SHAPE, heads[:12])
    rung = replace(
        made_rung(),
        candidates=(
            made_candidate(1, "causal", "seed", quarter, 0.5),
            made_candidate(2, "even_layers", "seed", quarter, 0.4),
            made_candidate(3, "search", "search", quarter, 0.3),
            made_candidate(4, "search", "search", more, 0.1),
        ),
    )
    table = share_table(made_summary(), rung)
    assert table.columns == ("fa_share", "25.0%")
    found = {title: cell.split(" ")[0] for title, cell in table.rows}
    assert found == {
        "causal score": "0.5",
        "evenly spaced layers": "0.4",
        "search, best": "0.3",
    }
    assert table.strong == {(2, 1)}


def test_share_table_has_a_column_a_share_and_stresses_the_best_of_each() -> None:
    heads = SHAPE.heads()
    few, many = (HeadMap.from_full_heads(SHAPE, heads[:n]) for n in (6, 12))
    rung = replace(
        made_rung(),
        candidates=(
            made_candidate(1, "causal", "seed", few, 0.5),
            made_candidate(2, "causal", "seed", many, 0.1),
            made_candidate(3, "causal_groups", "seed", many, 0.2),
            made_candidate(4, "search", "search", few, 0.3),
        ),
    )
    table = share_table(made_summary(), rung)
    assert table.columns == ("fa_share", "50.0%", "25.0%")
    assert [row[0] for row in table.rows] == [
        "causal score",
        "causal, whole KV groups",
        "search, best",
    ]
    assert table.rows[1][2] == "–"
    assert table.strong == {(0, 1), (2, 2)}


def test_share_table_without_seeds_is_empty() -> None:
    rung = made_rung()
    found = tuple(c for c in rung.candidates if c.group != "seed")
    assert not share_table(made_summary(), replace(rung, candidates=found)).rows


def test_a_map_that_two_methods_chose_counts_for_both() -> None:
    half = HeadMap.from_full_heads(SHAPE, SHAPE.heads()[:12])
    seed = replace(made_candidate(1, "causal", "seed", half, 0.5), also=("replacement_kl",))
    table = share_table(made_summary(), replace(made_rung(), candidates=(seed,)))
    assert [row[0] for row in table.rows] == ["causal score", "single-replacement KL"]
    assert table.rows[0][1] == table.rows[1][1]


def test_cache_table_never_takes_a_dearer_map() -> None:
    rung = made_rung()
    table = cache_table(made_summary(), rung)
    assert len(table.rows) == 1
    number = int(table.rows[0][5].removeprefix("#"))
    costs = {c.candidate: c.metrics["cache_bytes"] for c in rung.candidates}
    assert costs[number] <= costs[1]


def test_maps_outside_the_constraints_are_no_bests_and_said_to_be_left_out() -> None:
    rung = made_rung()
    summary = made_summary()
    best = min((c for c in rung.candidates if c.group == "search"), key=lambda c: c.metrics["kl"])
    whole = share_table(summary, rung).rows + cache_table(summary, rung).rows
    outside = tuple(replace(c, feasible=c is not best) for c in rung.candidates)
    for table in (share_table, cache_table):
        found = table(summary, replace(rung, candidates=outside))
        assert "Left out: 1 candidate outside search.constraints." in found.note
        assert "Left out" not in table(summary, rung).note
    changed = replace(rung, candidates=outside)
    assert share_table(summary, changed).rows + cache_table(summary, changed).rows != whole


def test_hypervolume_table_has_a_row_a_rung() -> None:
    table = hypervolume_table(made_summary())
    assert [row[0] for row in table.rows] == ["0", "4,096"]
    assert table.rows[0][-3:] == ("0.8000", "0.7000", "0.6000")


def test_hypervolume_table_without_a_control() -> None:
    rung = replace(made_rung(), hypervolume={"front": 0.8, "seeds": 0.7})
    assert hypervolume_table(replace(made_summary(), rungs=(rung,))).columns[-1] == "seeds alone"


def wide_rung() -> Rung:
    """Candidates with every metric that a run can have."""
    rung = made_rung()
    metrics = dict.fromkeys(get_args(Metric), 0.5)
    return replace(
        rung,
        candidates=tuple(replace(c, metrics={**metrics, **c.metrics}) for c in rung.candidates),
    )


def test_many_metrics_are_split_into_two_tables_that_lose_none() -> None:
    objectives = (Objective("tracking_nll", minimize=True), *OBJECTIVES)
    main, others = candidate_tables(wide_rung().candidates, "T", objectives)
    assert main.columns[2:5] == ("tracking_nll", "kl", "cache_bytes")
    assert {"general_match", "niah_single_match", "niah_multiquery_match"} <= set(main.columns)
    assert len(main.columns) <= 13
    assert sorted((*main.columns[2:], *others.columns[2:])) == sorted(get_args(Metric))
    assert [row[:2] for row in main.rows] == [row[:2] for row in others.rows]


def test_few_metrics_stay_in_one_table_objectives_first() -> None:
    (table,) = candidate_tables(made_rung().candidates, "T", OBJECTIVES[::-1])
    assert table.columns[2:] == ("cache_bytes", "kl", "fa_share", "niah_multikey_match")


def test_markdown_escapes_bars_and_stresses_winners() -> None:
    text = markdown_table(Table("T", ("a",), (("x|y",), ("z",)), strong=frozenset({(1, 0)})))
    assert "x\\|y" in text
    assert "**z**" in text


def test_markdown_report_has_every_part() -> None:
    text = markdown_report(replace(made_summary(), scores=made_scores()))
    parts = ("Hypervolume", "Front", "Best found", "Failed trials", "Stages")
    for title in (*parts, "Highest heads by causal score", "Pairs that", "Similarity"):
        assert f"## {title}" in text


def test_markdown_begins_with_how_the_constraints_are_met() -> None:
    summary = replace(made_summary(), met=("kl at most 0.5 met by 7 of 12",))
    said = markdown_report(summary).split("\n\n")[1]
    assert said == "Constraints: kl at most 0.5 met by 7 of 12."
    said = markdown_report(replace(summary, unmet="none meets kl at most 0")).split("\n\n")[1]
    assert said == "**The front is empty: none meets kl at most 0.**"
    assert markdown_report(made_summary()).split("\n\n")[1] == "## Hypervolume"


def test_the_final_stage_is_named_where_hypervolumes_are() -> None:
    summary = made_summary()
    rungs = (summary.rungs[0], replace(summary.rungs[1], confidence=0.95))
    table = hypervolume_table(replace(summary, rungs=rungs))
    assert [row[0] for row in table.rows] == ["0", "4,096 (final stage)"]
    assert "compare within a row" in table.note


def test_markdown_report_of_scores_alone() -> None:
    text = markdown_report(replace(made_summary(), rungs=(), scores=made_scores()))
    assert "## Highest heads" in text
    assert "## Front" not in text


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("cache_bytes", 3 * 2**20, "3 MiB"),
        ("cache_bytes", 512.0, "512 B"),
        ("fa_share", 0.125, "12.5%"),
        ("kl", 0.12345, "0.123"),
        ("niah_single_match@4096", 0.5, "50%"),
        ("top1_agreement_docs", 0.125, "12.5%"),
        ("lm_task_exact_match", 0.125, "0.125"),
    ],
)
def test_quantities_read_well(metric: str, value: float, text: str) -> None:
    assert quantity(metric, value) == text


def test_stages_are_followed_by_the_scoring_methods() -> None:
    methods = ({"method": "causal", "seconds": 3.25},)
    rows = stage_table(replace(made_summary(), methods=methods)).rows
    assert rows == (("search", "12.5", "2 GiB"), ("scores: causal", "3.2", ""))
