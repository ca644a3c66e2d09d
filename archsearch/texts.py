"""The text of a run: drawn or read, checked for passages that training and held-out text share, and written down."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import RunConfig, TextConfig
from .data.corpora import Packed, load_text
from .data.niah import retrieval_rows
from .data.overlap import WINDOW, shared_rows
from .errors import ConfigError, EnvironmentFault
from .models.teacher import Teacher
from .plan import TrainingRows, text_origin, training_rows
from .probe_inputs import naming
from .progress import Progress
from .rundir import RunDir
from .search.final import final_config, final_file
from .search.trial import (
    HELDOUT_FILE,
    RETRIEVAL_FILE,
    STARTS_FILE,
    TRAIN_FILE,
    heldout_file,
)

_MISSING = "missing"
_NAMED_ROWS = 5
"""Rows that a message names before it counts the rest."""


def write_texts(
    config: RunConfig,
    run_dir: RunDir,
    teacher: Teacher,
    seed: Callable[[str], int],
    progress: Progress,
) -> str:
    """Writes heldout.npy, one more for each extra text and, where the run trains anything, train.npy and retrieval.npy.

    Where the source of the training text has documents, train_starts.npy says where they begin. seed gives one for
    each purpose. Returns the stage's closing line. Raises ConfigError where training and held-out text share a passage
    that may not be left out, and as load_text does.
    """
    heldout = write_heldout(config, run_dir, teacher, seed, progress)
    num_heldout = sum(rows.size for rows in heldout.values())
    said = write_training(config, run_dir, teacher, heldout, seed, progress)
    return f"{num_heldout:,} held-out " + (f"and {said}" if said else "tokens")


def write_training(
    config: RunConfig,
    run_dir: RunDir,
    teacher: Teacher,
    heldout: dict[str, NDArray[Any]],
    seed: Callable[[str], int],
    progress: Progress,
) -> str:
    """The training part of write_texts, against the held-out tokens by their field; says nothing where nothing is trained."""
    rows = training_rows(config)
    if not rows.text:
        return ""
    text, left_out = _training_text(config, teacher, rows, heldout, seed, progress)
    _write_array(run_dir, TRAIN_FILE, text.rows)
    if text.starts is not None:
        _write_array(run_dir, STARTS_FILE, text.starts)
    if rows.prompts:
        prompts = retrieval_rows(
            teacher.tokenizer,
            rows.prompts,
            config.data.sequence_length,
            keys=config.probes.multi_keys,
            digits=config.probes.digits,
            seed=seed("retrieval"),
            text_NT=text.rows,
            text_share=config.data.niah_text_share,
            progress=progress,
        )
        _write_array(run_dir, RETRIEVAL_FILE, prompts)
    less = f" ({left_out} sequences left out that share text with them)" if left_out else ""
    return f"{text.rows.size:,} training tokens{less}, {rows.prompts:,} prompts"


def write_heldout(
    config: RunConfig,
    run_dir: RunDir,
    teacher: Teacher,
    seed: Callable[[str], int],
    progress: Progress,
) -> dict[str, NDArray[Any]]:
    """The held-out tokens by the config's field; those that have no file yet are made and written first."""
    found: dict[str, NDArray[Any]] = {}
    for field, text, count, skip, file, purpose in heldout_parts(config):
        if not (run_dir / file).exists():
            with naming(_origin_field(field, text)):
                packed = load_text(
                    text,
                    teacher.tokenizer,
                    teacher,
                    sequences=count,
                    length=config.data.sequence_length,
                    seed=seed(purpose),
                    skip=skip,
                    progress=progress,
                )
            _write_array(run_dir, file, packed.rows)
        found[field] = np.load(run_dir / file)
    return found


def check_texts(config: RunConfig, run_dir: RunDir, due: Collection[str]) -> None:
    """Raises EnvironmentFault where the stage of data is done and has lost a file that these stages read, with what to do about it."""
    made_by = "stages/data.json"
    if not (run_dir / made_by).exists() or not {"supernet", "scores", "search"} & set(due):
        return
    lost = {name: said for name in _read_by(config, due) if (said := lost_array(run_dir / name))}
    if not lost:
        return
    named = ", ".join(f"{run_dir / name} ({said})" for name, said in lost.items())
    first = "" if set(lost.values()) == {_MISSING} else "what is damaged and "
    raise EnvironmentFault(
        f"{named}: put back, or remove {first}{run_dir / made_by}: then the same `archsearch run` makes them again"
    )


