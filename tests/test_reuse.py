"""What a run takes of another one, and what it makes itself because a field differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from archsearch.cli import app
from archsearch.configfile import load_config
from archsearch.reuse import Reuse, plan_reuse, take
from archsearch.rundir import RunDir

FREE = ("search.sampler=random", "search.representation=free", "search.random_control=false")


def options(*overrides: str) -> list[str]:
    return [word for one in overrides for word in ("--set", one)]


@pytest.fixture(scope="module")
def scored(
    teacher_folder: Path, answered_pairs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A config and a run of it that stopped before its search."""
    from tests.conftest import TINY_RUN

    place = tmp_path_factory.mktemp("scored")
    config = place / "check.yaml"
    config.write_text(TINY_RUN.format(teacher=teacher_folder, pairs=answered_pairs))
    result = CliRunner().invoke(app, ["score", str(config), "--run-dir", str(place / "run")])
    assert result.exit_code == 0, result.output
    return config, place / "run"


def reuse(scored: tuple[Path, Path], place: Path, *overrides: str) -> Reuse:
    config, source = scored
    return plan_reuse(load_config(config, list(overrides)), RunDir(place), RunDir(source))


def test_a_search_starts_at_once_with_what_another_run_has_made(
    scored: tuple[Path, Path], tmp_path: Path
) -> None:
    config, source = scored
    place = tmp_path / "new"
    command = ["run", str(config), "--run-dir", str(place), *options(*FREE)]
    result = CliRunner().invoke(app, [*command, "--reuse", str(source)])
    assert result.exit_code == 0, result.output
    assert f"reuse     data, supernet, scores from {source}\n" in result.output
    stages = json.loads((place / "stages.json").read_text())["stages"]
    seconds = {row["stage"]: row["seconds"] for row in stages}
    assert (seconds["data"], seconds["supernet"], seconds["scores"]) == (0, 0, 0)
    names = ("heldout.npy", "train.npy", "retrieval.npy", "supernet.safetensors", "pairs.json")
    for name in (*names, "scores.json", "scores/replacement_kl.json", "similarity.json"):
        assert (place / name).read_bytes() == (source / name).read_bytes(), name
    assert (place / "train.npy").samefile(source / "train.npy")
    origins = json.loads((place / "provenance.json").read_text())["reused"]
    assert {stage: origin["run"] for stage, origin in origins.items()} == dict.fromkeys(
        ("data", "supernet", "scores"), str(source)
    )
    assert len(json.loads((place / "trials.json").read_text())["rungs"][0]["candidates"]) == 10
    # What was taken is the run's own: the command goes on without the other one.
    again = CliRunner().invoke(app, [*command])
    assert again.exit_code == 0, again.output
    assert f"scores    kept: user 6 of 6 pairs kept; causal, replacement_kl (from {source})" in (
        again.output
    )
    kept = json.loads((place / "provenance.json").read_text())
    assert (len(kept["calls"]), kept["reused"]) == (2, origins)


@pytest.mark.parametrize(
    ("overrides", "taken", "said"),
    [
        (["search.trials=50", "execution.workers=2"], "data, supernet, scores", []),
        (["search.objectives=[{metric: kl, direction: minimize}]"], "data, supernet, scores", []),
        (
            ["seed=9"],
            "data, supernet, scores",
            ["seed 9 is the search's alone: what is taken has 3"],
        ),
        (
            ["scoring.min_gap=0.5"],
            "data, supernet",
            ["made here: scores: scoring.min_gap: 1.0 -> 0.5"],
        ),
        (
            ["scoring.methods=[attribution]"],
            "data, supernet, scores in part",
            ["made here: scores: attribution (missing)"],
        ),
        (
            ["supernet.learning_rate=0.5"],
            "data, scores in part",
            [
                "made here: supernet: supernet.learning_rate: 0.004 -> 0.5",
                "made here: scores: replacement_kl (text or twins are others)",
            ],
        ),
        (
            ["search.proxy_tokens=[0, 4096]"],
            "scores in part",
            [
                "made here: data: search.proxy_tokens: [0, 256] -> [0, 4096]",
                "made here: supernet: it is trained on other text",
                "made here: scores: replacement_kl (text or twins are others), similarity.json",
            ],
        ),
        (
            ["probes.digits=3"],
            "nothing",
            [
                "made here: data: probes.digits: 2 -> 3",
                "made here: supernet: it is trained on other text",
                "made here: scores: probes.digits: 2 -> 3",
            ],
        ),
    ],
)
def test_what_differs_is_made_anew_and_named(
    scored: tuple[Path, Path], tmp_path: Path, overrides: list[str], taken: str, said: list[str]
) -> None:
    lines = reuse(scored, tmp_path / "new", *overrides).lines()
    first = f"{taken} from {scored[1]}"
    assert lines == [f"reuse     {text}" for text in (first, *said)]


