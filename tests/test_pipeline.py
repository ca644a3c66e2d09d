"""A whole run on a tiny random teacher, its resumption, and the export of what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from archsearch.cli import app
from archsearch.configfile import load_config
from archsearch.console import Printer
from archsearch.errors import ConfigError
from archsearch.headmap import HeadMap
from archsearch.pipeline import plan_run, run_stages
from archsearch.plan import STAGES
from archsearch.rundir import RunDir
from archsearch.stages import RunContext


@pytest.fixture(scope="module")
def finished(
    teacher_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, str]:
    """A finished run: its config, its directory, what it printed."""
    from tests.conftest import TINY_RUN

    place = tmp_path_factory.mktemp("run")
    config = place / "check.yaml"
    config.write_text(TINY_RUN.format(teacher=teacher_folder))
    result = CliRunner().invoke(app, ["run", str(config), "--run-dir", str(place / "run")])
    assert result.exit_code == 0, result.output
    return config, place / "run", result.output


def test_run_prints_one_line_a_stage(finished: tuple[Path, Path, str]) -> None:
    _, _, output = finished
    for stage in STAGES:
        closing = [
            row for row in output.splitlines() if row.startswith(stage) and row.endswith("s")
        ]
        assert len(closing) == 1, stage


def test_run_leaves_what_it_promises(finished: tuple[Path, Path, str]) -> None:
    _, run_dir, _ = finished
    for name in ("scores.json", "supernet.safetensors", "pareto.json", "report/index.html"):
        assert (run_dir / name).stat().st_size > 0, name
    stages = json.loads((run_dir / "stages.json").read_text())["stages"]
    assert [row["stage"] for row in stages] == list(STAGES)
    assert all(row["seconds"] >= 0 and row["peak_bytes"] > 0 for row in stages)
    points = json.loads((run_dir / "pareto.json").read_text())["points"]
    assert points
    for point in points:
        saved = HeadMap.load(run_dir / f"front/{point['candidate']}.json")
        assert saved == HeadMap.from_json(point["head_map"])


def test_running_again_keeps_finished_stages(finished: tuple[Path, Path, str]) -> None:
    config, run_dir, _ = finished
    before = (run_dir / "supernet.safetensors").stat().st_mtime_ns
    pareto = (run_dir / "pareto.json").read_bytes()
    result = CliRunner().invoke(app, ["run", str(config), "--run-dir", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert "search    kept" in result.output
    assert (run_dir / "supernet.safetensors").stat().st_mtime_ns == before
    assert (run_dir / "pareto.json").read_bytes() == pareto


def test_other_config_in_the_same_directory_is_refused(finished: tuple[Path, Path, str]) -> None:
    config, run_dir, _ = finished
    settings = load_config(config, ["seed=4"])
    with pytest.raises(ConfigError, match="seed"):
        run_stages(settings, RunDir(run_dir), Printer(Console(quiet=True)))


def test_export_of_the_knee_loads(finished: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, run_dir, _ = finished
    result = CliRunner().invoke(
        app, ["export", str(run_dir), "--knee", "--to", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    head_map = HeadMap.load(tmp_path / "out" / "head_map.json")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["head_map"] == list(head_map.layers)
    again = CliRunner().invoke(
        app, ["export", str(run_dir), "--knee", "--to", str(tmp_path / "out")]
    )
    assert again.exit_code == 2


def test_report_command_prints_the_tables(finished: tuple[Path, Path, str]) -> None:
    _, run_dir, _ = finished
    result = CliRunner().invoke(app, ["report", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert "## Hypervolume" in result.output


def test_plan_marks_finished_stages(finished: tuple[Path, Path, str]) -> None:
    config, run_dir, _ = finished
    plan = plan_run(load_config(config, []), RunDir(run_dir))
    assert all(stage.finished for stage in plan.stages)
    more = plan_run(load_config(config, ["search.trials=12"]), RunDir(run_dir))
    assert [stage.name for stage in more.stages if not stage.finished] == ["search"]


def test_seeds_differ_by_purpose_and_follow_the_config(run_config: Path, tmp_path: Path) -> None:
    context = RunContext(load_config(run_config, []), RunDir(tmp_path))
    other = RunContext(load_config(run_config, ["seed=9"]), RunDir(tmp_path))
    assert context.seed("train") == context.seed("train")
    assert len({context.seed("train"), context.seed("heldout"), other.seed("train")}) == 3
