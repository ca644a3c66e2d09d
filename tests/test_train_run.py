"""`archsearch train` on the run of a tiny random teacher: trained, measured, exported, killed, and the faults of its options."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from archsearch import train_run
from archsearch.attention.modeling_hydrahead import HydraHeadForCausalLM
from archsearch.cli import app
from archsearch.configfile import load_config
from archsearch.headmap import HeadMap, ModelShape, Operator
from archsearch.rundir import RunDir
from archsearch.search.records import TrialSpec
from archsearch.search.trial import TrialWorker
from archsearch.training.loop import NonFiniteLoss
from archsearch.training.student import StudentLoss
from tests.small_runs import bare_run, write_config

ROOT = Path(__file__).parents[1]
SETTINGS = (
    "supernet.tokens=1920",
    "distill.learning_rate=1e-2",
    "distill.teacher_logits=mean_row",
)
LONG = (
    "long_context.tokens=768",
    "long_context.sequence_length=192",
    "long_context.batch_tokens=384",
    "long_context.learning_rate=1e-3",
)
STAGES = ["before", "after distillation", "after long-context tuning"]


def words(*options: str | Path, sets: tuple[str, ...] = LONG) -> list[str]:
    return [str(o) for o in options] + [word for option in sets for word in ("--set", option)]


def call(*options: str | Path, sets: tuple[str, ...] = LONG) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train", *words(*options, sets=sets)])
    return result.exit_code, result.output


def training_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return found


def metrics_of(folder: Path) -> dict[str, dict[str, float]]:
    return {row["stage"]: row["metrics"] for row in training_of(folder)["stages"]}


@pytest.fixture(scope="module")
def run(
    teacher_folder: Path, answered_pairs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory of a run that is done, as far as a training reads it: text, untrained twins, a front of two."""
    place = tmp_path_factory.mktemp("train")
    config = load_config(write_config(place, teacher_folder, answered_pairs), [*SETTINGS])
    texts = {"train.npy": 24, "retrieval.npy": 24, "heldout.npy": 2}
    run_dir, teacher = bare_run(place / "run", config, texts)
    points = [
        {
            "candidate": number,
            "source": "search",
            "head_map": HeadMap(teacher.shape, rows).to_json(),
            "metrics": {"kl": kl, "cache_bytes": 1e6 / kl},
        }
        for number, rows, kl in ((4, ("FGGF", "GFFF"), 0.1), (7, ("FGGF", "GGGF"), 0.2))
    ]
    objectives = [{"metric": "kl", "direction": "minimize"}]
    objectives += [{"metric": "cache_bytes", "direction": "minimize"}]
    front = {"proxy_tokens": 192, "objectives": objectives, "knee": 4, "points": points}
    run_dir.write_json("pareto.json", {**front, "seeds": {"points": []}})
    return run_dir.path


@pytest.fixture(scope="module")
def head_map(run: Path) -> Path:
    """A file of a map that no search found."""
    shape = ModelShape(**RunDir(run).read_json("teacher.json")["model"])
    path = run.parent / "own.json"
    HeadMap(shape, ("FGGG", "GGFF")).save(path)
    return path


@pytest.fixture(scope="module")
def trained(run: Path, head_map: Path) -> tuple[Path, str]:
    """The folder of a training from end to end, and what the command printed."""
    to = run.parent / "whole"
    status, output = call(run, "--head-map", head_map, "--tokens", "960", "--to", to)
    assert status == 0, output
    return to, output


def test_a_student_is_measured_after_every_stage_and_exported(
    run: Path, head_map: Path, trained: tuple[Path, str]
) -> None:
    to, output = trained
    found, metrics = training_of(to), metrics_of(to)
    assert found["done"]
    assert list(metrics) == STAGES
    kl = [metrics[stage]["kl"] for stage in STAGES]
    assert kl[1] < kl[0]
    assert len(set(kl)) == 3
    for row, tokens in zip(found["stages"][1:], (960, 768), strict=True):
        assert row["training"]["tokens"] == tokens
        assert row["training"]["last_loss"] > 0
    assert HeadMap.from_json(found["head_map"]) == HeadMap.load(head_map)
    assert HeadMap.load(to / "head_map.json") == HeadMap.load(head_map)
    assert found["costs"]["fa_share"] == 3 / 8
    for line in (
        "Head map own.json, 37.5% full-attention heads",
        f"| metric | {' | '.join(STAGES)} |",
        f"| kl | {kl[0]:.3g} | {kl[1]:.3g} | {kl[2]:.3g} |",
        "960 tokens of distillation at 0.01, then 768 tokens in rows of 192",
    ):
        assert line in output
    provenance = json.loads((to / "provenance.json").read_text())
    assert provenance["distillation_tokens"] == 960
    assert provenance["long_context_tokens"] == 768
    assert provenance["metrics"] == metrics[STAGES[-1]]
    names = {path.name for path in to.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "training.json"} <= names
    assert not names & {"work", "lock"}
    # What lies there is what was measured.
    worker = worker_of(run)
    again = worker.measure(HydraHeadForCausalLM.from_pretrained(to).eval())
    assert again["kl"] == pytest.approx(kl[2], rel=1e-5)
    start = worker(TrialSpec(0, HeadMap.load(head_map).to_json(), 0)).metrics
    assert {name: start[name] for name in metrics["before"]} == metrics["before"]


