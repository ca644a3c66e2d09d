"""What tests of comparisons of students share."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from archsearch.config import ScoreMethod
from archsearch.configfile import load_config
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import load_teacher
from archsearch.rundir import RunDir, score_file
from archsearch.scoring.head_scores import HeadScores, groups_of

NO_GENERAL = "probes.kinds=[single]"


@pytest.fixture
def scored_run(run_config: Path, tmp_path: Path) -> Path:
    """A run directory of a random teacher with twins, text and the scores of every method, all drawn at random."""
    config = load_config(run_config, ["distill.learning_rate=0.01"])
    teacher = load_teacher(config.teacher)
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    run_dir.freeze_config(config)
    facts = {"model": vars(teacher.shape), "fingerprint": teacher.fingerprint}
    run_dir.write_json("teacher.json", facts)
    Supernet.migrated(teacher, config.supernet.gdn).save(run_dir / "supernet.safetensors", teacher)
    draw = np.random.default_rng(0)
    for name, count in (("train.npy", 24), ("heldout.npy", 2)):
        np.save(run_dir / name, draw.integers(2, 60, (count, 96)).astype(np.uint16))
    for number, method in enumerate(get_args(ScoreMethod)):
        scores_LH = torch.rand(2, 4, generator=torch.Generator().manual_seed(number))
        scores = HeadScores.of(method, scores_LH, groups_of(scores_LH, 2))
        scores.save(run_dir / score_file(method))
    return run_dir.path
