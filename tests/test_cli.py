"""The command line: exit statuses and one-line errors."""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from archsearch.cli import app
from archsearch.configfile import load_config
from archsearch.rundir import RunDir

runner = CliRunner()


def call(*arguments: str | Path) -> tuple[int, str]:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_dry_run_prints_the_plan_and_writes_nothing(run_config: Path, tmp_path: Path) -> None:
    status, output = call("run", run_config, "--run-dir", tmp_path / "run", "--dry-run")
    assert status == 0, output
    for stage in ("teacher", "data", "supernet", "scores", "search", "report"):
        assert stage in output
    assert "10 head maps, up to 5 of them seeds, the others ranked by tpe" in output
    assert not (tmp_path / "run").exists()


def test_validate_names_the_family(run_config: Path) -> None:
    status, output = call("validate", run_config)
    assert status == 0
    assert "valid" in output
    assert "qwen3" in output


def test_options_without_effect_are_named_before_any_work_too(
    run_config: Path, tmp_path: Path
) -> None:
    said = "warning: data.train.path is ignored: data.train.source is teacher, not file"
    words = (run_config, "--set", "data.train.path=a.txt")
    status, output = call("validate", *words)
    assert status == 0, output
    assert output.splitlines()[0] == said
    status, output = call("run", *words, "--run-dir", tmp_path / "run", "--dry-run")
    assert status == 0, output
    assert output.splitlines()[-1] == said


def test_misspelt_key_is_status_2_and_one_line(run_config: Path) -> None:
    run_config.write_text(run_config.read_text().replace("trials: 10", "trails: 10"))
    status, output = call("validate", run_config)
    assert status == 2
    assert "trials" in output
    assert len(output.strip().splitlines()) == 1


def test_unknown_override_is_status_2(run_config: Path) -> None:
    assert call("validate", run_config, "--set", "search.nothing=1")[0] == 2


def test_a_path_where_nothing_lies_is_status_2_and_names_its_field(run_config: Path) -> None:
    fields = ("teacher.source", "supernet.source", "scoring.pairs_file", "data.heldout.path")
    for field in fields:
        overrides = ["--set", "data.heldout.source=file", "--set", "data.heldout.path=/"]
        status, output = call("validate", run_config, *overrides, "--set", f"{field}=/nowhere")
        assert status == 2
        assert (
            output
            == f"archsearch: --set {field}=/nowhere: {field}: /nowhere: no such file or folder\n"
        )


def test_a_package_that_is_not_installed_is_status_3(run_config: Path) -> None:
    source = "teacher.source=package:no_such_thing/model.gguf"
    status, output = call("validate", run_config, "--set", source)
    assert status == 3
    assert "no_such_thing is not installed" in output


def test_gpus_that_are_not_there_are_status_3(run_config: Path) -> None:
    status, output = call("validate", run_config, "--set", "execution.gpus_per_worker=64")
    assert status == 3
    assert "64 GPUs" in output


def test_constraint_that_no_map_meets_is_status_2_before_the_search(run_config: Path) -> None:
    bound = "search.constraints=[{metric: cache_bytes, max: 10}]"
    status, output = call("validate", run_config, "--set", bound)
    assert status == 2
    assert "smallest" in output
    assert output.startswith(f"archsearch: --set {bound}: search.constraints[0].max: ")


def test_context_beyond_the_teacher_is_status_2(run_config: Path) -> None:
    status, output = call("validate", run_config, "--set", "probes.contexts=[1024]")
    assert status == 2
    assert "256" in output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("search.objectives=[{metric: tracking_nll, direction: minimize}]", "needs tracking among"),
        ("scoring.pairs_file=pyproject.toml", "pyproject.toml:1: "),
        ("scoring.methods=[causal, luck]", "luck"),
        ("search.seeds.methods=[luck]", "luck"),
    ],
)
def test_faults_of_scores_are_status_2_and_one_line(
    run_config: Path, override: str, message: str
) -> None:
    for command in ("validate", "score"):
        status, output = call(command, run_config, "--set", override)
        assert status == 2, output
        (fault,) = (line for line in output.splitlines() if line.startswith("archsearch: "))
        assert message in fault
        assert output.endswith(f"{fault}\n")


