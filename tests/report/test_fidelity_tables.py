"""The tables of a study of proxies, and where a report shows them."""

from __future__ import annotations

from dataclasses import replace

from archsearch.fidelity.analysis import analyse
from archsearch.report.fidelity_tables import fidelity_tables
from archsearch.report.html import html_report
from archsearch.report.markdown import markdown_report
from tests.fidelity.studies import made_study

from .runs import made_summary

STUDY = analyse(made_study(), ["niah_single_nll", "kl"])


def test_a_table_a_metric_with_the_cheapest_proxies_first() -> None:
    tables = fidelity_tables(STUDY)
    assert [table.title for table in tables] == [
        "How well a short look predicts niah_single_nll after 1,000 tokens",
        "How well a short look predicts kl after 1,000 tokens",
    ]
    table = tables[1]
    assert all(len(row) == len(table.columns) for row in table.rows)
    tokens = [row[1] for row in table.rows[:-1]]
    assert tokens == sorted(tokens, key=lambda text: int(text.split(" ")[0]))
    assert len(set(tokens)) == 3
    assert table.rows[-1][:2] == ("the long training with another seed", "100%")
    assert not any("match" in row[0] for row in table.rows)


def test_cells_hold_the_correlation_its_range_and_the_regret() -> None:
    table = fidelity_tables(STUDY)[1]
    column = table.columns.index("good, 12.5% FA (10 maps): Spearman")
    (row,) = (row for row in table.rows if row[:2] == ("kl", "200 (20.0%)"))
    assert row[column] == "1.00 (1.00 to 1.00)"
    assert row[column + 1] == "0.0000"
    assert table.columns[column + 1] == "regret"
    everything = table.columns.index("all (16 maps): Spearman")
    assert table.columns[everything + 1] == "front lost"
    assert row[everything + 1] == "0.0%"


def test_the_best_of_what_costs_nothing_is_stressed() -> None:
    table = fidelity_tables(STUDY)[1]
    assert table.strong
    for line, column in table.strong:
        assert table.rows[line][1] == "0"
        free = [row[column] for row in table.rows if row[1] == "0"]
        best = max(float(cell.split(" ")[0]) for cell in free if cell != "–")
        assert float(table.rows[line][column].split(" ")[0]) == best


def test_reports_show_a_study_where_there_is_one() -> None:
    summary = made_summary()
    assert "short look" not in markdown_report(summary)
    with_study = replace(summary, fidelity=STUDY)
    for text in (markdown_report(with_study), html_report(with_study)):
        assert "How well a short look predicts kl after 1,000 tokens" in text
    assert fidelity_tables(None) == []
