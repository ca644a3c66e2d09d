"""Token sequences from a corpus or from the teacher, and the batches of training.

Shapes: N sequences, T tokens each, M retrieval rows, B sequences a batch, D documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..config import TextConfig
from ..errors import ConfigError
from ..models.sources import resolve_path
from ..progress import Progress, ignore_progress
from .documents import Corpus, open_corpus
from .sampling import Tokens, draw_tokens, token_dtype

if TYPE_CHECKING:
    from ..models.teacher import Teacher

_TEXTS_AT_ONCE = 64


class Packed(NamedTuple):
    """Rows of tokens, and where documents begin in them."""

    rows: NDArray[Any]
    """Token ids [N, T]."""
    starts: NDArray[np.bool_] | None = None
    """[N, T]: the first token of each document. None where the source has no documents: each row is one."""


class PackedBatch(NamedTuple):
    """Rows of a training step, and where documents begin in them."""

    input_ids: Tensor
    """[B, T] int64."""
    starts: Tensor
    """[B, T] bool: the first token of each document and of each row."""


def load_tokens(
    text: TextConfig,
    tokenizer: PreTrainedTokenizerBase,
    teacher: Teacher | None,
    *,
    sequences: int,
    length: int,
    seed: int,
    skip: int = 0,
    batch: int | None = None,
    progress: Progress = ignore_progress,
) -> Tokens:
    """Gives token ids [sequences, length] from where text says.

    A corpus is read in its order and only as far as needed: its documents, joined by the end-of-text
    token, are cut into rows without padding. skip leaves out that many rows at its beginning, so that
    two uses of one corpus need not overlap. seed and batch matter only for text drawn from the teacher.
    Raises ConfigError where a corpus is malformed, too short or a file that is not there, EnvironmentFault where a
    data set cannot be found or needs a package that is not installed.
    """
    return load_text(
        text,
        tokenizer,
        teacher,
        sequences=sequences,
        length=length,
        seed=seed,
        skip=skip,
        batch=batch,
        progress=progress,
    ).rows


def load_text(
    text: TextConfig,
    tokenizer: PreTrainedTokenizerBase,
    teacher: Teacher | None,
    *,
    sequences: int,
    length: int,
    seed: int,
    skip: int = 0,
    batch: int | None = None,
    progress: Progress = ignore_progress,
) -> Packed:
    """As load_tokens, with the starts of documents for a source that has such: JSONL, Parquet, data sets, docstrings."""
    if text.source == "teacher":
        if teacher is None:
            raise ConfigError("text source teacher: no teacher is loaded")
        drawn = draw_tokens(
            teacher.model,
            tokenizer,
            sequences=sequences,
            length=length,
            temperature=text.temperature,
            seed=seed,
            batch=batch,
            progress=progress,
        )
        return Packed(drawn)
    path = resolve_path(str(text.path)) if text.source == "file" else None
    if path is not None and path.is_dir():
        raise ConfigError(f"text path {path}: a folder; it needs a file")
    if path is not None and path.suffix == ".npy":
        return Packed(_array_rows(path, tokenizer, sequences, length, skip))
    corpus = open_corpus(text, path)
    return _packed_rows(corpus, tokenizer, sequences, length, skip, progress=progress)


def training_batches(
    tokens: NDArray[Any],
    retrieval: NDArray[Any] | None = None,
    *,
    niah_share: float = 0.0,
    batch_sequences: int,
    seed: int,
    start_step: int = 0,
) -> Iterator[Tensor]:
    """Gives int64 batches [B, T] without end; batch i depends on i and the arguments before start_step.

    niah_share of the rows come from retrieval [M, T], the others from tokens [N, T]; each pool is gone
    through in a new random order an epoch. start_step is the first batch given, as after a resume.
    Raises ValueError where rows of the two pools differ in length or a pool that is needed is empty.
    """
    if retrieval is None:
        retrieval = tokens[:0]
    if retrieval.shape[1:] != tokens.shape[1:]:
        raise ValueError(f"rows differ in shape: {retrieval.shape[1:]} and {tokens.shape[1:]}")
    if (niah_share > 0 and not len(retrieval)) or (niah_share < 1 and not len(tokens)):
        raise ValueError(
            f"a niah_share of {niah_share} cannot be had from {len(tokens)} rows of text and "
            f"{len(retrieval)} of retrieval"
        )
    pools = (_Pool(tokens, (seed, 0)), _Pool(retrieval, (seed, 1)))
    return (
        torch.from_numpy(np.stack(rows).astype(np.int64))
        for rows in _batches(pools, niah_share, batch_sequences, start_step)
    )


def packed_batches(
    text: Packed,
    retrieval: Packed | None = None,
    *,
    niah_share: float = 0.0,
    batch_sequences: int,
    seed: int,
    start_step: int = 0,
) -> Iterator[PackedBatch]:
    """As training_batches, the same rows, with the starts of documents for a trainer that resets at them."""
    parts = (text, Packed(text.rows[:0]) if retrieval is None else retrieval)
    places = [np.arange(len(part.rows))[:, None] for part in parts]
    # Checks the pools, as training_batches does, and draws numbers of rows instead of rows.
    training_batches(
        parts[0].rows,
        parts[1].rows,
        niah_share=niah_share,
        batch_sequences=batch_sequences,
        seed=seed,
    )
    pools = (_Pool(places[0], (seed, 0)), _Pool(places[1] + len(places[0]), (seed, 1)))
    return (
        _packed(parts, [int(place[0]) for place in chosen])
        for chosen in _batches(pools, niah_share, batch_sequences, start_step)
    )


def _packed(parts: tuple[Packed, Packed], numbers: list[int]) -> PackedBatch:
    """The rows of those numbers, which count through both parts."""
    ids, starts = [], []
    for number in numbers:
        second = number >= len(parts[0].rows)
        part, row = parts[second], number - second * len(parts[0].rows)
        ids.append(part.rows[row].astype(np.int64))
        begins = (
            np.zeros(len(ids[-1]), dtype=np.bool_)
            if part.starts is None
            else part.starts[row].copy()
        )
        begins[:1] = True
        starts.append(begins)
    return PackedBatch(torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(starts)))


def _batches(
    pools: tuple[_Pool, _Pool], niah_share: float, batch_sequences: int, step: int
) -> Iterator[list[NDArray[Any]]]:
    text, retrieval = pools
    while True:
        # Retrieval rows before this batch and after it: what is no whole row is made up for later.
        before, after = (int(end * batch_sequences * niah_share + 1e-9) for end in (step, step + 1))
        rows = text.take(step * batch_sequences - before, batch_sequences - (after - before))
        rows += retrieval.take(before, after - before)
        yield rows
        step += 1


class _Pool:
    """Rows in an endless sequence of random orders, addressed by their place in that sequence."""

    def __init__(self, rows: NDArray[Any], key: tuple[int, int]) -> None:
        self.rows = rows
        self.key = key
        self.epoch = -1
        self.order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def take(self, start: int, count: int) -> list[NDArray[Any]]:
        """The rows at places start up to, not including, start + count."""
        return [self._row(place) for place in range(start, start + count)]

    def _row(self, place: int) -> NDArray[Any]:
        epoch, index = divmod(place, len(self.rows))
        if epoch != self.epoch:
            rng = np.random.default_rng([*self.key, epoch])
            self.epoch, self.order = epoch, rng.permutation(len(self.rows))
        row: NDArray[Any] = self.rows[self.order[index]]
        return row


def _array_rows(
    path: Path, tokenizer: PreTrainedTokenizerBase, sequences: int, length: int, skip: int
) -> Tokens:
    """Rows [sequences, length] of an array of token ids, whose longer rows are cut in pieces."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(f"text path {path}: not an .npy array ({error})") from error
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"text path {path}: an array of {array.ndim} dimensions and type {array.dtype}; "
            "it needs token ids [sequences, tokens]"
        )
    pieces = array.shape[1] // length
    if array.shape[0] * pieces < skip + sequences:
        raise _too_short(f"text path {path}", array.shape[0] * pieces, skip, sequences, length)
    first, last = skip // pieces, -(-(skip + sequences) // pieces)
    cut = np.asarray(array[first:last, : pieces * length]).reshape(-1, length)
    rows = cut[skip - first * pieces :][:sequences]
    vocab_size = len(tokenizer)
    if int(rows.min()) < 0 or int(rows.max()) >= vocab_size:
        raise ConfigError(
            f"text path {path}: token ids {rows.min()} to {rows.max()}; "
            f"the tokenizer has 0 to {vocab_size - 1}"
        )
    return rows.astype(token_dtype(vocab_size))


