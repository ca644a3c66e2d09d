"""Rows of tens of thousands of tokens to tune students on: training text end to end, and retrieval prompts of that length.

Shapes: N rows of T tokens as they were cut for distillation, B sequences of L tokens as they are tuned on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ..config import RunConfig
from ..data.corpora import Packed, packed_batches, training_batches
from ..data.niah import retrieval_rows
from ..errors import ConfigError
from ..progress import Progress, ignore_progress
from ..rundir import replacing
from .loop import Source
from .packing import RawBatch

LONG_ROWS = "long-rows"
"""Begins the name of the file of long prompts."""


def long_batches(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    text: Packed,
    folder: Path | None = None,
    *,
    progress: Progress = ignore_progress,
) -> Source:
    """A source of batches [B, L] as section long_context says, text and prompts in section data's shares.

    Prompts are drawn once, and kept in the folder where one is given; progress counts them. Where documents begin is told
    with long_context.packed, if the text says so. Raises ConfigError where the text is shorter than one row.
    """
    long, share = config.long_context, config.data.niah_share
    rows = long_text(text, long.sequence_length, needed=share < 1)
    prompts = None
    if share > 0:
        prompts = _prompts(config, tokenizer, rows.rows, folder, progress)
    options: dict[str, Any] = {
        "niah_share": share,
        "batch_sequences": max(1, long.batch_tokens // long.sequence_length),
        "seed": config.seed,
    }

    def batches(start_step: int) -> Iterator[RawBatch]:
        if long.packed and rows.starts is not None:
            packed = None if prompts is None else Packed(prompts)
            return packed_batches(rows, packed, start_step=start_step, **options)
        return training_batches(rows.rows, prompts, start_step=start_step, **options)

    return batches


def long_text(text: Packed, length: int, *, needed: bool = True) -> Packed:
    """Rows of that length, of the rows [N, T] end to end; what is left at the end is dropped.

    Raises ConfigError where there is less than one, and one is needed.
    """
    count = text.rows.size // length
    if needed and not count:
        raise ConfigError(
            f"long_context.sequence_length: {length} is more than the {text.rows.size} tokens of the training text; "
            f"allowed: 1 to {text.rows.size}"
        )

    def laid_out(array: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(array).reshape(-1)[: count * length].reshape(count, length)

    return Packed(laid_out(text.rows), None if text.starts is None else laid_out(text.starts))


def _prompts(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    text_NL: NDArray[Any],
    folder: Path | None,
    progress: Progress,
) -> NDArray[Any]:
    """As many prompts as tuning takes, each but once."""
    data, probes, length = config.data, config.probes, config.long_context.sequence_length
    count = max(1, round(data.niah_share * config.long_context.tokens / length))
    facts: list[float] = [length, count, probes.multi_keys, probes.digits, config.seed]
    facts += [data.niah_text_share] if data.niah_text_share else []
    path = None if folder is None else folder / f"{LONG_ROWS}-{'-'.join(map(str, facts))}.npy"
    if path is None or not path.exists():
        rows = retrieval_rows(
            tokenizer,
            count,
            length,
            keys=probes.multi_keys,
            digits=probes.digits,
            seed=config.seed,
            text_NT=text_NL,
            text_share=data.niah_text_share,
            progress=progress,
        )
        if path is None:
            return rows
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, rows)
    found: NDArray[Any] = np.load(path, mmap_mode="r")
    return found
