"""What a report reads from a run directory is what the search came to."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from archsearch.errors import ConfigError
from archsearch.report.summary import read_summary
from archsearch.rundir import RunDir
from tests.report.runs import score_data
from tests.search.fakes import SHAPE, fake_config, fake_search


def test_summary_holds_the_rungs_of_the_search(tmp_path: Path) -> None:
    config = fake_config(proxy_tokens=[0, 100], random_control=True)
    outcome = fake_search(config, tmp_path, faults={"5": ["raise", "raise"]})
    RunDir(tmp_path).write_json("teacher.json", {"schema": 1, "model": asdict(SHAPE)})
    summary = read_summary(RunDir(tmp_path))
    assert [rung.proxy_tokens for rung in summary.rungs] == [0, 100]
    for read, rung in zip(summary.rungs, outcome.rungs, strict=True):
        assert read.hypervolume == rung.fronts.hypervolumes()
        assert read.reference == rung.fronts.scale.reference
        assert {c.candidate for c in read.front} == {c.candidate for c in rung.fronts.points}
        assert len(read.candidates) == len(rung.search) + len(rung.control)
    assert len(summary.failures) == outcome.failed > 0
    assert all(failure.proxy_tokens == 0 for failure in summary.failures)


def test_summary_of_a_run_without_candidates_is_refused(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        run_dir.freeze_config(fake_config())
        with pytest.raises(ConfigError, match="no candidate has been evaluated yet"):
            read_summary(run_dir)


def test_summary_of_scores_alone(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        run_dir.freeze_config(fake_config())
        run_dir.write_json("teacher.json", {"schema": 1, "model": asdict(SHAPE)})
        run_dir.write_json("scores/attribution.json", score_data(SHAPE, "attribution"))
        summary = read_summary(run_dir)
    assert not summary.rungs
    assert summary.scores.causal is None
    assert [scores.method for scores in summary.scores.others] == ["attribution"]
