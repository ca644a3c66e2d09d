"""What a study may change of its run's config, and that it keeps to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archsearch.configfile import load_config
from archsearch.errors import ConfigError
from archsearch.fidelity.records import FIDELITY_FILE
from archsearch.fidelity_changes import CHANGES_FILE, changed_config, write_changes
from archsearch.rundir import RunDir

RATE = "distill.learning_rate=0.5"
BY_THE_WAY = ("distill.cache_gib=1", "execution.threads_per_worker=2")


@pytest.fixture
def run(run_config: Path, tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    run_dir.freeze_config(load_config(run_config))
    return run_dir


def begin(run: RunDir, *overrides: str) -> None:
    write_changes(run, changed_config(run, overrides))
    run.write_json(FIDELITY_FILE, {})


def test_a_study_keeps_to_what_it_was_begun_with(run: RunDir) -> None:
    assert changed_config(run, [RATE]).distill.learning_rate == 0.5
    begin(run, RATE, BY_THE_WAY[0])
    assert json.loads((run / CHANGES_FILE).read_text()) == {"distill.learning_rate": 0.5}
    assert changed_config(run, [RATE]).distill.learning_rate == 0.5
    assert changed_config(run, [RATE, *BY_THE_WAY]).execution.threads_per_worker == 2
    for others in ([], ["distill.learning_rate=0.25"], [RATE, "student.full.gate=true"]):
        with pytest.raises(
            ConfigError, match=r"trained with --set distill.learning_rate=0.5; allowed: the same"
        ):
            changed_config(run, others)
    # With the study gone, the next one may be another.
    (run / FIDELITY_FILE).unlink()
    begin(run)
    assert changed_config(run, []) == run.load_config()
    with pytest.raises(ConfigError, match="trained with no --set"):
        changed_config(run, [RATE])


def test_a_study_of_before_goes_on_and_may_run_otherwise(run: RunDir) -> None:
    run.write_json(FIDELITY_FILE, {})
    assert changed_config(run, BY_THE_WAY).distill.cache_gib == 1
    write_changes(run, changed_config(run, BY_THE_WAY))
    assert not (run / CHANGES_FILE).exists()


@pytest.mark.parametrize(
    "override", ["data.niah_share=0", "search.trials=3", "teacher.dtype=bfloat16"]
)
def test_what_is_the_runs_own_is_not_changed(run: RunDir, override: str) -> None:
    with pytest.raises(ConfigError, match=f"--set {override}: not allowed here; allowed: distill"):
        changed_config(run, [override])
