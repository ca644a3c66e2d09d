"""What stages leave behind, each alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from archsearch import stages
from archsearch.configfile import load_config
from archsearch.console import Printer
from archsearch.rundir import RunDir
from archsearch.search.trial import TEACHER_LOGITS
from archsearch.stages import STAGE_WORK, RunContext


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
            return SimpleNamespace(summary="done")

        monkeypatch.setattr(stages, "run_search", run_search)
        with Printer(Console(quiet=True)).stage("search") as progress:
            assert STAGE_WORK["search"](context, progress) == "done"

    with pytest.raises(KeyboardInterrupt):
        search(done=False)
    assert kept.exists()
    for _ in range(2):
        search(done=True)
        assert not (run_dir / TEACHER_LOGITS).exists()
