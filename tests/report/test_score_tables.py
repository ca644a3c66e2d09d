"""The tables of head scores."""

from __future__ import annotations

from archsearch.report.score_records import ScoreFiles, scores_from_json
from archsearch.report.score_tables import pair_table, score_tables, top_table

from .runs import SHAPE, made_scores, old_score_data, score_data


def test_pair_table_has_a_row_a_sub_probe() -> None:
    counts = {"kept": 6, "drawn": 8}
    pairs = {
        "retrieval": {"single": counts, "multikey": counts},
        "general": {"copying": {"kept": 0, "drawn": 32}},
    }
    table = pair_table(pairs)
    assert table.rows == (
        ("retrieval", "single", "6", "8", "75%"),
        ("retrieval", "multikey", "6", "8", "75%"),
        ("general", "copying", "0", "32", "0%"),
    )


def test_top_table_names_the_highest_heads_in_order() -> None:
    data = score_data()
    table = top_table(scores_from_json(data, SHAPE))
    values = sorted((v for row in data["composite"] for v in row), reverse=True)[:10]
    shown = [data["composite"][int(row[0])][int(row[1])] for row in table.rows]
    assert shown == values
    assert all(int(row[2]) == int(row[1]) // 2 for row in table.rows)
    assert table.columns[4:] == tuple(
        f"{name} {key}"
        for name in ("retrieval", "general")
        for key in ("recv", "send", "consistency")
    )
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_old_files_have_fewer_columns_and_no_pairs() -> None:
    scores = scores_from_json(old_score_data(), SHAPE)
    (table,) = score_tables(ScoreFiles(scores))
    assert "retrieval send" not in table.columns
    assert "±" not in "".join(table.rows[0]) + table.note


def test_other_methods_have_a_table_only_where_there_is_no_causal_score() -> None:
    files = made_scores()
    assert len(score_tables(files)) == 2
    alone = ScoreFiles(others=files.others, pairs=files.pairs)
    assert [table.title for table in score_tables(alone)] == [
        "Highest heads by attribution patching",
        "Highest heads by single-replacement KL",
        "Pairs that heads are scored by",
    ]
    assert score_tables(ScoreFiles()) == []
