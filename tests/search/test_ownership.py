"""A study belongs to one run directory, wherever that is moved to."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import optuna
import pytest

from archsearch.config import RunConfig
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.rundir import RunDir
from archsearch.search.ownership import OWNER
from archsearch.search.records import TrialResult, TrialSpec
from archsearch.search.study import check_studies, claim_first_study
from tests.search.fakes import FakeWorker, fake_config, fake_search, read_log


def shared(tmp_path: Path, trials: int = 4) -> RunConfig:
    return fake_config(trials=trials, storage=f"sqlite:///{tmp_path / 'shared.db'}")


def first_study(config: RunConfig) -> optuna.Study:
    assert config.search.storage is not None
    return optuna.load_study(study_name="fake@0", storage=config.search.storage)


def forget_owner(config: RunConfig, folder: Path) -> None:
    """As a version left them whose studies had no owner."""
    study = first_study(config)
    attributes = study.user_attrs
    with optuna.storages.RDBStorage(str(config.search.storage)).engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM study_user_attributes WHERE key = ?", (OWNER,))
    assert OWNER in attributes
    (folder / "owner.json").unlink()


def test_another_run_is_refused_before_any_work_and_in_its_search(tmp_path: Path) -> None:
    config = shared(tmp_path)
    fake_search(config, tmp_path / "a")
    before = first_study(config).get_trials()
    said = (
        rf"^search\.storage: sqlite:.*shared\.db holds study fake@0 of the run {tmp_path}/a on .*; allowed: another "
        r"search\.storage, or a new --run-dir with another name \(--set name=NAME\)$"
    )
    with pytest.raises(ConfigError, match=said):
        check_studies(config, RunDir(tmp_path / "b"))
    assert not (tmp_path / "b").exists()
    with pytest.raises(ConfigError, match=said):
        fake_search(config, tmp_path / "b")
    assert not (tmp_path / "b/calls.jsonl").exists()
    assert first_study(config).get_trials() == before
    other = config.model_copy(update={"name": "other"})
    check_studies(other, RunDir(tmp_path / "b"))
    fake_search(other, tmp_path / "c")


def test_who_begins_first_has_the_study_though_it_has_no_trial_yet(tmp_path: Path) -> None:
    config = shared(tmp_path)
    with RunDir(tmp_path / "a") as run_dir:
        claim_first_study(config, run_dir)
        claim_first_study(config, run_dir)
    with RunDir(tmp_path / "b") as other, pytest.raises(ConfigError, match=r"of the run .*/a on "):
        claim_first_study(config, other)
    assert not RunDir(tmp_path / "a").has_trials()
    fake_search(config, tmp_path / "a")
    assert RunDir(tmp_path / "a").has_trials()


def test_a_study_without_trials_is_free_once_its_run_is_gone(tmp_path: Path) -> None:
    config = shared(tmp_path)
    with RunDir(tmp_path / "a") as run_dir:
        claim_first_study(config, run_dir)
    shutil.rmtree(tmp_path / "a")
    fake_search(config, tmp_path / "b")
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(ConfigError, match="holds study fake@0 of the run"):
        fake_search(config, tmp_path / "b")


def test_a_moved_run_goes_on_and_a_copy_does_not(tmp_path: Path) -> None:
    config = shared(tmp_path)
    fake_search(config, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "moved")
    longer = shared(tmp_path, 6)
    assert len(fake_search(longer, tmp_path / "moved").rungs[0].search) == 6
    assert len(read_log(tmp_path / "moved/calls.jsonl")) == 6
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    with pytest.raises(ConfigError, match=rf"copy: is a copy of the run {tmp_path}/moved, which"):
        check_studies(longer, RunDir(tmp_path / "copy"))
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    check_studies(longer, RunDir(tmp_path / "link"))


def test_a_copy_with_its_own_study_goes_on_by_itself(tmp_path: Path) -> None:
    fake_search(fake_config(trials=4), tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    for name, trials in (("copy", 6), ("a", 5)):
        check_studies(fake_config(trials=trials), RunDir(tmp_path / name))
        outcome = fake_search(fake_config(trials=trials), tmp_path / name)
        assert len(outcome.rungs[0].search) == trials


def test_a_study_from_before_owners_goes_on_where_it_was_begun(tmp_path: Path) -> None:
    config = shared(tmp_path)
    fake_search(config, tmp_path / "a")
    forget_owner(config, tmp_path / "a")
    late = RunDir(tmp_path / "b")
    late.write_json("stages/scores.json", {"time": "2999-01-01T00:00:00+00:00"})
    with pytest.raises(ConfigError, match="of a run that it does not name"):
        check_studies(config, late)
    fake_search(shared(tmp_path, 6), tmp_path / "a")
    assert OWNER in first_study(config).user_attrs
    # One that was killed in its first search has scores alone.
    forget_owner(config, tmp_path / "a")
    (tmp_path / "a/trials.json").unlink()
    run_dir = RunDir(tmp_path / "a")
    run_dir.write_json("stages/scores.json", {"time": "2020-01-01T00:00:00+00:00"})
    check_studies(config, run_dir)


def test_a_run_may_take_another_storage_until_it_has_trials(tmp_path: Path) -> None:
    first, second = shared(tmp_path), fake_config(trials=4)
    with RunDir(tmp_path / "a") as run_dir:
        run_dir.freeze_config(first)
        claim_first_study(first, run_dir)
        run_dir.freeze_config(second)
        run_dir.freeze_config(first)
    fake_search(first, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"search\.storage: 'sqlite:.* -> None"):
        RunDir(tmp_path / "a").check_frozen(second)


def test_a_trial_that_another_process_ended_is_one_clear_line(tmp_path: Path) -> None:
    config = shared(tmp_path)

    class Meddling(FakeWorker):
        def __call__(self, spec: TrialSpec) -> TrialResult:
            if spec.candidate == 2:
                thread = threading.Thread(target=meddle, args=(config,))
                thread.start()
                thread.join()
            return super().__call__(spec)

    with pytest.raises(EnvironmentFault, match=r"another process has ended a trial of this run"):
        fake_search(config, tmp_path / "a", worker=Meddling)


def meddle(config: RunConfig) -> None:
    study = first_study(config)
    study.tell(study.get_trials()[-1].number, state=optuna.trial.TrialState.FAIL)
