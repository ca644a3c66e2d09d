"""A whole run on a tiny random teacher, its resumption, and the export of what it found."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from archsearch import stages
from archsearch.attention.backends import BackendRefusal
from archsearch.cli import KERNEL_CHOICES, app
from archsearch.config import ScoreMethod
from archsearch.configfile import load_config
from archsearch.console import Printer
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.headmap import HeadMap
from archsearch.pipeline import plan_run, run_methods, run_stages
from archsearch.plan import STAGES
from archsearch.rundir import RunDir
from archsearch.scoring.head_scores import HeadScores
from archsearch.scoring.inputs import ScoreInputs
from archsearch.scoring.methods import METHODS, Method
from archsearch.search.front import CONTROL
from archsearch.timings import read_timings
from tests.small_runs import write_config


@pytest.fixture(scope="module")
def finished(
    teacher_folder: Path, answered_pairs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, str]:
    """A finished run: its config, its directory, what it printed."""
    from tests.conftest import TINY_RUN

    place = tmp_path_factory.mktemp("run")
    config = place / "check.yaml"
    config.write_text(TINY_RUN.format(teacher=teacher_folder, pairs=answered_pairs))
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


def test_a_run_ends_with_how_each_proxy_ended(finished: tuple[Path, Path, str]) -> None:
    _, run_dir, output = finished
    rows = output.splitlines()
    (place,) = (place for place, row in enumerate(rows) if row.startswith("search    front: "))
    assert rows[place + 1] == "          untrained: all 10 head maps"
    assert re.fullmatch(r" {10}256 tokens: all \d+ head maps", rows[place + 2])
    assert rows[place + 3].startswith("report ")
    kept = json.loads((run_dir / "stages/search.json").read_text())["summary"]
    assert kept.endswith(f"; untrained: all 10 head maps; {rows[place + 2].strip()}")


def test_run_leaves_what_it_promises(finished: tuple[Path, Path, str]) -> None:
    _, run_dir, _ = finished
    scores = ("scores.json", "scores/replacement_kl.json", "similarity.json")
    for name in (*scores, "supernet.safetensors", "pareto.json", "report/index.html"):
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


def test_a_higher_limit_goes_on_with_a_run_that_is_done_and_a_lower_one_says_that_it_does_nothing(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    config, run_dir = finished[0], Path(shutil.copytree(finished[1], tmp_path / "run"))
    before = contents(run_dir)

    def run(*limits: str) -> str:
        options = [word for limit in limits for word in ("--set", f"search.{limit}")]
        command = ["run", str(config), "--run-dir", str(run_dir), *options]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        return result.output

    output = run("trials=4", "patience=2")
    for limit in ("trials: 10 -> 4", "patience: None -> 2"):
        assert f"search.{limit} changes nothing of a search that is done\n" in output
    assert contents(run_dir)["pareto.json"] == before["pareto.json"]
    assert "search    kept" in run("trials=10")
    output = run("trials=12")
    assert "search    kept" not in output
    assert "scores    kept" in output
    after = contents(run_dir)
    assert after["supernet.safetensors"] == before["supernet.safetensors"]
    old, new = (json.loads(files["trials.json"])["rungs"] for files in (before, after))
    assert len(new[0]["candidates"]) == len(old[0]["candidates"]) + 4
    for was, now in zip(old, new, strict=True):
        known = {(c["candidate"], c["method"]): c["metrics"] for c in now["candidates"]}
        assert all(known[c["candidate"], c["method"]] == c["metrics"] for c in was["candidates"])
    points = {str(p["candidate"]) for p in json.loads(after["pareto.json"])["points"]}
    assert {path.stem for path in (run_dir / "front").iterdir()} == points


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


def test_a_run_whose_constraints_nothing_meets_says_so_wherever_it_is_looked_at(
    teacher_folder: Path, answered_pairs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, run_dir = write_config(tmp_path, teacher_folder, answered_pairs), tmp_path / "run"
    bounds = "search.constraints=[{metric: kl, max: 0.0000001}, {metric: fa_share, max: 0.9}]"
    command = ["run", str(config), "--run-dir", str(run_dir), "--set", bounds]
    for _ in range(2):  # Also where all of it is kept.
        caplog.clear()
        result = CliRunner().invoke(app, [*command, "--set", "search.proxy_tokens=[0]"])
        assert result.exit_code == 0, result.output
        (warning,) = [r.getMessage() for r in caplog.records if "empty" in r.getMessage()]
        unmet = warning.removeprefix("the front is empty: ")
        assert unmet.startswith(
            "no head map (untrained) meets search.constraints: kl at most 1e-07"
        )
        assert unmet in " ".join(result.output.split())
    assert f"The front is empty: {unmet}." in (run_dir / "report/index.html").read_text()
    out = ["--to", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["export", str(run_dir), "--knee", *out])
    assert result.exit_code == 2
    assert result.output.startswith(f"archsearch: {run_dir}: the front is empty, {unmet}; allowed:")
    export_to(run_dir, tmp_path / "out", "--candidate", 1)


def export_to(run_dir: Path, folder: Path, *choice: object) -> str:
    """What `archsearch export` says, and that it says it with status 0."""
    command = ["export", str(run_dir), *map(str, choice), "--to", str(folder)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result.output


def test_any_candidate_is_exported_as_its_longest_proxy_left_it(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, run_dir, _ = finished
    pareto = json.loads((run_dir / "pareto.json").read_text())
    points = {p["candidate"] for p in (*pareto["points"], *pareto["seeds"]["points"])}
    rungs = json.loads((run_dir / "trials.json").read_text())["rungs"]
    found = {
        c["candidate"]: (rung["proxy_tokens"], c["metrics"])
        for rung in rungs
        for c in rung["candidates"]
        if c["method"] != CONTROL
    }
    pruned = next(n for n, (tokens, _) in found.items() if not tokens and n not in points)
    for number in (pruned, max(points)):
        tokens, metrics = found[number]
        output = export_to(run_dir, tmp_path / str(number), "--candidate", number)
        facts = json.loads((tmp_path / str(number) / "provenance.json").read_text())
        assert (facts["candidate"], facts["metrics"]) == (number, metrics)
        trained = facts["distillation_tokens"]
        # In whole batches.
        assert tokens <= trained <= 1.5 * tokens
        assert f"candidate {number} (" in output
        assert f"after {trained} tokens: " in output


def test_a_head_map_of_a_file_is_exported_with_the_supernets_weights(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, run_dir, _ = finished
    file = next((run_dir / "front").iterdir())
    output = export_to(run_dir, tmp_path / "out", "--head-map", file)
    assert f": head map {file.name}, supernet weights alone, not measured\n" in output
    assert HeadMap.load(tmp_path / "out/head_map.json") == HeadMap.load(file)
    facts = json.loads((tmp_path / "out/provenance.json").read_text())
    assert (facts["candidate"], facts["distillation_tokens"]) == (None, 0)


def test_a_candidate_that_is_not_there_is_one_line(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, run_dir, _ = finished
    command = ["export", str(run_dir), "--candidate", "99", "--to", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    allowed = "allowed: a number from 0 to 9 (archsearch report)"
    assert f"--candidate 99: not evaluated in {run_dir}; {allowed}\n" in result.output
    assert not (tmp_path / "out").exists()


def test_report_command_prints_the_tables(finished: tuple[Path, Path, str]) -> None:
    _, run_dir, _ = finished
    result = CliRunner().invoke(app, ["report", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert "## Hypervolume" in result.output


def test_plan_marks_finished_stages(finished: tuple[Path, Path, str]) -> None:
    config, run_dir, _ = finished
    plan = plan_run(load_config(config, []), RunDir(run_dir))
    assert all(stage.finished for stage in plan.stages)
    for asked in ("search.trials=12", "search.retention.prompts=2"):
        more = plan_run(load_config(config, [asked]), RunDir(run_dir))
        assert [stage.name for stage in more.stages if not stage.finished] == ["search"]


def score(config: Path, run_dir: Path, *methods: str) -> str:
    options = [word for word in methods if word.startswith("--")]
    names = [word for word in methods if word not in options]
    chosen = [*options, *(word for name in names for word in ("--method", name))]
    result = CliRunner().invoke(app, ["score", str(config), "--run-dir", str(run_dir), *chosen])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_scores_close_with_pairs_and_methods(finished: tuple[Path, Path, str]) -> None:
    _, _, output = finished
    (line,) = (row for row in output.splitlines() if row.startswith("scores "))
    assert "user 6 of 6 pairs kept; causal, replacement_kl" in line


def test_score_says_what_it_does_and_no_more(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    for options in ((), ("attribution",)):
        output = score(finished[0], tmp_path / "run", *options)
        for word in ("search", "report", "trials", "serves"):
            assert not any(line.lstrip().startswith(word) for line in output.splitlines())
        assert "-0.000" not in output
    chosen = logging.getLogger(KERNEL_CHOICES)
    assert chosen.level == logging.WARNING
    score(finished[0], tmp_path / "run", "attribution", "--debug")
    assert chosen.level == logging.INFO


def test_scores_are_added_to_a_finished_run(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    config, _, _ = finished
    run_dir = Path(shutil.copytree(finished[1], tmp_path / "run"))
    before = contents(run_dir)
    lines = score(config, run_dir, "attribution", "leave_one_in").splitlines()
    after = contents(run_dir)
    added = {"scores/attribution.json", "scores/leave_one_in.json"}
    assert set(after) - set(before) == added
    assert all(after[name] == before[name] for name in set(before) - CHANGING)
    for line, method in zip(lines[-2:], ("attribution", "leave_one_in"), strict=True):
        table = json.loads(after[f"scores/{method}.json"])["composite"]
        values = sorted((value for row in table for value in row), reverse=True)[:5]
        assert line.startswith(method)
        assert line.endswith(f" {run_dir}/scores/{method}.json")
        assert [f"{value:.3g}" for value in values] == [
            part.split()[2] for part in line.removeprefix(method).split(", ")
        ]
    rows = {row["method"]: row["seconds"] for row in read_timings(RunDir(run_dir))[1]}
    assert list(rows) == ["causal", "replacement_kl", "attribution", "leave_one_in"]
    assert rows["leave_one_in"] > 0
    again = score(config, run_dir, "leave_one_in")
    assert "leave_one_in kept" in again
    assert contents(run_dir)["scores/leave_one_in.json"] == after["scores/leave_one_in.json"]


def test_own_pairs_may_not_change_once_heads_are_scored(
    finished: tuple[Path, Path, str], answered_pairs: Path, tmp_path: Path
) -> None:
    pairs, run_dir = tmp_path / "pairs.jsonl", tmp_path / "run"
    lines = answered_pairs.read_text().splitlines(keepends=True)
    pairs.write_text("".join(lines[:5]))
    own = ("--set", f"scoring.pairs_file={pairs}", "--run-dir", str(run_dir))
    command = ["score", str(finished[0]), "--method", "attribution", *own]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    pairs.write_text("".join(lines))
    before = contents(run_dir)
    for words in (command, ["run", str(finished[0]), *own]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2, result.output
        assert "scoring.pairs_file: the file has changed since heads were scored" in result.output
    assert contents(run_dir) == before


def test_scores_are_not_written_among_other_things(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").touch()
    place = ["--run-dir", str(tmp_path)]
    result = CliRunner().invoke(app, ["score", str(finished[0]), "--method", "causal", *place])
    assert result.exit_code == 2, result.output
    assert f"{tmp_path}: holds thesis.tex but no config.json" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


CHANGING = {"provenance.json", "lock", "stages.json"}
"""What a call writes to even where it finds everything done."""


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_scores_that_read_no_twins_train_none(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    config, whole, _ = finished
    output = score(config, tmp_path, "causal", "retrieval_heads")
    assert "supernet" not in output
    scores = {"scores.json", "scores/retrieval_heads.json"}
    stage = {"teacher.json", "stages/teacher.json"}
    assert set(contents(tmp_path)) - CHANGING == {
        "config.json",
        "inputs.json",
        "pairs.json",
        *scores,
        *stage,
    }
    for name in ("teacher.json", "scores.json"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
    # The run goes on with what is there: text and supernet are new to it.
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in scores}
    score(config, tmp_path)
    assert times == {name: (tmp_path / name).stat().st_mtime_ns for name in times}
    for name in ("supernet.safetensors", "scores/replacement_kl.json", "similarity.json"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_report_shows_scores_that_were_asked_for_alone(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    config, _, _ = finished
    output = score(config, tmp_path, "retrieval_heads")
    assert "scores    user 6 of 6 pairs kept; retrieval_heads " in output
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "## Pairs that heads are scored by" in result.output
    assert "retrieval-head" in (tmp_path / "report/index.html").read_text()


def test_a_gpu_that_is_too_small_for_a_score_is_named(
    finished: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(inputs: ScoreInputs) -> HeadScores:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    method = replace(METHODS["attribution"], score=run)
    monkeypatch.setattr(stages, "METHODS", {"attribution": method})
    settings, printer = load_config(finished[0], []), Printer(Console(quiet=True))
    with pytest.raises(EnvironmentFault) as caught:
        run_methods(settings, RunDir(tmp_path), printer, ["attribution"])
    assert str(caught.value) == (
        "scoring.memory_gib: 4 is more than the GPU has free for attribution (CUDA out of memory. Tried to "
        "allocate 9 GiB); allowed: less"
    )


def test_a_backend_that_cannot_serve_a_score_is_one_line(
    finished: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(inputs: ScoreInputs) -> HeadScores:
        raise BackendRefusal("kernels.full: flash_attn was asked for, but cannot serve it")

    method = replace(METHODS["attribution"], score=run)
    monkeypatch.setattr(stages, "METHODS", {"attribution": method})
    result = CliRunner().invoke(
        app, ["score", str(finished[0]), "--method", "attribution", "--run-dir", str(tmp_path)]
    )
    assert result.exit_code == 3
    assert (
        "archsearch: kernels.full: flash_attn was asked for, but cannot serve it\n" in result.output
    )


@pytest.mark.parametrize("text", ["{", '{"schema": 1}', '{"schema": 2, "composite": []}', "[]"])
def test_a_scores_file_that_cannot_be_read_is_made_again(
    finished: tuple[Path, Path, str], tmp_path: Path, text: str
) -> None:
    config, whole, _ = finished
    for number, (options, names) in enumerate(
        (
            ((), ("scores.json", "scores/replacement_kl.json", "similarity.json")),
            (("causal",), ("scores.json",)),
        )
    ):
        run_dir = Path(shutil.copytree(whole, tmp_path / str(number)))
        for name in names:
            (run_dir / name).write_text(text)
        output = score(config, run_dir, *options)
        for name in names:
            (line,) = (row for row in output.splitlines() if "made again" in row and name in row)
            assert line.startswith(f"{run_dir}/{name}: damaged or of another version (")
            assert (run_dir / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_scores_file_that_is_lost_is_made_again_once(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    config, whole, _ = finished
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    for command in ("score", "run"):
        (run_dir / "scores/replacement_kl.json").unlink()
        plan = plan_run(load_config(config, []), RunDir(run_dir))
        assert [stage.name for stage in plan.stages if not stage.finished] == ["scores"]
        arguments = [command, str(config), "--run-dir", str(run_dir)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        again = [row for row in result.output.splitlines() if "made again" in row]
        assert again == [f"{run_dir}/scores/replacement_kl.json: missing; made again"]
        for name in ("scores.json", "scores/replacement_kl.json", "pareto.json"):
            assert (run_dir / name).read_bytes() == (whole / name).read_bytes(), name
        result = CliRunner().invoke(app, arguments)
        assert "made again" not in result.output
        assert "scores    kept" in result.output


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [cut_short, Path.unlink])
def test_a_trained_supernet_that_is_damaged_is_found_with_what_to_do(
    finished: tuple[Path, Path, str], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    config, whole, _ = finished
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    supernet, marker = run_dir / "supernet.safetensors", run_dir / "stages/supernet.json"
    damage(supernet)
    run = ["run", str(config), "--run-dir", str(run_dir)]
    commands = (
        [*run, "--dry-run"],
        run,
        ["fidelity", str(run_dir)],
        ["export", str(run_dir), "--knee", "--to", str(tmp_path / "out")],
    )
    for command in commands:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 3
        fault = result.output.splitlines()[-1]
        assert fault.startswith(f"archsearch: {supernet}: ")
        assert f"; put it back, or remove {marker}: then" in fault
    assert not (tmp_path / "out").exists()
    marker.unlink()
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    assert load_file(supernet).keys() == load_file(whole / "supernet.safetensors").keys()
    for name, tensor in load_file(supernet).items():
        assert torch.equal(tensor, load_file(whole / "supernet.safetensors")[name])


@pytest.mark.parametrize(
    ("name", "damage"),
    [("train.npy", None), ("retrieval.npy", 40), ("heldout.npy", None), ("heldout.npy", 500)],
)
def test_text_that_is_lost_is_found_before_a_search_goes_on(
    finished: tuple[Path, Path, str], tmp_path: Path, name: str, damage: int | None
) -> None:
    config, run_dir = finished[0], Path(shutil.copytree(finished[1], tmp_path / "run"))
    lost, marker = run_dir / name, run_dir / "stages/data.json"
    before = lost.read_bytes()
    lost.unlink()
    if damage is not None:
        lost.write_bytes(before[:damage])
    run = ["run", str(config), "--run-dir", str(run_dir)]
    # A search that is done reads none of them.
    assert CliRunner().invoke(app, run).exit_code == 0
    longer = [*run, "--set", "search.trials=11"]
    for command in ([*longer, "--dry-run"], longer):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 3
        said = "missing" if damage is None else "damaged: .*"
        also = "what is damaged and " if damage else ""
        pattern = rf"archsearch: {lost} \({said}\): put back, or remove {also}{marker}: then the same `archsearch run` .*"
        assert re.fullmatch(pattern, result.output.splitlines()[-1])
    marker.unlink()
    lost.unlink(missing_ok=True)
    result = CliRunner().invoke(app, longer)
    assert result.exit_code == 0, result.output
    assert lost.read_bytes() == before


def test_a_supernet_that_was_copied_is_copied_again_where_it_is_damaged(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    config, whole, _ = finished
    source = whole / "supernet.safetensors"
    options = ["--set", f"supernet.source={source}", "--run-dir", str(tmp_path / "run")]
    score = ["score", str(config), *options, "--method", "replacement_nll"]
    assert CliRunner().invoke(app, score).exit_code == 0
    copy = tmp_path / "run/supernet.safetensors"
    cut_short(copy)
    result = CliRunner().invoke(app, score)
    assert result.exit_code == 0, result.output
    (line,) = (row for row in result.output.splitlines() if "made again" in row)
    assert line.startswith(f"{copy}: not a supernet file, or damaged (")
    assert copy.read_bytes() == source.read_bytes()


def test_scores_that_read_twins_get_them(finished: tuple[Path, Path, str], tmp_path: Path) -> None:
    config, _, _ = finished
    output = score(config, tmp_path, "replacement_nll")
    assert "supernet " in output
    assert "search" not in output
    assert (tmp_path / "scores/replacement_nll.json").exists()
    assert not (tmp_path / "scores.json").exists()


def test_a_kill_between_two_scores_loses_the_unfinished_one_alone(
    finished: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, whole, _ = finished
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(run_dir / "scores")
    for name in ("scores.json", "stages/scores.json", "similarity.json"):
        (run_dir / name).unlink()
    (run_dir / "stages.json").unlink()
    settings, calls, seconds = load_config(config, []), [], []

    def method(name: ScoreMethod, fails: bool) -> Method:
        def run(inputs: ScoreInputs) -> HeadScores:
            calls.append(name)
            if fails:
                raise KeyboardInterrupt
            return METHODS[name].score(inputs)

        return replace(METHODS[name], score=run)

    for fails in (True, False):
        table = {
            "causal": method("causal", False),
            "replacement_kl": method("replacement_kl", fails),
        }
        monkeypatch.setattr(stages, "METHODS", table)
        expected = pytest.raises(KeyboardInterrupt) if fails else nullcontext()
        with expected:
            run_stages(settings, RunDir(run_dir), Printer(Console(quiet=True)), last="scores")
        stage_rows, method_rows = read_timings(RunDir(run_dir))
        seconds.append({row["stage"]: row["seconds"] for row in stage_rows}["scores"])
    assert 0 < seconds[0] < seconds[1]
    assert [row["method"] for row in method_rows] == ["causal", "replacement_kl"]
    assert calls == ["causal", "replacement_kl", "replacement_kl"]
    for name in ("scores.json", "scores/replacement_kl.json", "similarity.json"):
        assert (run_dir / name).read_bytes() == (whole / name).read_bytes(), name
