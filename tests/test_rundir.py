"""The run directory: one writer, whole files, a config that stays, and what the run was made with."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archsearch.changes import describe_changes, differences
from archsearch.config import RunConfig
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.rundir import OWNER_FILE, RunDir, require_disk

HOLD = """
import sys, time
from archsearch.rundir import RunDir
with RunDir(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def config(**sections: Any) -> RunConfig:
    data = {"schema": 1, "name": "a", "teacher": {"source": "x"}, **sections}
    return RunConfig.model_validate_json(json.dumps(data))


def test_a_second_writer_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[1])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with (
        pytest.raises(EnvironmentFault, match=rf"in use by pid {holder.pid} on \S+"),
        RunDir(tmp_path / "run"),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    with RunDir(tmp_path / "run"):
        assert str(os.getpid()) in (tmp_path / "run/lock").read_text()


def test_a_lock_is_free_again_after_the_block(tmp_path: Path) -> None:
    for _ in range(2):
        with RunDir(tmp_path):
            pass


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="is a file; a run"), RunDir(tmp_path / "run"):
        pass


@pytest.mark.parametrize("inner", ["", "/deeper"])
def test_a_directory_under_a_file_is_refused(tmp_path: Path, inner: str) -> None:
    (tmp_path / "run").write_text("")
    run_dir = RunDir(f"{tmp_path}/run{inner}")
    for attempt in (run_dir.__enter__, run_dir.require_writable, run_dir.load_config):
        with pytest.raises(ConfigError, match=r"run: is a file; a run directory is expected$"):
            attempt()