def test_a_final_stage_less_needs_no_other_text(scored: tuple[Path, Path], tmp_path: Path) -> None:
    final = ["search.final.tokens=512", "search.final.sequences=3"]
    more = reuse(scored, tmp_path / "new", *final)
    assert "made here: data: search.final.tokens: None -> 512; search.final.seq" in more.lines()[1]
    config, place = load_config(scored[0], final), Path(shutil.copytree(scored[1], tmp_path / "a"))
    RunDir(place).write_json("config.json", config.model_dump(mode="json", by_alias=True))
    assert not reuse((scored[0], place), tmp_path / "new").takes[0].missing


def test_a_run_of_another_teacher_gives_nothing(scored: tuple[Path, Path], tmp_path: Path) -> None:
    config, source = scored[0], Path(shutil.copytree(scored[1], tmp_path / "other"))
    facts: dict[str, Any] = json.loads((source / "teacher.json").read_text())
    (source / "teacher.json").write_text(json.dumps(facts | {"fingerprint": "ab"}))
    command = ["run", str(config), "--run-dir", str(tmp_path / "new"), "--reuse", str(source)]
    result = CliRunner().invoke(app, [*command, *options(*FREE, "search.trials=4")])
    assert result.exit_code == 0, result.output
    assert f"reuse     nothing: the teacher of {source} has other weights\n" in result.output
    assert "reused" not in json.loads((tmp_path / "new/provenance.json").read_text())


def test_what_the_other_run_has_lost_or_not_made_is_made_here(
    scored: tuple[Path, Path], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(scored[1], tmp_path / "part"))
    (source / "scores.json").write_text("{")
    (source / "stages/supernet.json").unlink()
    lines = reuse((scored[0], source), tmp_path / "new").lines()
    assert lines[0] == f"reuse     data, scores in part from {source}"
    assert lines[1] == f"reuse     made here: supernet: {source} has not got that far"
    assert lines[2].startswith("reuse     made here: scores: causal (damaged")


def test_text_that_the_other_run_has_lost_in_part_is_made_here(
    scored: tuple[Path, Path], tmp_path: Path
) -> None:
    """Without its prompts, or with a truncated file, the rest would be trained on as if it were all."""
    source = Path(shutil.copytree(scored[1], tmp_path / "part"))
    (source / "retrieval.npy").rename(tmp_path / "kept")
    lines = reuse((scored[0], source), tmp_path / "new").lines()
    assert f"reuse     made here: data: {source}/retrieval.npy: missing" in lines
    (tmp_path / "kept").rename(source / "retrieval.npy")
    whole = (source / "train.npy").read_bytes()
    (source / "train.npy").write_bytes(whole[: len(whole) // 2])
    lines = reuse((scored[0], source), tmp_path / "new").lines()
    assert lines[1].startswith(f"reuse     made here: data: {source}/train.npy: damaged")


def test_nothing_is_taken_that_was_made_from_other_text_than_this_runs(
    scored: tuple[Path, Path], tmp_path: Path
) -> None:
    """This run has drawn its text before --reuse was given: with another seed that is other text."""
    place = RunDir(shutil.copytree(scored[1], tmp_path / "new"))
    for name in ("stages/supernet.json", "stages/scores.json", "scores/replacement_kl.json"):
        (place / name).unlink()
    assert reuse(scored, place.path).lines()[0] == f"reuse     supernet, scores from {scored[1]}"
    text = (place / "train.npy").read_bytes()
    (place / "train.npy").write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    assert reuse(scored, place.path).lines() == [
        f"reuse     nothing from {scored[1]}",
        "reuse     made here: supernet: it is trained on other text",
        "reuse     made here: scores: replacement_kl (text or twins are others)",
    ]


def test_twins_that_are_taken_leave_no_checkpoint_and_scores_that_are_here_are_this_runs(
    scored: tuple[Path, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(scored[1], tmp_path / "new"))
    (path / "align.checkpoint.safetensors").touch()
    for name in ("supernet", "scores"):
        (path / f"stages/{name}.json").unlink()
    said: list[str] = []
    with RunDir(path) as place:
        take(reuse(scored, path), place, said.append)
        assert not (place / "align.checkpoint.safetensors").exists()
        # All scores are here already.
        assert place.origins().keys() == {"supernet"}
        assert place.stage("scores") is None
    assert not said


def test_a_run_that_was_stopped_at_once_gives_nothing(
    scored: tuple[Path, Path], tmp_path: Path
) -> None:
    """It has no teacher.json yet that could be compared."""
    source, said = RunDir(tmp_path / "begun"), list[str]()
    shutil.copytree(scored[1], tmp_path / "new", ignore=shutil.ignore_patterns("stages"))
    source.write_json("config.json", json.loads((scored[1] / "config.json").read_text()))
    with RunDir(tmp_path / "new") as place:
        found = reuse((scored[0], source.path), place.path)
        assert found.lines()[0] == f"reuse     nothing from {source.path}"
        take(found, place, said.append)
    assert not said


@pytest.mark.parametrize("which", ["itself", "none"])
def test_only_another_run_can_be_reused(
    scored: tuple[Path, Path], tmp_path: Path, which: str
) -> None:
    config, source = scored
    place = source if which == "itself" else tmp_path
    command = ["run", str(config), "--run-dir", str(source), "--reuse", str(place), "--dry-run"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    said = "is this run itself; allowed: another one" if which == "itself" else "a run directory?"
    assert said in result.output.splitlines()[-1]
