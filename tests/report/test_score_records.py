"""Scores files as a report reads them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from archsearch.errors import ConfigError
from archsearch.report.score_records import (
    ScoreFiles,
    read_pair_counts,
    read_score_files,
    scores_from_json,
    similarity_from_json,
)
from archsearch.rundir import RunDir

from .runs import SHAPE, old_score_data, score_data, similarity_data


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    found.write_json("teacher.json", {"schema": 1, "model": asdict(SHAPE)})
    return found


def test_a_run_without_scores_has_none(tmp_path: Path) -> None:
    assert read_score_files(RunDir(tmp_path)) == ScoreFiles()
    assert not ScoreFiles()


def test_reads_each_file_that_is_there(run_dir: RunDir) -> None:
    run_dir.write_json("scores.json", score_data())
    for method in ("restoration", "attribution"):
        run_dir.write_json(f"scores/{method}.json", score_data(method=method))
    run_dir.write_json("similarity.json", similarity_data())
    files = read_score_files(run_dir)
    assert files.causal is not None
    assert files.causal.composite == score_data()["composite"]
    assert files.causal.capabilities["general"].probes == {"copying": {"kept": 6, "drawn": 8}}
    assert [scores.method for scores in files.others] == ["attribution", "restoration"]
    assert files.similarity is not None
    assert files.similarity.heads == similarity_data()["heads"]


def test_pair_counts_come_from_their_file_or_from_older_causal_scores(run_dir: RunDir) -> None:
    assert read_pair_counts(run_dir) == {}
    run_dir.write_json("scores.json", score_data())
    assert read_pair_counts(run_dir)["general"] == {"copying": {"kept": 6, "drawn": 8}}
    run_dir.write_json("scores.json", old_score_data())
    assert not any(read_pair_counts(run_dir).values())
    found = {"user": {"pairs": {"kept": 1, "drawn": 2}}}
    run_dir.write_json("pairs.json", {"schema": 1, "capabilities": found})
    assert read_pair_counts(run_dir) == read_score_files(run_dir).pairs == found
    run_dir.write_json("pairs.json", {"schema": 1, "capabilities": {"user": {"pairs": {}}}})
    with pytest.raises(ConfigError, match=r"pairs\.json: damaged"):
        read_pair_counts(run_dir)


def test_what_is_optional_may_be_missing() -> None:
    scores = scores_from_json(old_score_data(), SHAPE)
    capability = scores.capabilities["retrieval"]
    assert scores.groups is None
    assert scores.spread is None
    assert capability.send is None
    assert capability.shown == capability.recv == score_data()["capabilities"]["retrieval"]["recv"]
    bare = {"schema": 1, "composite": score_data()["composite"]}
    assert not scores_from_json(bare, SHAPE).capabilities


def test_query_heads_read_the_kv_head_of_their_group() -> None:
    scores = scores_from_json(score_data(), SHAPE)
    assert [scores.kv_head(head) for head in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": 3}, "schema 3 is not 1 or 2"),
        ({"composite": None}, "composite is not 6 x 4"),
        ({"composite": [[0.0] * 3] * 6}, "composite is not 6 x 4"),
        ({"groups": [[0.0] * 4] * 6}, "groups is not 6 x 2"),
        ({"spread": [[math.inf] * 4] * 6}, "spread holds inf"),
        ({"capabilities": {"a": {"recv": [[0.0] * 4] * 5}}}, "recv is not 6 x 4"),
        ({"capabilities": {"a": 3}}, "int"),
        ({"capabilities": [1]}, "list"),
    ],
)
def test_damaged_scores_are_named(run_dir: RunDir, change: dict[str, Any], problem: str) -> None:
    run_dir.write_text("scores.json", json.dumps({**score_data(), **change}))
    with pytest.raises(ConfigError, match=rf"scores\.json: damaged.*{problem}"):
        read_score_files(run_dir)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"blocks": None}, "blocks is not 6 x 6"),
        ({"heads": [[[1.0]]]}, "heads is not of 6 layers"),
        ({"heads": [[[1.0]]] * 6}, "heads is not 4 x 4"),
        ({"heads": 1}, "heads is not of 6 layers"),
    ],
)
def test_damaged_similarity_is_named(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        similarity_from_json({**similarity_data(), **change}, SHAPE)
