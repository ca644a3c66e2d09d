"""Retrieval before and after tuning on long rows, on a random model: cases, their order, and what a second call does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from archsearch.lab import long_context
from archsearch.lab.ledger import Ledger
from archsearch.training.student import StudentLoss

SMALL = (
    "probes.kinds=[single]",
    "probes.unseen=[]",
    "probes.contexts=[96, 300]",
    "probes.beyond_window=true",
    "probes.prompts=2",
    "data.extra_heldout=[]",
    "long_context.sequence_length=192",
    "long_context.batch_tokens=384",
    "long_context.learning_rate=0.003",
)


def measured(
    run: Path, patch: pytest.MonkeyPatch, *words: str
) -> dict[tuple[str, str], dict[str, Any]]:
    """The ledger's rows by case and stage, after a call."""
    command = ["long_context", str(run), "--method", "causal", "--share", "0.5"]
    command += ["--tokens", "512", "--fade-tokens", "256", "--long-tokens", "1536", *words]
    for option in SMALL:
        command += ["--set", option]
    with patch.context() as only:
        only.setattr(sys, "argv", command)
        long_context.main()
    rows = Ledger(run / "long_context" / "long_context.jsonl").rows().values()
    found = {(row["case"], row["stage"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def test_students_are_measured_before_and_after_tuning(
    scored_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = scored_run.parent / "figures.json"
    cases = ["RoPE", "NoPE, log-scale, gate", long_context.CONTROL]
    words = ["--cases", *cases, "--figures", str(figures)]
    found = measured(scored_run, monkeypatch, *words)
    assert list(found) == [
        (long_context.TEACHER, "before"),
        *((case, stage) for case in cases for stage in ("before", "after")),
    ]
    kl = {key: row["values"]["kl"] for key, row in found.items()}
    assert kl[long_context.TEACHER, "before"] == kl[long_context.CONTROL, "before"] == 0
    assert kl["RoPE", "before"] != kl["NoPE, log-scale, gate", "before"]
    for case in cases:
        before, after = found[case, "before"], found[case, "after"]
        assert before["values"] != after["values"]
        assert {"niah_single_nll@96", "niah_single_match@300"} <= set(after["values"])
        assert after["tuned_tokens"] == 1536
    said = capsys.readouterr().out
    assert said.rstrip().endswith("done")
    assert all(f"| {case} | after |" in said for case in cases)
    records = json.loads(figures.read_text())
    shown = {(r["case"], r["tuning"], r["metric"].partition(",")[0]): r["value"] for r in records}
    assert len(shown) == len(records)
    assert shown["RoPE", "after", "kl"] == pytest.approx(kl["RoPE", "after"], rel=1e-4)


def test_a_second_call_goes_on_where_the_first_stopped(
    scored_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = ["--cases", "RoPE", "RoPE, gate"]
    tune = long_context.tune_long_context
    calls: list[str] = []

    def stopped(*args: Any, **options: Any) -> Any:
        calls.append("tune")
        if len(calls) == 2:
            raise long_context.OutOfTime
        return tune(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(long_context, "tune_long_context", stopped)
        found = measured(scored_run, patch, *cases)
    assert list(found)[1:] == [("RoPE", "before"), ("RoPE", "after"), ("RoPE, gate", "before")]
    assert capsys.readouterr().out.rstrip().endswith("left: RoPE, gate")
    # What was distilled is not distilled again: four steps of tuning are left.
    step, steps = StudentLoss.__call__, []
    with monkeypatch.context() as patch:
        patch.setattr(
            StudentLoss, "__call__", lambda loss, raw: (steps.append(1), step(loss, raw))[1]
        )
        again = measured(scored_run, patch, *cases)
    assert len(steps) == 1536 / 384
    assert not list((scored_run / "long_context").glob("kept-*"))
    assert list(again)[-1] == ("RoPE, gate", "after")
    assert {key: again[key] for key in found} == found
    assert capsys.readouterr().out.rstrip().endswith("done")
    # Nothing is left to train.
    with monkeypatch.context() as patch:
        patch.setattr(StudentLoss, "__call__", lambda *_: pytest.fail("trained again"))
        assert measured(scored_run, patch, *cases) == again


def test_without_time_only_the_teacher_is_measured(
    scored_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(scored_run, monkeypatch, "--cases", "RoPE", "--seconds", "0")
    assert list(found) == [(long_context.TEACHER, "before")]
