"""What tests of comparisons of students share."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from archsearch.config import ScoreMethod
from archsearch.configfile import load_config
from archsearch.rundir import score_file
from archsearch.scoring.head_scores import HeadScores, groups_of
from tests.small_runs import bare_run

NO_GENERAL = "probes.kinds=[single]"


@pytest.fixture
def scored_run(run_config: Path, tmp_path: Path) -> Path:
    """A run directory of a random teacher with twins, text and the scores of every method, all drawn at random."""
    config = load_config(run_config, ["distill.learning_rate=0.01"])
    run_dir, _ = bare_run(tmp_path / "run", config, {"train.npy": 24, "heldout.npy": 2})
    for number, method in enumerate(get_args(ScoreMethod)):
        scores_LH = torch.rand(2, 4, generator=torch.Generator().manual_seed(number))
        scores = HeadScores.of(method, scores_LH, groups_of(scores_LH, 2))
        scores.save(run_dir / score_file(method))
    return run_dir.path
