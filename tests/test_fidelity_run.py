"""`archsearch fidelity` on a whole run of a tiny random teacher: planned, trained, kept, shown, and the faults of its options."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from archsearch.cli import app
from archsearch.configfile import load_config
from archsearch.console import Printer
from archsearch.fidelity.records import LongSpec, Settings, Study, read_study
from archsearch.fidelity.worker import LongWorker
from archsearch.fidelity_plan import Options, plan_fidelity
from archsearch.fidelity_run import run_fidelity
from archsearch.headmap import HeadMap
from archsearch.lab import proxy_fidelity
from archsearch.rundir import RunDir
from archsearch.search.records import TrialSpec, trained_path
from archsearch.search.trial import TrialWorker
from tests.small_runs import write_config

OPTIONS = ("--maps", "5", "--tokens", "384", "--at", "96", "--at", "192", "--repeats", "1")
SHARE = ("--share", "0.5")


def call(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def searched(
    teacher_folder: Path, answered_pairs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished run."""
    place = tmp_path_factory.mktemp("fidelity")
    config = write_config(place, teacher_folder, answered_pairs)
    status, output = call("run", config, "--run-dir", place / "run")
    assert status == 0, output
    return place / "run"


@pytest.fixture(scope="module")
def studied(searched: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with a study of five maps, and what the command printed."""
    run = tmp_path_factory.mktemp("studied") / "run"
    shutil.copytree(searched, run)
    status, output = call("fidelity", run, *OPTIONS, *SHARE)
    assert status == 0, output
    return run, output


def study_of(run: Path) -> Study:
    found = read_study(RunDir(run))
    assert found is not None
    return found


def test_a_dry_run_says_what_it_costs_and_writes_nothing(searched: Path) -> None:
    before = sorted(searched.rglob("*"))
    status, output = call("fidelity", searched, *OPTIONS, *SHARE, "--dry-run")
    assert status == 0, output
    assert "maps      5: 3 good ones with 50.0% FA heads, 2 at other shares; 1 of all" in output
    assert "384 tokens a map, read at 0, 96, 192, 384" in output
    assert "6 maps are missing" in output
    assert sorted(searched.rglob("*")) == before


def test_every_map_is_read_at_every_length(studied: tuple[Path, str]) -> None:
    run, output = studied
    study = study_of(run)
    assert study.settings == Settings((0, 96, 192, 384), 0.2, 96, proxies=(192,))
    assert study.settings.trained_tokens == 384 + round(0.2 * 96) + 192
    assert len(study.subjects) == 5
    assert len(study.runs) == 6
    assert not study.failures
    for found in study.runs.values():
        assert [reading.tokens for reading in found.readings] == [0, 96, 192, 384]
        assert found.readings[0].loss is None
        assert {"kl", "niah_single_nll", "cache_bytes"} <= found.readings[0].metrics.keys()
    for subject in study.subjects:
        known = {"sum of causal", "sum of replacement_kl", "sum of twin error", "minus FA share"}
        assert known < subject.predictors.keys()
    assert {row.metric for row in study.agreements} == {"kl"}
    assert "map 6 of 6 again: kl" in output
    assert "How well a short look predicts kl after 384 tokens" in output
    page = (run / "report/index.html").read_text(encoding="utf-8")
    assert "How well a short look predicts kl" in page


def test_the_same_command_trains_nothing_again(studied: tuple[Path, str]) -> None:
    run, _ = studied
    before = study_of(run)
    for options in ((*OPTIONS, *SHARE), ()):
        status, output = call("fidelity", run, *options)
        assert status == 0, output
        assert "0 maps are missing" in output
        assert study_of(run) == before


def test_other_metrics_of_long_training_can_count(
    studied: tuple[Path, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(studied[0], run)
    wanted = "top1_agreement"
    status, output = call("fidelity", run, "--target", wanted)
    assert status == 0, output
    assert "0 maps are missing" in output
    assert f"How well a short look predicts {wanted} after 384 tokens" in output
    assert wanted in {row.metric for row in study_of(run).agreements}


def test_more_maps_are_added_to_the_ones_there(studied: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(studied[0], tmp_path / "run")
    before = study_of(tmp_path / "run")
    status, output = call("fidelity", tmp_path / "run", "--maps", "6", *SHARE)
    assert status == 0, output
    after = study_of(tmp_path / "run")
    assert after.subjects[:5] == before.subjects
    assert {key: after.runs[key] for key in before.runs} == before.runs
    assert len(after.runs) == 6 + 2, "a map, and a quarter of six again"


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--maps", "1"], "--maps 1: allowed: 2 or more"),
        (["--share", "0"], "--share 0: allowed: between 0 and 1"),
        (["--tokens", "96"], "--tokens 96: allowed: 192 or more, two batches"),
        (["--tokens", "0"], "--tokens 0: allowed: 192 or more, two batches"),
        (
            ["--tokens", "960", "--at", "40"],
            "--at 40: is no batch yet; allowed: 0, or 96 (a batch) to 960, the",
        ),
        (["--tokens", "960", "--at", "961"], "--at 961: allowed: 0 to 960, the tokens of a map"),
        (["--maps", "4", "--repeats", "5", *SHARE], "--repeats 5: allowed: 0 to the 4 maps"),
        (
            ["--target", "niah_nll"],
            "--target niah_nll: the run has no such measure; allowed: kl, top1_agreement, ",
        ),
        (
            ["--target", "cache_bytes"],
            "--target cache_bytes: the run has no such measure; allowed: ",
        ),
        (["--maps", "999"], "--maps 999: 8 heads give fewer such maps; allowed: 2 to "),
    ],
)
def test_options_that_do_not_fit_are_status_2_and_one_line(
    searched: Path, options: list[str], fault: str
) -> None:
    status, output = call("fidelity", searched, *options)
    assert status == 2, output
    assert output.startswith(f"archsearch: {fault}")
    assert len(output.splitlines()) == 1
    assert not (searched / "fidelity.json").exists()


def test_the_most_maps_that_are_named_can_be_had(searched: Path) -> None:
    output = call("fidelity", searched, "--maps", "999", *SHARE)[1]
    most = int(output.rpartition(" to ")[2])
    assert call("fidelity", searched, "--maps", str(most), *SHARE, "--dry-run")[0] == 0
    status, again = call("fidelity", searched, "--maps", str(most + 1), *SHARE, "--dry-run")
    assert status == 2
    assert again == output.replace("999", str(most + 1))


def test_other_lengths_than_the_study_has_are_refused(studied: tuple[Path, str]) -> None:
    status, output = call("fidelity", studied[0], "--tokens", "960")
    assert status == 2
    assert "its maps are read at 0, 96, 192, 384 tokens; allowed: the same --tokens" in output


def test_a_run_without_a_front_is_status_2(searched: Path, tmp_path: Path) -> None:
    shutil.copytree(searched, tmp_path / "run")
    (tmp_path / "run" / "pareto.json").unlink()
    status, output = call("fidelity", tmp_path / "run")
    assert status == 2
    assert "pareto.json: missing: the search has not run to there yet" in output
    assert call("fidelity", tmp_path / "nothing")[0] == 2


def test_a_map_that_fails_is_status_4_and_tried_again(
    searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(searched, run)
    real = LongWorker.__call__
    failed: list[str] = []

    def fail(worker: LongWorker, spec: LongSpec) -> Any:
        name = HeadMap.from_json(spec.head_map).digest
        if not failed or failed[0] == name:
            failed.append(name)
            raise ValueError("broken")
        return real(worker, spec)

    options = ("--maps", "2", "--tokens", "192", "--repeats", "0", *SHARE)
    with monkeypatch.context() as patch:
        patch.setattr(LongWorker, "__call__", fail)
        status, output = call("fidelity", run, *options)
    assert status == 4, output
    assert output.splitlines()[-1].startswith("archsearch: 1 maps failed; fidelity.json")
    assert list(study_of(run).failures.values()) == ["ValueError: broken"]
    status, output = call("fidelity", run, *options)
    assert status == 0, output
    assert len(study_of(run).runs) == 2


def test_a_worker_starts_where_trials_do_and_seeds_change_the_batches_alone(
    searched: Path, studied: tuple[Path, str]
) -> None:
    config = RunDir(searched).load_config().model_dump(mode="json", by_alias=True)
    payload = {"config": config, "run_dir": str(searched)}
    head_map = study_of(studied[0]).subjects[0].head_map
    # The run's own text is two rows, whose order is no other.
    worker = LongWorker({**payload, "train_dir": str(studied[0] / "fidelity")})
    spec = LongSpec(head_map.to_json(), Settings((0, 192), 0.5, 96))
    first, again, other = worker(spec), worker(spec), worker(replace(spec, seed=1))
    assert (
        first.readings[0].metrics
        == TrialWorker(payload)(TrialSpec(0, head_map.to_json(), 0)).metrics
    )
    assert [r.metrics for r in again.readings] == [r.metrics for r in first.readings]
    assert other.readings[0] == replace(first.readings[0], seconds=other.readings[0].seconds)
    assert other.readings[1].metrics["kl"] != first.readings[1].metrics["kl"]


def test_a_checkpoint_is_gone_on_from(
    searched: Path, studied: tuple[Path, str], tmp_path: Path
) -> None:
    config = RunDir(searched).load_config().model_dump(mode="json", by_alias=True)
    worker = LongWorker({"config": config, "run_dir": str(searched)})
    head_map = study_of(studied[0]).subjects[0].head_map
    path = str(tmp_path / "kept.safetensors")
    short = LongSpec(head_map.to_json(), Settings((0, 192), 0.5, 96), checkpoint=path)
    begun = worker(short)
    whole = worker(replace(short, settings=Settings((0, 192, 384), 0.5, 96)))
    plain = worker(replace(short, settings=Settings((0, 192, 384), 0.5, 96), checkpoint=None))
    assert whole.readings[:2] == begun.readings, "not made again"
    assert whole.readings[2].metrics == plain.readings[2].metrics


@pytest.mark.parametrize("decay_share", [1.0, 0.5])
def test_own_proxies_are_read_as_trials_are(
    searched: Path, studied: tuple[Path, str], tmp_path: Path, decay_share: float
) -> None:
    run = tmp_path / "run"
    shutil.copytree(searched, run)
    config = RunDir(run).load_config().model_dump(mode="json", by_alias=True)
    # A fork of 288 tokens leaves after 192, and the last proxy goes on from there.
    proxies = (96, 288, 480)
    config["search"]["proxy_tokens"] = proxies
    config["distill"]["decay_share"] = decay_share
    payload = {"config": config, "run_dir": str(run)}
    head_map = study_of(studied[0]).subjects[0].head_map
    trial, parent, expected = TrialWorker(payload), None, []
    for rung, tokens in enumerate(proxies, start=1):
        spec = TrialSpec(0, head_map.to_json(), tokens, parent, rung=rung)
        expected.append(trial(spec).metrics)
        parent = str(trained_path(run, spec))
    # The study's own text, which is longer, is for the long run alone.
    worker = LongWorker({**payload, "train_dir": str(studied[0] / "fidelity")})
    settings = Settings((0, *proxies, 576), 0.5, 96, proxies, decay_share)
    found = worker(LongSpec(head_map.to_json(), settings)).readings
    assert [reading.tokens for reading in found] == [0, *proxies, 576]
    assert [reading.metrics for reading in found[1:-1]] == expected
    assert len({reading.metrics["kl"] for reading in found}) == len(found)


def test_studies_of_before_go_on_as_they_began(studied: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(studied[0], run)
    data = json.loads((run / "fidelity.json").read_text())
    del data["settings"]["proxies"], data["settings"]["proxy_decay_share"]
    (run / "fidelity.json").write_text(json.dumps(data))
    old = Settings((0, 96, 192, 384), 0.2, 96)
    for options in ((*OPTIONS, *SHARE), ()):
        status, output = call("fidelity", run, *options, "--dry-run")
        assert status == 0, output
        assert "0 maps are missing" in output
        assert "as a trial" not in output
        assert study_of(run).settings == old


@pytest.mark.parametrize("end", ["done", "kept", "interrupted"])
def test_what_maps_share_goes_at_the_end(
    searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(searched, run)
    shared = run / "teacher_logits" / "0"
    shared.mkdir(parents=True)

    def answer(worker: LongWorker, spec: LongSpec) -> Any:
        assert shared.exists()
        if end == "interrupted":
            raise KeyboardInterrupt
        raise ValueError("broken")

    monkeypatch.setattr(LongWorker, "__call__", answer)
    plan = plan_fidelity(RunDir(run), Options({"good": 1, "mixed": 1}, 192, share=0.5))
    with nullcontext() if end != "interrupted" else pytest.raises(KeyboardInterrupt):
        run_fidelity(RunDir(run), plan, Printer(), keep_logits=end == "kept")
    assert shared.exists() == (end == "kept")


def test_text_is_made_where_the_runs_own_is_too_short(studied: tuple[Path, str]) -> None:
    run, output = studied
    assert "training text is made first" in output
    stage = json.loads((run / "fidelity/stages/text.json").read_text())
    assert stage["tokens"] == 384
    assert (run / "fidelity/train.npy").exists()


def test_the_lab_needs_no_front_and_writes_its_figures(
    searched: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(searched, run)
    (run / "pareto.json").unlink()
    words = ["--good", "3", "--mixed", "2", "--share", "0.5", "--tokens", "192", "--repeats", "0"]
    words += ["--set", "distill.learning_rate=0.5"]
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["lab", str(run), *words, "--figures", str(figures)])
    proxy_fidelity.main()
    rows = json.loads(figures.read_text())
    names = [row["metric"] for row in rows]
    assert sum(name.startswith("kl after 192 tokens, ") for name in names) == 5
    assert any(name.startswith("Spearman, kl at 0 tokens with kl after 192, all") for name in names)
    assert "kl, all: without training " in capsys.readouterr().out
    changes = json.loads((run / "fidelity/changes.json").read_text())
    assert changes == {"distill.learning_rate": 0.5}


def test_settings_follow_the_config(searched: Path) -> None:
    config = load_config(searched.parent / "check.yaml", [])
    assert max(config.search.proxy_tokens) == 192
    status, output = call("fidelity", searched, "--maps", "2", *SHARE, "--dry-run")
    assert status == 0, output
    # Eight times the longest proxy; the run's own proxies are among the lengths.
    assert "1,536 tokens a map, read at 0, 96, 192, 288, 768, 1,536" in output
