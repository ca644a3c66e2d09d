"""Rows of tens of thousands of tokens to tune students on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..data.corpora import training_batches
from ..data.niah import retrieval_rows
from ..rundir import RunDir
from ..search.trial import TRAIN_FILE, TrialWorker
from ..training.loop import BatchSource

LONG_ROWS = "long-rows"
"""Begins the name of the file of long prompts."""


def training_text(worker: TrialWorker) -> NDArray[Any]:
    """The rows that students are distilled on."""
    rows: NDArray[Any] = np.load(worker.run_dir / TRAIN_FILE, mmap_mode="r")
    return rows


def long_batches(worker: TrialWorker) -> BatchSource:
    """A source of rows of section long_context's length: training text end to end, and retrieval prompts, in data's shares.

    Prompts are drawn once and kept in the folder.
    """
    config, text_NT = worker.config, training_text(worker)
    long, length = config.long_context, config.long_context.sequence_length
    count = text_NT.size // length
    long_NT = np.asarray(text_NT).reshape(-1)[: count * length].reshape(count, length)
    share = config.data.niah_share if count else 1.0
    sequences = max(1, long.batch_tokens // length)
    prompts_MT = _long_prompts(worker, max(1, round(share * long.tokens / length)))

    def batches(start_step: int) -> Iterator[Tensor]:
        return training_batches(
            long_NT,
            prompts_MT,
            niah_share=share,
            batch_sequences=sequences,
            seed=config.seed,
            start_step=start_step,
        )

    return batches


def _long_prompts(worker: TrialWorker, count: int) -> NDArray[Any]:
    config = worker.config
    probes, length = config.probes, config.long_context.sequence_length
    name = f"{LONG_ROWS}-{length}-{count}-{probes.multi_keys}-{probes.digits}-{config.seed}.npy"
    path = worker.run_dir / name
    if not path.exists():
        rows = retrieval_rows(
            worker.teacher.tokenizer,
            count,
            length,
            keys=probes.multi_keys,
            digits=probes.digits,
            seed=config.seed,
        )
        with RunDir(worker.run_dir).replacing(name) as temporary, temporary.open("wb") as file:
            np.save(file, rows)
    found: NDArray[Any] = np.load(path, mmap_mode="r")
    return found
