"""The comparison of full-attention heads on a run of a random model: what it measures, and in what state."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archsearch.attention.modeling_hydrahead import HydraHeadForCausalLM
from archsearch.configfile import load_config
from archsearch.errors import ConfigError
from archsearch.lab import full_branch
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import load_teacher
from archsearch.rundir import RunDir, score_file
from archsearch.scoring.head_scores import HeadScores, groups_of
from archsearch.studentconfig import FullConfig

SMALL = (
    "distill.learning_rate=0.01",
    "long_context.sequence_length=192",
    "long_context.batch_tokens=384",
)


@pytest.fixture
def run(run_config: Path, tmp_path: Path) -> Path:
    """A run directory that has a supernet, text and causal scores."""
    config = load_config(run_config, list(SMALL))
    teacher = load_teacher(config.teacher)
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    run_dir.freeze_config(config)
    Supernet.migrated(teacher, config.supernet.gdn).save(run_dir / "supernet.safetensors", teacher)
    draw = np.random.default_rng(0)
    for name, count in (("train.npy", 24), ("heldout.npy", 2)):
        np.save(run_dir / name, draw.integers(0, 60, (count, 96)).astype(np.uint16))
    scores_LH = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    scores = HeadScores.of("causal", scores_LH, groups_of(scores_LH, 2))
    scores.save(run_dir / score_file("causal"))
    return run_dir.path


def measured(
    run: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[dict[tuple[str, str, str], float], list[tuple[str, str, dict[str, Any]]]]:
    """The figures by (metric, case, stage), and the switches of each student when it was measured."""
    switches = []
    measure = full_branch.Bench.measure

    def noted(self: Any, case: str, stage: str, student: HydraHeadForCausalLM) -> Any:
        assert not student.training
        switches.append((case, stage, dict(student.config.fa)))
        return measure(self, case, stage, student)

    figures = run.parent / "figures.json"
    with monkeypatch.context() as patch:
        patch.setattr(full_branch.Bench, "measure", noted)
        command = ["full_branch", str(run), "--share", "0.5", "--contexts", "96", "200"]
        patch.setattr(sys, "argv", [*command, *words, "--figures", str(figures)])
        full_branch.main()
    rows = json.loads(figures.read_text())
    found = {
        (row["metric"].partition(",")[0], row["case"], row["stage"]): row["value"] for row in rows
    }
    assert len(found) == len(rows)
    return found, switches


def test_cases_start_alike_and_end_as_they_say(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ["RoPE", "RoPE, gate", "NoPE at once", "NoPE, mixed", "NoPE, log-scale, norm, gate"]
    words = ["--readings", "0", "480", "960", "--fade-tokens", "768", "--long-tokens", "768"]
    found, switches = measured(run, monkeypatch, *words, "--cases", *cases)
    stages = ["0 tokens", "480 tokens", "960 tokens", "768 long tokens more"]
    assert [row[:2] for row in switches[1:]] == [
        (case, stage) for case in cases for stage in stages
    ]
    assert {case for _, case, _ in found} == {"teacher", *cases}
    assert found["kl", "teacher", "as it is"] == 0
    assert found["kl", "RoPE, gate", "0 tokens"] == found["kl", "RoPE", "0 tokens"]
    assert found["kl", "NoPE, mixed", "0 tokens"] == found["kl", "RoPE", "0 tokens"]
    assert found["kl", "NoPE at once", "0 tokens"] != found["kl", "RoPE", "0 tokens"]
    for case in cases:
        kls = [found["kl", case, stage] for stage in stages]
        assert kls[2] < kls[0]
        assert len(set(kls)) == len(stages)
    names = {name for name, case, _ in found if case == "RoPE"}
    for context in (96, 200):
        assert f"niah_single_nll@{context}" in names
    shares = {
        "RoPE": [1, 1, 1, 1],
        "NoPE at once": [0, 0, 0, 0],
        "NoPE, mixed": [1, 0.375, 0, 0],
    }
    for case, expected in shares.items():
        own = [fa["rope_share"] for name, _, fa in switches if name == case]
        assert own == pytest.approx(expected)
    last = switches[-1][2]
    assert (last["log_scale"], last["norm"], last["gate"]) == (True, True, True)


def test_processes_share_cases_and_figures(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--readings", "0", "480", "--fade-tokens", "384", "--cases"]
    first, _ = measured(run, monkeypatch, *words, "NoPE at once")
    second, _ = measured(run, monkeypatch, *words, "RoPE")
    assert {case for _, case, _ in second} == {"teacher", "RoPE", "NoPE at once"}
    assert {key: second[key] for key in first} == first
    figures = run.parent / "figures.json"
    cases = [row["case"] for row in json.loads(figures.read_text())]
    assert list(dict.fromkeys(cases)) == ["teacher", "RoPE", "NoPE at once"]
    # Anew, with another rate: only that case's figures are others.
    rate = ["--set", "distill.learning_rate=0.001"]
    third, _ = measured(run, monkeypatch, *words, "RoPE", *rate)
    assert third.keys() == second.keys()
    changed = {
        (case, stage)
        for name, case, stage in third
        if third[name, case, stage] != second[name, case, stage]
    }
    assert changed == {("RoPE", "480 tokens")}
    with pytest.raises(ConfigError, match="figures of another head map; allowed: another file"):
        measured(run, monkeypatch, *words, "RoPE", "--share", "0.25")
    figures.write_text('[{"case": "of others"}]')
    with pytest.raises(ConfigError, match="figures of other cases"):
        measured(run, monkeypatch, *words, "RoPE")
    figures.write_text("[")
    with pytest.raises(ConfigError, match="no figures of cases"):
        measured(run, monkeypatch, *words, "RoPE")


def test_every_case_is_a_section_that_a_config_may_have() -> None:
    options = {name: FullConfig.model_validate(case) for name, case in full_branch.CASES.items()}
    assert options["RoPE"] == FullConfig()
    assert len(set(map(repr, options.values()))) == len(options)


def test_scores_that_the_run_lacks_are_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match=r"replacement_kl\.json"):
        measured(run, monkeypatch, "--method", "replacement_kl")