def worker_of(run: Path) -> TrialWorker:
    config = RunDir(run).load_config().model_dump(mode="json", by_alias=True)
    return TrialWorker({"config": config, "run_dir": str(run)})


def test_the_same_command_does_nothing_again(
    run: Path, head_map: Path, trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    to, _ = trained
    times = {path: path.stat().st_mtime_ns for path in to.iterdir()}
    monkeypatch.setattr(StudentLoss, "__call__", lambda *_: pytest.fail("trained again"))
    status, output = call(run, "--head-map", head_map, "--tokens", "960", "--to", to)
    assert status == 0, output
    assert f"| metric | {' | '.join(STAGES)} |" in output
    assert {path: path.stat().st_mtime_ns for path in to.iterdir()} == times


def test_other_settings_in_the_same_folder_are_refused(
    run: Path, head_map: Path, trained: tuple[Path, str]
) -> None:
    to, _ = trained
    options = (run, "--head-map", head_map, "--tokens", "960", "--to", to)
    status, output = call(*options, sets=(*LONG, "distill.learning_rate=0.1"))
    assert status == 2
    assert "other settings (distill.learning_rate: 0.01 -> 0.1)" in output
    assert len(output.splitlines()) == 1
    # What changes nothing may differ.
    status, output = call(*options, sets=(*LONG, "distill.checkpointing=true"))
    assert status == 0, output


@pytest.mark.parametrize("killed_in", ["distil", "long"])
def test_a_killed_training_ends_as_if_nothing_had_happened(
    run: Path, head_map: Path, trained: tuple[Path, str], tmp_path: Path, killed_in: str
) -> None:
    to = tmp_path / "killed"
    options = words(run, "--head-map", head_map, "--tokens", "960", "--to", to)
    with started([*options, "--checkpoint-minutes", "0"], tmp_path / "log") as process:
        deadline = time.monotonic() + 100
        while not (to / "work" / f"{killed_in}.safetensors").exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not training_of(to)["done"]
    assert not (to / "model.safetensors").exists()
    status, output = call(run, "--head-map", head_map, "--tokens", "960", "--to", to)
    assert status == 0, output
    assert f"{killed_in}: goes on from its checkpoint" in output
    whole, again = (load_file(place / "model.safetensors") for place in (trained[0], to))
    assert whole.keys() == again.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor.view(torch.uint8), again[name].view(torch.uint8)), name
    assert metrics_of(to) == metrics_of(trained[0])
    for name in ("config.json", "head_map.json", "provenance.json"):
        assert (to / name).read_bytes() == (trained[0] / name).read_bytes()


