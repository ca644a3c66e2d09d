"""The table of scoring methods: each reads what its row says, and nothing else."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from archsearch.config import ScoreMethod, ScoringConfig
from archsearch.models.supernet import Supernet
from archsearch.scoring.inputs import ScoreInputs, SubProbe
from archsearch.scoring.methods import METHODS
from tests.random_models import random_probes, random_supernet, random_teacher, random_tokens

CONFIG = ScoringConfig(gate_steps=1, sender_pairs=1, min_pairs=1)
NO_TEXT = torch.empty(0, 0, dtype=torch.long)


def no_supernet() -> Supernet:
    raise AssertionError("this method reads no twins")


def inputs(*, supernet: bool, text: bool) -> ScoreInputs:
    teacher = random_teacher()
    twins = random_supernet(teacher)
    return ScoreInputs(
        teacher,
        {"retrieval": {"single": SubProbe(tuple(random_probes(2)), 2)}},
        random_tokens(1, 12) if text else NO_TEXT,
        (lambda: twins) if supernet else no_supernet,
        CONFIG,
        seed=0,
    )


@pytest.mark.parametrize("name", get_args(ScoreMethod))
def test_a_method_needs_what_its_row_says(name: ScoreMethod) -> None:
    method = METHODS[name]
    found = method.score(inputs(supernet=method.needs_supernet, text=method.needs_text))
    assert (found.method, len(found.composite), len(found.groups[0])) == (name, 3, 2)
    if method.needs_supernet:
        with pytest.raises(AssertionError, match="no twins"):
            method.score(inputs(supernet=False, text=True))
    if method.needs_text:
        with pytest.raises(ValueError, match="not \\[N, T\\]"):
            method.score(inputs(supernet=True, text=False))
    # Only a run that makes a supernet makes text.
    assert method.needs_supernet or not method.needs_text
