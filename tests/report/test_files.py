"""The files of a report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from archsearch.report.files import write_report
from archsearch.rundir import RunDir
from tests.search.fakes import SHAPE, fake_config, fake_search

from .runs import score_data, similarity_data


@pytest.fixture
def scored(tmp_path: Path) -> RunDir:
    """A run that stopped after its scores."""
    with RunDir(tmp_path) as run_dir:
        run_dir.freeze_config(fake_config())
        run_dir.write_json("teacher.json", {"schema": 1, "model": asdict(SHAPE)})
        run_dir.write_json("scores.json", score_data(SHAPE))
        run_dir.write_json("scores/attribution.json", score_data(SHAPE, "attribution"))
        run_dir.write_json("similarity.json", similarity_data(SHAPE))
    return run_dir


def pictures(run_dir: RunDir) -> set[str]:
    found = list((run_dir / "report").glob("*.svg"))
    for path in found:
        ElementTree.parse(path)
    return {path.name for path in found}


def test_scores_alone_give_a_page_and_their_pictures(scored: RunDir) -> None:
    page = write_report(scored)
    assert page.read_text(encoding="utf-8").count('class="scores"') == 2
    assert pictures(scored) == {"scores.svg", "similarity.svg"}
    assert "## Highest heads" in (scored / "report/summary.md").read_text(encoding="utf-8")


def test_a_search_adds_its_own(scored: RunDir) -> None:
    fake_search(fake_config(), scored.path)
    write_report(scored)
    assert pictures(scored) == {"pareto.svg", "scores.svg", "similarity.svg"}
    assert any((scored / "report/headmaps").glob("*.svg"))


def test_a_run_without_scores_files_has_no_picture_of_them(tmp_path: Path) -> None:
    fake_search(fake_config(), tmp_path)
    run_dir = RunDir(tmp_path)
    run_dir.write_json("teacher.json", {"schema": 1, "model": asdict(SHAPE)})
    page = write_report(run_dir)
    assert "Head scores" not in page.read_text(encoding="utf-8")
    assert pictures(run_dir) == {"pareto.svg"}
