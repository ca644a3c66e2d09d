"""A study's file read for other metrics than it was made for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from archsearch.errors import ConfigError
from archsearch.lab import fidelity_targets

STUDY = Path(__file__).parents[2] / "runs/lab/smollm2_fidelity.json"


def call(monkeypatch: pytest.MonkeyPatch, file: Path, figures: Path, *targets: str) -> None:
    words = ["lab", str(file), "--targets", *targets, "--machine", "there"]
    monkeypatch.setattr(sys, "argv", [*words, "--figures", str(figures)])
    fidelity_targets.main()


def test_each_target_has_a_table_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    call(monkeypatch, STUDY, figures, "general_nll", "kl")
    rows = json.loads(figures.read_text())
    assert {row["read_on"] for row in rows} == {"there"}
    for target in ("general_nll", "kl"):
        of_target = [row for row in rows if f"with {target} after" in row["metric"]]
        assert {row["maps"] for row in of_target} == {36, 24, 12}
    (own,) = (
        row
        for row in rows
        if row["metric"] == "Spearman, kl at 131,072 tokens with kl after 3,997,696, all"
    )
    assert own["value"] > 0.9
    # The figures of the study itself are the same.
    study = fidelity_targets.read_file(STUDY)
    (kept,) = (
        row
        for row in study.agreements
        if (row.metric, row.proxy, row.tokens, row.group) == ("kl", "kl", 131_072, "all")
    )
    assert own["value"] == pytest.approx(kept.spearman)
    printed = capsys.readouterr().out
    assert "general_nll after 3,997,696 tokens" in printed
    assert "| kl | 131,072 | 0.99 |" in printed


def test_what_cannot_be_read_or_counted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = tmp_path / "figures.json"
    with pytest.raises(ConfigError, match="--targets cache_bytes: allowed: "):
        call(monkeypatch, STUDY, figures, "cache_bytes")
    with pytest.raises(
        ConfigError, match=r"none\.json: no study with maps; allowed: a fidelity.json"
    ):
        call(monkeypatch, tmp_path / "none.json", figures, "kl")
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        call(monkeypatch, broken, figures, "kl")
    assert not figures.exists()
