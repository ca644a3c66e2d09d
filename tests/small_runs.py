"""Runs of a tiny random teacher: a config that is searched in seconds, and a directory of what is read of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from archsearch.config import RunConfig
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import Teacher, load_teacher
from archsearch.rundir import RunDir

CONFIG = """\
schema: 1
name: check
seed: 3
teacher: {{source: {teacher}, device: cpu}}
data: {{sequence_length: 96, heldout_sequences: 1, niah_share: 0.5}}
probes: {{contexts: [96], multi_keys: 2, digits: 2, prompts: 1}}
scoring: {{retrieval: [], general: [], pairs_file: {pairs}, sender_pairs: 0, replacement_length: 32}}
supernet: {{tokens: 192, batch_tokens: 96}}
search:
  trials: 5
  proxy_tokens: [0, 192]
  random_control: false
  seeds: {{methods: [all_full, all_gdn, causal], fa_shares: [0.5]}}
cost: {{context: 256}}
distill: {{batch_tokens: 96, learning_rate: 1e-3}}
execution: {{executor: serial}}
"""


def write_config(place: Path, teacher: Path, pairs: Path) -> Path:
    """check.yaml in that folder, of a teacher's folder and a file of answered pairs."""
    path = place / "check.yaml"
    path.write_text(CONFIG.format(teacher=teacher, pairs=pairs))
    return path


def bare_run(path: Path, config: RunConfig, rows: Mapping[str, int]) -> tuple[RunDir, Teacher]:
    """A new directory with the config, untrained twins, and as many random rows of 96 tokens in each file as rows says."""
    teacher, run_dir = load_teacher(config.teacher), RunDir(path)
    run_dir.path.mkdir()
    run_dir.freeze_config(config)
    facts = {"model": vars(teacher.shape), "fingerprint": teacher.fingerprint}
    run_dir.write_json("teacher.json", facts)
    Supernet.migrated(teacher, config.supernet.gdn).save(run_dir / "supernet.safetensors", teacher)
    draw = np.random.default_rng(0)
    for name, count in rows.items():
        np.save(run_dir / name, draw.integers(2, 60, (count, 96)).astype(np.uint16))
    return run_dir, teacher