def test_a_method_that_is_none_is_status_2_and_names_the_others(run_config: Path) -> None:
    status, output = call("score", run_config, "--method", "attribution", "--method", "luck")
    assert status == 2
    assert output == (
        "archsearch: --method luck: no such method; allowed: causal, attribution, retrieval_heads, "
        "duo_gates, replacement_kl, replacement_nll, leave_one_in, restoration\n"
    )


def test_a_teacher_that_answers_nothing_is_status_2_and_one_line(
    run_config: Path, tmp_path: Path
) -> None:
    scoring = "scoring={retrieval: [single], general: [], contexts: [96], pairs: 4, replacement_length: 32}"
    where = ("--run-dir", tmp_path / "run", "--set", scoring)
    status, output = call("score", run_config, "--method", "causal", *where)
    assert status == 2, output
    (fault,) = (line for line in output.splitlines() if line.startswith("archsearch: "))
    assert fault.startswith(
        "archsearch: scoring.retrieval: the teacher answers too few pairs of retrieval"
    )
    assert "(single 0 of 16)" in fault
    assert not (tmp_path / "run" / "scores.json").exists()


def test_debug_shows_the_traceback(run_config: Path) -> None:
    status, output = call("validate", run_config, "--set", "search.nothing=1", "--debug")
    assert status == 2
    assert "Traceback" in output
    assert output.strip().splitlines()[-1].startswith("archsearch: --set search.nothing=1")


def test_report_of_no_run_is_status_2(tmp_path: Path) -> None:
    status, output = call("report", tmp_path)
    assert status == 2
    assert "run directory" in output


@pytest.mark.parametrize(
    "command", [["report"], ["fidelity"], ["dashboard"], ["export", "--knee", "--to", "out"]]
)
def test_a_file_is_no_run(run_config: Path, command: list[str]) -> None:
    status, output = call(*command, run_config)
    assert status == 2
    assert output == f"archsearch: {run_config}: is a file; a run directory is expected\n"


@pytest.mark.parametrize("command", [["report"], ["fidelity", "--dry-run"], ["dashboard"]])
def test_a_run_that_cannot_be_written_is_status_3(
    scored_run: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    (scored_run / "study.db").touch()

    def fail(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    status, output = call(*command, scored_run)
    assert status == 3
    assert output == f"archsearch: {scored_run}: cannot be written (read-only file system)\n"


@pytest.mark.parametrize("command", [["score"], ["run", "--dry-run"]])
def test_a_run_directory_that_cannot_be_made_is_status_3_before_any_work(
    run_config: Path, command: list[str]
) -> None:
    status, output = call(*command, run_config, "--run-dir", "/proc/foo")
    assert status == 3
    assert output.splitlines()[1].startswith("archsearch: /proc/foo: cannot be created (/proc ")


@pytest.mark.parametrize("options", [[], ["--knee", "--candidate", "3"]])
def test_export_needs_exactly_one_choice(tmp_path: Path, options: list[str]) -> None:
    assert call("export", tmp_path, "--to", tmp_path / "out", *options)[0] == 2


@pytest.fixture
def scored_run(run_config: Path, tmp_path: Path) -> Path:
    """A run that has not searched."""
    with RunDir(tmp_path / "run") as run_dir:
        run_dir.freeze_config(load_config(run_config))
        run_dir.write_json("scores.json", {})
    return run_dir.path


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--knee"], "{run}/pareto.json: missing: the search has not run to there yet; "),
        (["--candidate", "3"], "{run}/pareto.json: missing: the search has not run"),
        (["--candidate", "-1"], "--candidate -1: not allowed; allowed: a number of the report"),
        (["--fa-share", "1.5"], "--fa-share 1.5: not allowed; allowed: 0 to 1"),
        (["--fa-share", "nan"], "--fa-share nan: not allowed; allowed: 0 to 1"),
        (["--knee", "--to", "{run}"], "--to {run}: the folder is not empty; name a new or"),
        (
            ["--knee", "--to", "{run}/lock"],
            "--to {run}/lock: cannot make this folder (a file is there)",
        ),
    ],
)
def test_export_checks_its_options_and_then_the_run(
    scored_run: Path, tmp_path: Path, options: list[str], fault: str
) -> None:
    words = [option.format(run=scored_run) for option in options]
    status, output = call("export", scored_run, "--to", tmp_path / "out", *words)
    assert status == 2
    assert output.startswith(f"archsearch: {fault.format(run=scored_run)}")
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_dashboard_needs_a_study_and_makes_none(scored_run: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in scored_run.iterdir())
    status, output = call("dashboard", scored_run)
    assert status == 2
    assert output.startswith(f"archsearch: {scored_run}/study.db: missing: the search has not run")
    assert len(output.splitlines()) == 1
    assert sorted(path.name for path in scored_run.iterdir()) == before
    status, output = call("dashboard", tmp_path / "none")
    assert status == 2
    assert "run directory" in output


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "8080x"])
def test_a_port_that_is_none_is_one_line(tmp_path: Path, port: str) -> None:
    status, output = call("dashboard", tmp_path, f"--port={port}")
    assert (status, output) == (2, f"archsearch: --port {port}: is no port; allowed: 1 to 65535\n")


