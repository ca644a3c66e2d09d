"""Stages alone: what they need before they begin, and what they leave behind."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from archsearch import stages
from archsearch.configfile import load_config
from archsearch.console import Printer
from archsearch.errors import ConfigError
from archsearch.pipeline import run_stages
from archsearch.rundir import RunDir
from archsearch.scoring.pairs import draw_pairs
from archsearch.search.trial import TEACHER_LOGITS
from archsearch.stages import CHECKPOINT_FILE, STAGE_WORK, RunContext, aligned_share


def test_what_candidates_share_goes_with_the_search_and_stays_while_it_can_go_on(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "run")
    kept = run_dir / TEACHER_LOGITS / "0" / "batch.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"0")
    context = RunContext(load_config(run_config, []), run_dir)
    monkeypatch.setattr(stages, "read_scores", lambda *_: {})

    def search(done: bool) -> None:
        def run_search(*_: object, **__: object) -> SimpleNamespace:
            if not done:
                raise KeyboardInterrupt
            return SimpleNamespace(lines=["front", "volume", "untrained: all 5 head maps"])

        monkeypatch.setattr(stages, "run_search", run_search)
        with Printer(Console(quiet=True)).stage("search") as progress:
            said = STAGE_WORK["search"](context, progress)
            assert said == "front; volume\nuntrained: all 5 head maps"

    with pytest.raises(KeyboardInterrupt):
        search(done=False)
    assert kept.exists()
    for _ in range(2):
        search(done=True)
        assert not (run_dir / TEACHER_LOGITS).exists()


def test_too_few_pairs_are_found_before_the_twins_are_trained(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "align", None)  # Calling it would fail otherwise.
    settings = load_config(run_config, ["scoring.retrieval=[single]", "scoring.contexts=[96]"])
    with pytest.raises(ConfigError, match="too few pairs of retrieval"):
        run_stages(settings, RunDir(tmp_path / "run"), Printer(Console(quiet=True)))
    assert (tmp_path / "run/train.npy").exists()
    assert not (tmp_path / "run/supernet.safetensors").exists()


def test_pairs_are_drawn_once_for_twins_and_scores(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["seed"])
        return draw_pairs(*args, **kwargs)

    monkeypatch.setattr(stages, "draw_pairs", counted)
    settings = load_config(run_config, ["supernet.tokens=128"])
    run_stages(settings, RunDir(tmp_path / "run"), Printer(Console(quiet=True)), last="scores")
    assert calls == [RunContext(settings, RunDir(tmp_path / "run")).seed("scoring")]


@pytest.mark.parametrize(("error", "warned"), [(0.9, False), (1.5, True)])
def test_twins_that_are_worse_than_a_constant_are_warned_of(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: float, warned: bool
) -> None:
    real = stages.align

    def aligned(*args: Any, **kwargs: Any) -> Any:
        supernet = real(*args, **kwargs)
        supernet.meta["metrics"]["error_median"] = error
        return supernet

    monkeypatch.setattr(stages, "align", aligned)
    settings, said = load_config(run_config, ["supernet.tokens=128"]), StringIO()
    printer = Printer(Console(file=said, width=300))
    run_stages(settings, RunDir(tmp_path / "run"), printer, last="supernet")
    text = "warning: supernet: the median error of a twin is 1.5, where the best constant has 1: "
    assert (text in said.getvalue()) is warned


def test_seeds_differ_by_purpose_and_follow_the_config(run_config: Path, tmp_path: Path) -> None:
    context = RunContext(load_config(run_config, []), RunDir(tmp_path))
    other = RunContext(load_config(run_config, ["seed=9"]), RunDir(tmp_path))
    assert context.seed("train") == context.seed("train")
    assert len({context.seed("train"), context.seed("heldout"), other.seed("train")}) == 3


def test_how_far_an_alignment_came_is_read_off_its_checkpoint(
    run_config: Path, tmp_path: Path
) -> None:
    config, run_dir = load_config(run_config, []), RunDir(tmp_path)
    assert aligned_share(run_dir, config) == 0
    save_file({"a": torch.zeros(1)}, tmp_path / CHECKPOINT_FILE, metadata={"step": "4"})
    # A batch of 128 tokens is one sequence of 96.
    assert aligned_share(run_dir, config) == 4 * 96 / 1024
    (tmp_path / CHECKPOINT_FILE).write_text("{")
    assert aligned_share(run_dir, config) == 0
