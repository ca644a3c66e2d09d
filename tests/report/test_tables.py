"""The comparisons of a report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archsearch.headmap import HeadMap
from archsearch.report.markdown import markdown_report, markdown_table
from archsearch.report.records import quantity
from archsearch.report.tables import Table, cache_table, hypervolume_table, share_table

from .runs import SHAPE, made_candidate, made_rung, made_summary


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
    (row,) = table.rows
    assert row[0] == "25.0%"
    assert [cell.split(" ")[0] for cell in row[1:]] == ["0.5", "0.4", "0.3"]
    assert table.strong == {(0, 3)}


def test_a_map_that_two_methods_chose_counts_for_both() -> None:
    half = HeadMap.from_full_heads(SHAPE, SHAPE.heads()[:12])
    seed = replace(made_candidate(1, "causal", "seed", half, 0.5), also=("replacement_kl",))
    table = share_table(made_summary(), replace(made_rung(), candidates=(seed,)))
    assert table.columns[1:] == ("causal score", "single-replacement KL")
    assert table.rows[0][1] == table.rows[0][2]


def test_cache_table_never_takes_a_dearer_map() -> None:
    rung = made_rung()
    table = cache_table(made_summary(), rung)
    assert len(table.rows) == 1
    number = int(table.rows[0][5].removeprefix("#"))
    costs = {c.candidate: c.metrics["cache_bytes"] for c in rung.candidates}
    assert costs[number] <= costs[1]


def test_hypervolume_table_has_a_row_a_rung() -> None:
    table = hypervolume_table(made_summary())
    assert [row[0] for row in table.rows] == ["0", "4,096"]
    assert table.rows[0][-3:] == ("0.8000", "0.7000", "0.6000")


def test_hypervolume_table_without_a_control() -> None:
    rung = replace(made_rung(), hypervolume={"front": 0.8, "seeds": 0.7})
    assert hypervolume_table(replace(made_summary(), rungs=(rung,))).columns[-1] == "seeds alone"


def test_markdown_escapes_bars_and_stresses_winners() -> None:
    text = markdown_table(Table("T", ("a",), (("x|y",), ("z",)), strong=frozenset({(1, 0)})))
    assert "x\\|y" in text
    assert "**z**" in text


def test_markdown_report_has_every_part() -> None:
    text = markdown_report(made_summary())
    for title in ("Hypervolume", "Front", "Best found", "Failed trials", "Stages"):
        assert f"## {title}" in text


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("cache_bytes", 3 * 2**20, "3 MiB"),
        ("cache_bytes", 512.0, "512 B"),
        ("fa_share", 0.125, "12.5%"),
        ("kl", 0.12345, "0.123"),
    ],
)
def test_quantities_read_well(metric: str, value: float, text: str) -> None:
    assert quantity(metric, value) == text
