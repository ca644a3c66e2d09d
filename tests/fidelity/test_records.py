"""fidelity.json keeps a study whole, and says so where it cannot be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archsearch.errors import ConfigError
from archsearch.fidelity.analysis import analyse
from archsearch.fidelity.records import FIDELITY_FILE, Study, read_study, write_study
from archsearch.rundir import RunDir

from .studies import made_study


@pytest.fixture(scope="module")
def study() -> Study:
    whole = analyse(made_study(), ["kl", "niah_single_nll"])
    return whole.with_failure((whole.subjects[0].head_map.layers, 1), "worker died")


def test_a_study_comes_back_as_it_was(study: Study, tmp_path: Path) -> None:
    assert read_study(RunDir(tmp_path)) is None
    write_study(RunDir(tmp_path), study)
    assert read_study(RunDir(tmp_path)) == study


def test_a_run_takes_the_place_of_its_failure(study: Study) -> None:
    key, run = next(iter(study.runs.items()))
    failed = study.with_failure(key, "non-finite")
    assert failed.failures[key] == "non-finite"
    assert key not in failed.with_run(key, run).failures


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2 is not 1"),
        ({"subjects": [{}]}, "malformed"),
        ({"runs": [{"head_map": [], "seed": 0, "readings": [{}], "seconds": 1}]}, "malformed"),
        ({"settings": None}, "malformed"),
        ({"agreements": [{"metric": "kl"}]}, "malformed"),
    ],
)
def test_other_files_are_refused(
    study: Study, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / FIDELITY_FILE).write_text(json.dumps(study.to_json() | change))
    with pytest.raises(ConfigError, match=f"{FIDELITY_FILE}: damaged .*{message}"):
        read_study(RunDir(tmp_path))


def test_readings_are_found_by_their_tokens(study: Study) -> None:
    run = next(iter(study.runs.values()))
    assert run.value("kl", 200) == run.readings[2].metrics["kl"]
    with pytest.raises(KeyError):
        run.value("kl", 300)
    assert study.settings.tokens == 1000
    assert study.settings.trained_tokens == 1000 + 60
    own = replace(study.settings, proxies=(100, 200))
    assert own.trunk_lengths == (0, 1000)
    # From the end of one proxy to the next, or from where the first one's rate began to fall.
    assert own.trained_tokens == 1000 + 200
    assert replace(own, proxy_decay_share=0.3).trained_tokens == 1000 + 200 + 30
