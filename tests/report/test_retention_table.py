"""The table of what a found map keeps of the teacher's accuracy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archsearch.headmap import HeadMap, Operator
from archsearch.report.html import html_report
from archsearch.report.markdown import markdown_report
from archsearch.report.records import RunSummary
from archsearch.report.retention_table import retention_tables
from archsearch.search.retention import FOUND, TEACHER, Kept, Retention

from .runs import SHAPE, made_summary


def kept(source: str, count: int, match: float | None, **fields: object) -> Kept:
    head_map = HeadMap.from_full_heads(SHAPE, SHAPE.heads()[:count])
    metrics = {} if match is None else {"niah_multikey_match": match, "niah_multikey_nll": 0.25}
    return Kept(source, head_map.layers, metrics=metrics, **fields)  # type: ignore[arg-type]


@pytest.fixture
def summary() -> RunSummary:
    maps = (
        replace(kept(TEACHER, 0, 0.8), layers=HeadMap.uniform(SHAPE, Operator.FULL).layers),
        kept(FOUND, 3, 0.76, candidate=4, method="causal"),
        kept("search", 2, 0.6, candidate=9, method="search"),
        kept("random", 3, None, reason="worker died"),
        kept("even_layers", 4, 0.0),
    )
    config = {
        "teacher": {"source": "tiny"},
        "probes": {"contexts": [512, 1024]},
        "cost": {"context": 1024, "element_bytes": 2},
    }
    return replace(
        made_summary(),
        config=config,
        shape=SHAPE,
        retention=Retention(0.125, 32, ("multikey",), 6144, maps),
    )


def test_shares_are_those_of_the_teachers_accuracy(summary: RunSummary) -> None:
    (table,) = retention_tables(summary)
    assert "multikey accuracy with at most 12.5% full-attention heads" in table.title
    rows = {row[0]: row[1:] for row in table.rows}
    found = rows["#4 best of the front (causal score)"]
    assert found[0] == "12.5%"
    assert found[2] == "76%"
    assert found[3].startswith("95.0% (")
    assert rows["teacher"][3] == "100%"
    assert rows["#9 found by the search"][3].startswith("75.0% (")
    assert rows["evenly spaced layers"][3].startswith("0.0% (0.0% to ")
    assert rows["random seed"][2:] == ("worker died", "", "")
    assert table.strong == {(1, 4)}
    assert "64 prompts" in table.note
    assert "6,144 distillation tokens" in table.note


def test_reports_show_it_where_there_is_one(summary: RunSummary) -> None:
    for text in (markdown_report(summary), html_report(summary)):
        assert "multikey accuracy with at most 12.5%" in text
    without = replace(summary, retention=None)
    assert retention_tables(without) == []
    assert "multikey accuracy" not in markdown_report(without)


def test_a_map_may_answer_more_than_the_teacher_and_its_interval_holds_that(
    summary: RunSummary,
) -> None:
    assert summary.retention is not None
    teacher, found, *_ = summary.retention.maps
    more = replace(found, metrics={**found.metrics, "niah_multikey_match": 1.0})
    retention = replace(summary.retention, maps=(teacher, more))
    (table,) = retention_tables(replace(summary, retention=retention))
    # Wilson's bounds of 64 of 64 are 64 / (64 + 1.96^2) and 1, the teacher's share is 0.8.
    assert [row[4] for row in table.rows] == ["100%", "125.0% (117.9% to 125.0%)"]