def test_a_port_that_is_taken_is_one_line(scored_run: Path) -> None:
    (scored_run / "study.db").touch()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        status, output = call("dashboard", scored_run, "--port", port)
    assert status == 3
    assert re.fullmatch(
        rf"archsearch: --port {port}: address already in use; allowed: a port that is free, such as \d+\n",
        output,
    )


def test_a_storage_that_cannot_be_had_is_found_by_validate_and_before_a_run(
    run_config: Path, tmp_path: Path
) -> None:
    wish = f"search.storage=sqlite:///{tmp_path}/none/study.db"
    for command in (["validate"], ["run", "--run-dir", tmp_path / "run"]):
        status, output = call(command[0], run_config, *command[1:], "--set", wish)
        assert status == 3
        said = f"archsearch: --set {wish}: search.storage: {tmp_path}/none/study.db: its folder does not exist"
        assert output.splitlines()[-1] == said
    assert not (tmp_path / "run").exists()
    wish = "search.storage=postgresql://me:secret@localhost:x/studies"
    status, output = call("validate", run_config, "--set", wish, "--debug")
    assert status == 2
    assert "is no URL of a database" in output.splitlines()[-1]
    assert "secret" not in output


def test_doctor_finds_nothing_wrong_here() -> None:
    status, output = call("doctor")
    assert status == 0, output
    assert "Gated DeltaNet" in output
    assert output.count("chosen: agrees with the fp64 reference") == 4


def test_after_an_interrupt_a_run_goes_on_and_doctor_starts_over(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("archsearch.pipeline.plan_run", interrupt)
    monkeypatch.setattr("archsearch.doctor.check_scope", interrupt)
    status, output = call("run", run_config, "--run-dir", tmp_path / "run")
    assert status == 130
    assert output.endswith("\narchsearch: interrupted; the same command goes on from here\n")
    assert call("doctor") == (130, "archsearch: interrupted; the same command starts over\n")


def test_a_backend_that_cannot_serve_is_status_3_and_names_its_line(run_config: Path) -> None:
    run_config.write_text(run_config.read_text() + "\nkernels:\n  gdn: triton\n")
    line = len(run_config.read_text().splitlines())
    cannot = "kernels.gdn: triton cannot serve on cpu in "
    status, output = call("validate", run_config, "--set", "teacher.device=cpu")
    assert status == 3
    assert output.startswith(f"archsearch: {run_config}:{line}: {cannot}")
    wish = "kernels.gdn=flashqla"
    output = call("validate", run_config, "--set", wish, "--set", "teacher.device=cpu")[1]
    assert output.startswith(f"archsearch: --set {wish}: {cannot.replace('triton', 'flashqla')}")


@pytest.mark.parametrize("command", ["validate", "run", "score", "doctor"])
def test_a_mistyped_backend_in_the_environment_is_status_2_and_one_line(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("HYDRAHEAD_GDN_BACKEND", "tritn")
    options = ["--run-dir", tmp_path / "run"] if command in ("run", "score") else []
    status, output = call(command, run_config, *options)
    assert status == 2
    assert output == (
        "archsearch: HYDRAHEAD_GDN_BACKEND: 'tritn' is not allowed; allowed: auto, triton, flashqla, fla, torch\n"
    )
    assert not (tmp_path / "run").exists()