def _read_by(config: RunConfig, due: Collection[str]) -> list[str]:
    """The files of text that stages read."""
    rows = training_rows(config)
    trains = "supernet" in due or ("search" in due and config.search.lengths[-1] > 0)
    training = [(TRAIN_FILE, rows.text), (RETRIEVAL_FILE, rows.prompts)] if trains else []
    heldout = [file for _, _, _, _, file, _ in heldout_parts(config)]
    return [*heldout, *(file for file, count in training if count)]


def lost_array(path: Path) -> str:
    """Why an array cannot be read; empty where it can."""
    if not path.exists():
        return _MISSING
    try:
        np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        return f"damaged: {error}"
    return ""


def heldout_parts(config: RunConfig) -> Iterator[tuple[str, TextConfig, int, int, str, str]]:
    """Field, text, sequences, sequences to pass over, file and purpose of the seed; the final stage's are behind those of trials."""
    final = final_config(config)
    names = [("data.heldout", HELDOUT_FILE, "heldout")]
    names += [
        (f"data.extra_heldout[{index}]", heldout_file(extra.label), f"heldout/{extra.label}")
        for index, extra in enumerate(config.data.extra_heldout)
    ]
    counts = config.data.heldout_texts
    for (field, file, purpose), (text, count) in zip(names, counts, strict=True):
        yield field, text, count, 0, file, purpose
    if final is None:
        return
    more = final.data.heldout_texts
    for (field, file, purpose), (text, count), (_, own) in zip(names, counts, more, strict=True):
        # Text that is drawn has no order in which it could be passed over.
        skip = 0 if text.source == "teacher" else count
        yield f"{field} of search.final", text, own, skip, final_file(file), f"final/{purpose}"


def _training_text(
    config: RunConfig,
    teacher: Teacher,
    rows: TrainingRows,
    heldout: dict[str, NDArray[Any]],
    seed: Callable[[str], int],
    progress: Progress,
) -> tuple[Packed, int]:
    """Training text without rows that share a passage with held-out text, and how many were left out."""
    data = config.data
    with naming(_origin_field("data.train", data.train)):
        text = load_text(
            data.train,
            teacher.tokenizer,
            teacher,
            sequences=rows.text,
            length=config.data.sequence_length,
            seed=seed("train"),
            skip=rows.skip,
            progress=progress,
        )
    shared: set[int] = set()
    for field, heldout_MT in heldout.items():
        pairs = shared_rows(text.rows, heldout_MT)
        shared |= {row for row, _ in pairs}
        if pairs and data.train.source != "teacher" and data.overlap == "refuse":
            raise ConfigError(_overlap_message(config, field, pairs, rows.skip))
    if len(shared) == len(text.rows):
        raise ConfigError(
            f"data.train: every sequence shares a passage of {WINDOW} tokens with held-out text; allowed: other text"
        )
    kept = np.setdiff1d(np.arange(len(text.rows)), sorted(shared))
    starts = None if text.starts is None else text.starts[kept]
    return (Packed(text.rows[kept], starts) if shared else text), len(shared)


def _origin_field(field: str, text: TextConfig) -> str:
    """The field that says where a text comes from."""
    return field + {"file": ".path", "datasets": ".name"}.get(text.source, "")


def _overlap_message(config: RunConfig, field: str, pairs: list[tuple[int, int]], skip: int) -> str:
    length = min(WINDOW, config.data.sequence_length)
    named = ", ".join(f"{row + skip} (with {other})" for row, other in pairs[:_NAMED_ROWS])
    rest = f" and {len(pairs) - _NAMED_ROWS} more" if len(pairs) > _NAMED_ROWS else ""
    return (
        f"data.train: sequences of {text_origin(config.data.train)} share a passage of {length} tokens with those of "
        f"{field}, counted from 0: {named}{rest}; allowed: other text, or data.overlap: drop, which leaves them out"
    )


def _write_array(run_dir: RunDir, name: str, array: NDArray[Any]) -> None:
    with run_dir.replacing(name) as path, path.open("wb") as file:
        np.save(file, array)