@contextlib.contextmanager
def started(options: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process of its own."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "archsearch.cli", "train", *options],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_candidate_lands_in_the_run_with_heads_as_its_options_say(run: Path) -> None:
    sets = (
        "student.full.rope=false",
        "student.full.rope_fade_tokens=384",
        "student.full.gate=true",
    )
    status, output = call(run, "--fa-share", "0.5", "--tokens", "384", sets=sets)
    assert status == 0, output
    (folder,) = (run / "train").iterdir()
    assert f"\n{folder}\n" in output
    found = training_of(folder)
    point = next(
        p
        for p in RunDir(run).read_json("pareto.json")["points"]
        if p["candidate"] == found["student"]["candidate"]
    )
    assert point["candidate"] == 7
    assert found["student"]["metrics"] == point["metrics"]
    assert found["head_map"] == point["head_map"]
    assert list(metrics_of(folder)) == STAGES[:2]
    config = json.loads((folder / "config.json").read_text())
    assert config["fa"]["rope_share"] == 0
    assert any(".full.gate_proj" in name for name in load_file(folder / "model.safetensors"))
    # Other options, another folder.
    status, output = call(run, "--fa-share", "0.5", "--tokens", "384", "--dry-run", sets=sets[2:])
    assert status == 0, output
    assert str(folder) not in output


def test_the_teachers_own_map_is_tuned_alone(run: Path, tmp_path: Path) -> None:
    shape = ModelShape(**RunDir(run).read_json("teacher.json")["model"])
    path = tmp_path / "full.json"
    HeadMap.uniform(shape, Operator.FULL).save(path)
    status, output = call(run, "--head-map", path, "--tokens", "960", "--to", tmp_path / "to")
    assert status == 0, output
    metrics = metrics_of(tmp_path / "to")
    assert list(metrics) == [STAGES[0], STAGES[2]]
    assert metrics["before"]["kl"] == 0 < metrics[STAGES[2]]["kl"]


def test_text_is_made_where_the_run_has_none(run: Path, head_map: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for name in ("train.npy", "retrieval.npy"):
        (copy / name).unlink()
    to = tmp_path / "to"
    status, output = call(copy, "--head-map", head_map, "--tokens", "192", "--to", to, sets=())
    assert status == 0, output
    assert "training text is made first" in output
    assert not (copy / "train.npy").exists()
    metrics = metrics_of(to)
    assert metrics[STAGES[1]]["kl"] != metrics[STAGES[0]]["kl"]


def test_fields_without_effect_are_named(run: Path, tmp_path: Path) -> None:
    options = (run, "--knee", "--tokens", "960", "--to", tmp_path / "to", "--dry-run")
    sets = ("long_context.learning_rate=1e-4", "distill.cache_gib=1", "distill.replay=true")
    status, output = call(*options, sets=sets)
    assert status == 0, output
    assert "warning: long_context.learning_rate is ignored: long_context.tokens is 0" in output
    assert "warning: distill.cache_gib is ignored" in output
    assert "warning: distill.replay is ignored: the teacher is on the CPU" in output
    assert "warning" not in call(*options)[1]
    # Half of the tokens are prompts; the text has 24 rows of 96.
    assert "gone over" not in call(*options)[1]
    long = (run, "--knee", "--tokens", "9600", "--dry-run")
    assert (
        "tokens of distillation at 0.01; the text is gone over 2.1 times" in call(*long, sets=())[1]
    )
    assert not (tmp_path / "to").exists()
    assert (
        "distill.learning_rate is ignored: --tokens is 0"
        in call(
            run, "--knee", "--tokens", "0", "--dry-run", sets=(*LONG, "distill.learning_rate=1e-4")
        )[1]
    )


@pytest.mark.parametrize(
    ("options", "sets", "fault"),
    [
        ([], (), "train: give exactly one of --candidate, --knee, --fa-share and --head-map"),
        (["--knee", "--candidate", "1"], (), "train: give exactly one of"),
        (["--candidate", "-1"], (), "--candidate -1: not allowed"),
        (["--candidate", "77"], (), "--candidate 77: not evaluated in {run}; allowed: "),
        (["--fa-share", "nan"], (), "--fa-share nan: not allowed; allowed: 0 to 1"),
        (["--head-map", "{run}/none.json"], (), "--head-map {run}/none.json: cannot be read"),
        (["--head-map", "{run}/config.json"], (), "--head-map {run}/config.json: head map: "),
        (
            ["--head-map", "{run}/pareto.json"],
            (),
            "--head-map {run}/pareto.json: holds the front of a run, not one head map; allowed: a file like "
            "RUN/front/N.json, or for a candidate of the run --candidate N",
        ),
        (
            ["--head-map", "{run}/train.npy"],
            (),
            "--head-map {run}/train.npy: no JSON; allowed: a file like RUN/front/N.json, or",
        ),
        (["--head-map", "{other}"], (), "--head-map {other}: a map of 3 layers of 4 heads over"),
        (["--knee", "--tokens", "-5"], (), "--tokens -5: allowed: 0 or more"),
        (["--knee", "--tokens", "0"], (), "train: nothing to do: --tokens is 0 and long_context"),
        (["--knee", "--to", "{run}"], (), "--to {run}: the folder is not empty; name a new"),
        (
            ["--knee", "--to", "{run}/config.json"],
            (),
            "--to {run}/config.json: cannot make this folder (a file",
        ),
        (["--knee"], ("search.trials=9",), "--set search.trials=9: not allowed here; allowed: dis"),
        (["--knee"], ("distill.rate=9",), "--set distill.rate=9: distill.rate: unknown key"),
        (["--knee"], ("distill.learning_rate",), "--set distill.learning_rate"),
        (
            ["--knee", "--tokens", "960"],
            ("student.full.rope=false",),
            "--tokens 960: student.full.rope: false takes rope_fade_tokens (500000) of distillation",
        ),
        (
            ["--knee"],
            ("probes.contexts=[96, 512]",),
            "probes.contexts: 512 is beyond the teacher's 256 tokens; allowed: 1 to 256, or more",
        ),
        (
            ["--knee"],
            ("long_context.tokens=9", "long_context.loss=kl"),
            "long_context.loss: kl takes a teacher that reaches 16384 tokens, this one has 256",
        ),
        (
            ["--knee", "--to", "{new}"],
            ("long_context.tokens=9",),
            "long_context.sequence_length: 16384 is more than the ",
        ),
    ],
)
def test_faults_of_options_are_one_line(
    run: Path, tmp_path: Path, options: list[str], sets: tuple[str, ...], fault: str
) -> None:
    HeadMap.uniform(ModelShape("qwen3", 3, 4, 2, 16), Operator.GDN).save(tmp_path / "other.json")
    names = {"run": run, "other": tmp_path / "other.json", "new": tmp_path / "new"}
    before = sorted(run.rglob("*"))
    status, output = call(run, *(option.format(**names) for option in options), sets=sets)
    assert status == 2, output
    assert output.startswith(f"archsearch: {fault.format(**names)}")
    assert len(output.splitlines()) == 1
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("command", ["train", "export"])
def test_a_folder_that_cannot_be_written_is_status_3_before_any_work(
    run: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object) -> None:
        raise AssertionError("begun")

    monkeypatch.setattr("archsearch.train_plan.check_supernet", work)
    monkeypatch.setattr("archsearch.candidates.check_supernet", work)

    def said(to: Path | str) -> tuple[int, str]:
        result = CliRunner().invoke(app, [command, str(run), "--knee", "--to", str(to)])
        return result.exit_code, result.output

    status, output = said("/proc/foo/bar")
    assert status == 3
    assert output.startswith("archsearch: /proc/foo/bar: cannot be created (/proc cannot be writ")
    assert len(output.splitlines()) == 1
    (tmp_path / "file").touch()
    for to, place in ((tmp_path / "file/in", f"{tmp_path}/file is"), (tmp_path / "file", "a file")):
        status, output = said(to)
        assert status == 2
        assert output.startswith(f"archsearch: --to {to}: cannot make this folder ({place}")

    def full(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    (tmp_path / "file").unlink()
    line = f"archsearch: {tmp_path}: cannot be written (read-only file system)\n"
    assert said(tmp_path) == (3, line)


def test_a_training_that_is_begun_is_gone_on_with_only_where_it_can_be_written(
    trained: tuple[Path, str],
    run: Path,
    head_map: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    to = tmp_path / "to"
    shutil.copytree(trained[0], to)
    options = (run, "--head-map", head_map, "--tokens", "960", "--to", to)
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryFile", full)
        assert call(*options)[0] == 0  # It is done.
        record = training_of(to)
        (to / "training.json").write_text(json.dumps(record | {"done": False}))
        status, output = call(*options)
    assert (status, output) == (
        3,
        f"archsearch: {to}: cannot be written (read-only file system)\n",
    )


def test_a_run_without_supernet_or_search_is_status_2(run: Path, tmp_path: Path) -> None:
    assert call(tmp_path / "none", "--knee")[0] == 2
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "pareto.json").unlink()
    assert "pareto.json: missing: the search has not run" in call(tmp_path / "run", "--knee")[1]
    (tmp_path / "run" / "supernet.safetensors").unlink()
    assert "supernet.safetensors: missing" in call(tmp_path / "run", "--knee")[1]


def test_faults_of_the_machine_are_status_3(
    run: Path, head_map: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "to"
    options = (run, "--head-map", head_map, "--tokens", "192", "--to", to)

    def too_large(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")

    def no_room(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "write_json", no_room)
        status, output = call(*options)
    assert status == 3
    assert output.splitlines()[-1].endswith("to: cannot be written to (No space left on device)")
    with monkeypatch.context() as patch:
        patch.setattr(StudentLoss, "__call__", too_large)
        status, output = call(*options)
    assert status == 3
    last = output.splitlines()[-1]
    assert "GPU's memory is too small (CUDA out of memory. Tried); lower distill.batch" in last
    # A stage that ended is not measured again, and another process is let alone.
    with RunDir(to / "work"):
        status, output = call(*options)
    assert status == 3
    assert "in use by pid" in output
    with monkeypatch.context() as patch:
        bad = {"kl": float("nan")}
        measure = TrialWorker.measure
        calls: list[int] = []

        def measured(worker: TrialWorker, student: HydraHeadForCausalLM) -> dict[str, float]:
            calls.append(1)
            return bad if len(calls) == 1 else measure(worker, student)

        patch.setattr(TrialWorker, "measure", measured)
        status, output = call(*options)
        assert status == NonFiniteLoss.exit_status
        assert "after distillation: kl is not finite" in output.splitlines()[-1]
        status, output = call(*options)
    assert status == 0, output
    assert list(metrics_of(to)) == STAGES
    assert not (to / train_run.WORK).exists()
