"""Killed runs go on to the weights and the optimizer of uninterrupted ones, to the bit; test_training_on_gpu.py does the same there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from archsearch.models.teacher import Teacher
from archsearch.training.masters import MasterOptimizer
from tests.training import resuming


@pytest.mark.parametrize("kind", [resuming.reads_student, resuming.aligns])
def test_a_resumed_run_equals_a_whole_one(
    kind: Callable[[Teacher], resuming.Train], teacher: Teacher, tmp_path: Path
) -> None:
    resuming.check_resumed_equals_whole(kind(teacher), tmp_path, steps=(5, 10))


def test_a_lost_optimizer_is_found_out(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = MasterOptimizer.restore
    monkeypatch.setattr(
        MasterOptimizer,
        "restore",
        lambda self, group, moments, updates: restore(self, group, {}, 0),
    )
    with pytest.raises(AssertionError, match=r"parameter|result|exp_avg|counts"):
        resuming.check_resumed_equals_whole(resuming.aligns(teacher), tmp_path, steps=(7,))