def _packed_rows(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    sequences: int,
    length: int,
    skip: int,
    *,
    progress: Progress,
) -> Packed:
    """Rows [sequences, length] of the corpus's tokens in one stream; progress counts tokens."""
    needed = (skip + sequences) * length
    packed = np.empty(needed, dtype=token_dtype(len(tokenizer)))
    starts = np.zeros(needed, dtype=np.bool_)
    token = end_of_text(tokenizer) if corpus.separate else None
    end = [] if token is None else [token]
    texts = iter(corpus.texts)
    filled = 0
    while filled < needed:
        some = list(islice(texts, _TEXTS_AT_ONCE))
        if not some:
            raise _too_short(corpus.name, filled // length, skip, sequences, length)
        for ids in tokenizer(some, add_special_tokens=False)["input_ids"]:
            part = (ids + end)[: needed - filled]
            packed[filled : filled + len(part)] = part
            starts[filled : filled + min(1, len(part))] = True
            filled += len(part)
        progress(filled, needed)
    rows = packed.reshape(-1, length)[skip:]
    return Packed(rows, starts.reshape(-1, length)[skip:] if corpus.separate else None)


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token between documents: EOS, else BOS, else none."""
    candidates = (tokenizer.eos_token_id, tokenizer.bos_token_id)
    return next((int(token) for token in candidates if token is not None), None)


def _too_short(name: str, available: int, skip: int, sequences: int, length: int) -> ConfigError:
    beyond = f" after the first {skip}" if skip else ""
    return ConfigError(
        f"{name}: holds {available} sequences of {length} tokens, {sequences}{beyond} are needed; "
        "give more text, or lower the tokens or the sequence length"
    )