def refuse(code: int) -> Callable[..., None]:
    """A system call that fails in that way, as a disk mounted read-only makes it: chmod does not stop root."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.EROFS, "read-only file system"), (errno.EACCES, "permission denied")],
)
def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    there, new = RunDir(tmp_path), RunDir(tmp_path / "new" / "run")
    there.require_writable()
    new.require_writable()
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr("builtins.open", refuse(code))
    monkeypatch.setattr("os.mkdir", refuse(code))
    monkeypatch.setattr("tempfile.TemporaryFile", refuse(code))
    for attempt in (there.__enter__, there.require_writable):
        with pytest.raises(EnvironmentFault) as caught:
            attempt()
        assert str(caught.value) == f"{tmp_path}: cannot be written ({reason})"
    with pytest.raises(EnvironmentFault, match=rf"^{new.path}: cannot be created \({reason}\)$"):
        new.__enter__()
    with pytest.raises(EnvironmentFault) as caught:
        new.require_writable()
    assert str(caught.value) == (
        f"{new.path}: cannot be created ({tmp_path} cannot be written ({reason}))"
    )


def test_a_place_that_takes_no_folder_is_named_before_its_disk() -> None:
    with pytest.raises(EnvironmentFault, match=r"^/proc/foo: cannot be created \(/proc cannot be"):
        RunDir("/proc/foo").require_writable()


def test_a_disk_that_fills_up_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault) as caught, RunDir(tmp_path).replacing("train.npy"):
        refuse(errno.ENOSPC)()
    assert str(caught.value) == f"{tmp_path}: cannot be written (no space left on device)"
    with pytest.raises(OSError, match="No such device"), RunDir(tmp_path).replacing("train.npy"):
        refuse(errno.ENODEV)()
    assert not [*tmp_path.iterdir()]


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_text("scores.json", "old")

    def write_half() -> None:
        with run_dir.replacing("scores.json") as path:
            path.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert (tmp_path / "scores.json").read_text() == "old"
    with pytest.raises(ValueError, match="Out of range"):
        run_dir.write_json("scores.json", float("nan"))
    assert os.listdir(tmp_path) == ["scores.json"]


def test_json_round_trips_and_damage_is_named(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_json("deep/er.json", {"a": [1, 2]})
    assert run_dir.read_json("deep/er.json") == {"a": [1, 2]}
    with pytest.raises(ConfigError, match=r"none\.json: missing"):
        run_dir.read_json("none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json: damaged"):
        run_dir.read_json("bad.json")


def test_a_changed_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.freeze_config(config())
    run_dir.freeze_config(config())
    changed = config(search={"objectives": [{"metric": "kl", "direction": "minimize"}]}, seed=4)
    with pytest.raises(ConfigError) as caught:
        run_dir.freeze_config(changed)
    with pytest.raises(ConfigError, match="another config"):
        run_dir.check_frozen(changed)
    message = str(caught.value)
    assert "seed: 0 -> 4" in message
    assert "search.objectives: " in message
    assert message.endswith(f"--reuse {tmp_path}")
    assert run_dir.load_config() == config()


def test_a_refusal_of_many_changes_is_a_line_that_can_be_read(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    costs = [{"metric": name, "direction": "minimize"} for name in ("kl", "cache_bytes")]
    run_dir.freeze_config(config(search={"objectives": costs}))
    changed = {"objectives": [costs[0], {**costs[1], "metric": "fa_share"}], "sampler": "random"}
    with pytest.raises(ConfigError) as caught:
        run_dir.check_frozen(config(seed=4, search=changed, cost={"context": 9}))
    assert (
        "(seed: 0 -> 4; search.sampler: 'tpe' -> 'random'; "
        "search.objectives[1].metric: 'cache_bytes' -> 'fa_share'; and 1 more); allowed: "
    ) in str(caught.value)


def test_of_long_values_the_part_that_differs_is_shown() -> None:
    old, new = [*range(60)], [*range(30), 99, *range(31, 60)]
    said = describe_changes({"a": (old, new), "b": (old, old[:-1])})
    first, second = said.split("; ")
    assert first.startswith("a: ...")
    assert first.endswith("...")
    assert ", 30, 31," in first.split(" -> ")[0]
    assert ", 99, 31," in first.split(" -> ")[1]
    assert second.endswith("58, 59] -> ..." + second.rpartition("...")[2])
    assert max(map(len, (first, second))) < 140


def test_files_that_scores_were_made_from_may_change_until_heads_are_scored(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for digest in ("a", "b"):
        run_dir.freeze_config(config(), {"scoring.pairs_file": digest})
    run_dir.write_json("scores/attribution.json", {})
    run_dir.freeze_config(config(), {"scoring.pairs_file": "b"})
    with pytest.raises(ConfigError, match=r"scoring\.pairs_file: the file has changed since"):
        run_dir.freeze_config(config(), {"scoring.pairs_file": "a"})
    # Removing the scores does not hide what later stages were made from.
    run_dir.mark_done("scores")
    (tmp_path / "scores/attribution.json").unlink()
    with pytest.raises(ConfigError, match="has changed"):
        run_dir.check_frozen(config(), {"scoring.pairs_file": "a"})


def test_a_run_of_before_files_were_written_down_goes_on(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.freeze_config(config())
    run_dir.write_json("scores.json", {})
    run_dir.freeze_config(config(), {"scoring.pairs_file": "a"})
    with pytest.raises(ConfigError, match="has changed"):
        run_dir.check_frozen(config(), {"scoring.pairs_file": "b"})


def test_a_folder_of_other_things_is_no_run_directory(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for left in ("lock", ".config-x1.json"):
        (tmp_path / left).touch()
    run_dir.check_frozen(config())
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"holds notes\.txt but no config\.json, .* allowed"):
        run_dir.check_frozen(config())


def test_only_a_folder_without_a_config_is_doubted_to_be_a_run(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with pytest.raises(ConfigError, match=r"is .* a run directory"):
        run_dir.read_json("pareto.json")
    run_dir.freeze_config(config())
    with pytest.raises(ConfigError, match=r"pareto\.json: missing$"):
        run_dir.read_json("pareto.json")


def test_what_no_finished_work_depends_on_may_change(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.freeze_config(config())
    longer = config(search={"trials": 99}, execution={"workers": 2, "executor": "serial"})
    run_dir.freeze_config(longer)
    assert run_dir.load_config() == longer


def test_a_field_that_is_new_since_the_run_counts_with_its_default(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.freeze_config(config())
    older = run_dir.read_json("config.json")
    del older["search"]["seeds"]["random_maps"]
    run_dir.write_json("config.json", older)
    run_dir.check_frozen(config())
    with pytest.raises(ConfigError, match=r"search\.seeds\.random_maps: 1 -> 2"):
        run_dir.check_frozen(config(search={"seeds": {"random_maps": 2}}))


def test_a_config_of_another_version_is_named(tmp_path: Path) -> None:
    RunDir(tmp_path).write_json("config.json", {"schema": 0})
    with pytest.raises(ConfigError) as caught:
        RunDir(tmp_path).load_config()
    assert str(caught.value) == (
        f"{tmp_path}/config.json: damaged or of another version: schema: 0 is not allowed; allowed: 1 "
        "(and 2 more problems)"
    )


def test_stages_are_remembered(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.stage("scores") is None
    run_dir.mark_done("scores", seconds=1.5)
    details = run_dir.stage("scores")
    assert details is not None
    assert details["seconds"] == 1.5


def test_provenance_grows_with_each_call(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for seed in (1, 2):
        run_dir.record_provenance(seed)
    calls = run_dir.read_json("provenance.json")["calls"]
    assert [call["seed"] for call in calls] == [1, 2]
    assert {"argv", "git_commit", "versions", "host", "time"} <= calls[0].keys()
    assert calls[0]["versions"]["optuna"]


@pytest.mark.parametrize("text", ["null", "[3]", "{}", '{"sha256": [], "calls": {}}'])
def test_damaged_records_of_a_run_are_named(tmp_path: Path, text: str) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.freeze_config(config(), {"scoring.pairs_file": "ab"})
    run_dir.write_json("scores.json", {})
    for name in ("inputs.json", "provenance.json"):
        run_dir.write_text(name, text)
    with pytest.raises(ConfigError, match=r"/inputs\.json: damaged, no dict sha256 in it"):
        run_dir.check_frozen(config(), {"scoring.pairs_file": "ab"})
    with pytest.raises(ConfigError, match=r"/provenance\.json: damaged, no list calls in it"):
        run_dir.record_provenance(1)


def test_too_little_disk_is_found_before_the_start(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    require_disk(tmp_path / "not/there/yet", 1)
    with pytest.raises(EnvironmentFault, match="GB is needed"):
        RunDir(tmp_path).require_disk(2 * free + 10**9)


def test_differences_reach_into_sections() -> None:
    old, new = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 1, "c": 3, "e": 4}, "d": [2]}
    assert differences(old, new) == {"a.c": (2, 3), "a.e": (None, 4), "d": ([1], [2])}


def test_a_damaged_owner_file_is_one_line(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        run_dir.write_json(OWNER_FILE, ["no object"])
        with pytest.raises(ConfigError, match=r"owner\.json: damaged, no bool begun in it"):
            run_dir.has_trials()
