"""The comparison of selectors on a random model: each reading made once, in the time that there is, and the best go on."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from archsearch.errors import ConfigError
from archsearch.evaluation.divergence import TeacherReference, divergence
from archsearch.headmap import HeadMap
from archsearch.lab import selection, student_worker
from archsearch.lab.bench_folder import BenchFolder, read_config
from archsearch.lab.ledger import Ledger
from archsearch.lab.selection_maps import CONTROL, METHODS
from archsearch.lab.student_worker import StudentWorker, reading_key
from archsearch.models.cut import cut
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import load_teacher
from archsearch.rundir import RunDir

SMALL = (
    "probes.kinds=[single]",
    "probes.unseen=[]",
    "probes.contexts=[64, 96]",
    "probes.prompts=2",
    "data.extra_heldout=[]",
)
FEW = ("causal", "random", "even_layers")


def run_stage(run: Path, patch: pytest.MonkeyPatch, stage: str, *words: str) -> None:
    command = ["selection", str(run), "--stage", stage, "--shares", "0.5", *words]
    for option in SMALL:
        command += ["--set", option]
    with patch.context() as only:
        only.setattr(sys, "argv", command)
        selection.main()


def rows_of(run: Path) -> list[dict[str, Any]]:
    return list(Ledger(run / "selection" / "readings.jsonl").rows().values())


def student_rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(run) if row["map"] is not None]


def test_readings_are_of_the_maps_and_come_once(
    scored_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--only", *FEW, "--tokens", "0", "512"]
    figures = scored_run.parent / "figures.json"
    run_stage(scored_run, monkeypatch, "A", *words, "--figures", str(figures))
    said = capsys.readouterr().out
    assert "stage A is done" in said
    rows = student_rows(scored_run)
    per_map = Counter(json.dumps(row["map"]["layers"]) for row in rows)
    assert set(per_map.values()) == {2}
    # All of full attention, causal by head and by group, the layers, and at most six of random.
    assert 4 <= len(per_map) <= 10
    for row in rows:
        assert set(row["values"]) >= {"kl", "niah_single_nll@64", "niah_single_match@96"}
    text = (scored_run / "selection" / "readings.jsonl").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(StudentWorker, "_train", lambda *_: pytest.fail("trained again"))
        run_stage(scored_run, monkeypatch, "A", *words)
    assert (scored_run / "selection" / "readings.jsonl").read_text() == text
    run_stage(scored_run, monkeypatch, "A", "--only", *FEW, "--tokens", "0", "512", "1024")
    assert Counter(row["tokens"] for row in student_rows(scored_run)) == dict.fromkeys(
        (0, 512, 1024), len(per_map)
    )
    records = json.loads(figures.read_text())
    of_causal = [r for r in records if "causal/head/0.5/0" in r.get("selectors", [])]
    assert [r["tokens"] for r in of_causal] == [0, 512]
    assert all(r["value"] > 0 and r["cache_bytes"] > 0 for r in of_causal)
    assert "| causal | group | 0.5 |" in said
    assert f"| {CONTROL} | head | 1 | 1.000 |" in said


def test_a_reading_without_tokens_is_the_map_cut_out_of_the_supernet(
    scored_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_stage(scored_run, monkeypatch, "A", "--only", "causal", "--tokens", "0", "512")
    teacher = load_teacher(read_config(RunDir(scored_run), SMALL).teacher)
    supernet = Supernet.load(scored_run / "supernet.safetensors", teacher)
    heldout = torch.from_numpy(np.load(scored_run / "heldout.npy").astype(np.int64))
    reference = TeacherReference(teacher, heldout)
    rows = [row for row in student_rows(scored_run) if row["tokens"] == 0]
    for row in rows:
        student = cut(teacher, supernet, HeadMap.from_json(row["map"]))
        assert row["values"]["kl"] == pytest.approx(divergence(student, reference)["kl"], abs=1e-6)
    later = {json.dumps(r["map"]): r["values"]["kl"] for r in student_rows(scored_run)}
    assert all(later[json.dumps(r["map"])] < r["values"]["kl"] for r in rows if "G" in str(r))


def test_the_best_go_on_with_other_orders_of_batches(
    scored_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = ["--units", "head"]
    with pytest.raises(ConfigError, match=r"stage A: .* maps have no reading at 256 tokens"):
        run_stage(scored_run, monkeypatch, "B", "--tokens-before", "256", "--tokens", "512", *heads)
    run_stage(scored_run, monkeypatch, "A", "--tokens", "0", "256", *heads)
    capsys.readouterr()
    run_stage(scored_run, monkeypatch, "B", "--tokens-before", "256", "--tokens", "512", *heads)
    chosen = capsys.readouterr().out.partition("stage B: ")[2].partition(": ")[0].split(", ")
    assert len(chosen) == 9
    assert chosen[-1] == "even_layers"
    assert set(chosen) < set(METHODS)
    words = ["--tokens-before", "256", "512", "--tokens", "512", "768", "--seeds", "2"]
    run_stage(scored_run, monkeypatch, "C", *words)
    said = capsys.readouterr().out
    best = said.partition("stage C: ")[2].partition(": ")[0].split(", ")
    assert len(best) == 4
    assert best[-1] == "even_layers"
    assert set(best) <= set(chosen)
    longest = [row for row in student_rows(scored_run) if row["tokens"] == 768]
    by_map: dict[str, dict[int, float]] = {}
    for row in longest:
        by_map.setdefault(str(row["map"]["layers"]), {})[row["seed"]] = row["values"]["kl"]
    control = by_map.pop(str(["FFFF"] * 2))
    assert set(control) == {0}
    assert all(set(seeds) == {0, 1} for seeds in by_map.values())
    assert all(len(set(seeds.values())) == 2 for seeds in by_map.values())
    assert "| mean |" in said


def test_nothing_is_begun_after_the_time(
    scored_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_stage(scored_run, monkeypatch, "A", "--only", "causal", "--seconds", "0")
    assert rows_of(scored_run) == []
    assert "3 maps left" in capsys.readouterr().out


def test_a_dry_run_counts_tokens_and_writes_nothing(
    scored_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_stage(scored_run, monkeypatch, "A", "--only", "causal", "--dry-run", "--rate", "1000")
    # Causal by head and by group, the layers, and the control; half a million tokens each.
    assert "4 maps to train, 2.0 M tokens in 2,000 s at 1,000" in capsys.readouterr().out
    assert not (scored_run / "selection").exists()


def worker_of(run: Path, deadline: float, *overrides: str) -> tuple[StudentWorker, Ledger]:
    run_dir = RunDir(run)
    options = [*SMALL, "distill.decay_share=0.5", *overrides]
    folder = BenchFolder(run_dir, run / "bench", read_config(run_dir, options))
    folder.prepare()
    ledger = Ledger(run / "bench" / "readings.jsonl")
    more = {"ledger": str(ledger.path), "settings": "s", "deadline": deadline, "workers": 2}
    return StudentWorker(folder.payload() | more), ledger


def task_of(run: Path, seed: int, *readings: int) -> dict[str, Any]:
    shape = load_teacher(read_config(RunDir(run), SMALL).teacher).shape
    head_map = HeadMap.from_full_heads(shape, [(0, 1), (1, 2)])
    return {"map": head_map.to_json(), "seed": seed, "readings": list(readings)}


def test_a_worker_keeps_what_it_read_before_the_time_was_over(
    scored_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, ledger = worker_of(scored_run, deadline=3.0)
    clock = count()
    monkeypatch.setattr(
        student_worker, "time", SimpleNamespace(time=lambda: next(clock), monotonic=time.monotonic)
    )
    assert worker(task_of(scored_run, 0, 0, 256)) == "stopped"
    (row,) = ledger.rows().values()
    assert (row["tokens"], row["workers"]) == (0, 2)
    later, _ = worker_of(scored_run, deadline=float("inf"))
    assert later(task_of(scored_run, 0, 0, 256, 512)) == "done"
    rows = list(ledger.rows().values())
    assert [row["tokens"] for row in rows] == [0, 256, 512]
    assert 0 < rows[1]["train_seconds"] < rows[2]["train_seconds"]


def test_seeds_differ_by_their_batches_alone(scored_run: Path) -> None:
    worker, ledger = worker_of(scored_run, deadline=float("inf"))
    task = task_of(scored_run, 0, 0, 512)
    for seed in (0, 1, 2):
        assert worker(task | {"seed": seed}) == "done"
    again, other = worker_of(scored_run, float("inf"), "distill.teacher_logits=exact")
    again._settings = "t"
    assert again(task | {"seed": 1}) == "done"
    rows = {
        (row["seed"], row["tokens"], key[0]): row["values"]["kl"]
        for key, row in other.rows().items()
    }
    assert rows[0, 0, "s"] == rows[1, 0, "s"] == rows[2, 0, "s"]
    assert len({rows[seed, 512, "s"] for seed in (0, 1, 2)}) == 3
    # What is kept of the teacher for one seed is not taken for another's.
    assert rows[1, 512, "t"] == pytest.approx(rows[1, 512, "s"], rel=1e-5)
    assert len(ledger.rows()) == 8


def test_students_that_break_are_written_down_and_not_tried_again(scored_run: Path) -> None:
    worker, ledger = worker_of(scored_run, float("inf"), "distill.learning_rate=1e30")
    task = task_of(scored_run, 0, 0, 512)
    assert worker(task) == "failed"
    head_map = HeadMap.from_json(task["map"])
    rows = ledger.rows()
    assert "kl" in rows[reading_key("s", head_map, 0, 0)]["values"]
    assert "not finite" in rows[reading_key("s", head_map, 0, 512)]["failed"]
    assert worker(task) == "done"
    assert len(ledger.rows()) == 2
