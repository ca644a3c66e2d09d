"""Rates of distillation compared on a run of a random model: every case is trained, and its figures say with what."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from archsearch.config import DistillConfig
from archsearch.lab import student_rates

from .test_full_branch import run  # noqa: F401 - a fixture


def test_cases_are_the_products_with_an_exact_form_of_the_teacher_each() -> None:
    found = student_rates.cases(DistillConfig(), [1024, 4096], [1e-3], ["attention", "all"])
    assert len(found) == 4
    for config in found.values():
        exact = {"attention": "mean_row", "all": "hidden"}[config.trainable]
        assert config.teacher_logits == exact
        assert config.replay


def test_every_case_is_measured_at_every_reading(
    run: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = run.parent / "figures.json"
    words = ["--share", "0.5", "--batches", "96", "192", "--rates", "1e-4", "1e-2"]
    words += ["--readings", "0", "960", "--contexts", "64", "--figures", str(figures)]
    monkeypatch.setattr(sys, "argv", ["student_rates", str(run), *words])
    student_rates.main()
    records = [r for r in json.loads(figures.read_text()) if r["metric"].startswith("kl, ")]
    found = {(r["case"], r["stage"]): r["value"] for r in records}
    assert len(found) == 2 * 2 * 2
    starts = {kl for (_, stage), kl in found.items() if stage == "0 tokens"}
    assert len(starts) == 1
    trained = {kl for (_, stage), kl in found.items() if stage == "960 tokens"}
    assert len(trained) == 4
    assert min(trained) < min(starts)
    assert all(r["compared_to"] is None for r in records)
    assert capsys.readouterr().out.count("; ") >= 4
