"""Rows of tokens from every source, and batches that resume and mix."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from archsearch.config import TextConfig
from archsearch.data.corpora import (
    Packed,
    load_text,
    load_tokens,
    packed_batches,
    training_batches,
)
from archsearch.data.sampling import Tokens, draw_tokens
from archsearch.errors import ConfigError
from archsearch.training.packing import document_bounds
from tests.random_models import random_teacher

from .tokenizers_for_tests import word_tokenizer

TOKENIZER = word_tokenizer()
ALPHABET = ["badger", "beaver", "bison", "camel", "cheetah", "cobra"]
IDS = [TOKENIZER.convert_tokens_to_ids(word) for word in ALPHABET]
END = TOKENIZER.eos_token_id


def _load(path: Path, sequences: int, length: int, *, skip: int = 0) -> Tokens:
    text = TextConfig(source="file", path=str(path))
    return load_tokens(text, TOKENIZER, None, sequences=sequences, length=length, seed=0, skip=skip)


def _write_jsonl(path: Path, documents: list[list[str]]) -> Path:
    lines = (json.dumps({"text": " ".join(words)}) for words in documents)
    path.write_text("\n".join(lines))
    return path


def test_load_tokens_packs_documents(tmp_path: Path) -> None:
    path = _write_jsonl(tmp_path / "a.jsonl", [ALPHABET[:3], ALPHABET[3:5], ALPHABET])
    rows = _load(path, 3, 4)
    stream = [*IDS[:3], END, *IDS[3:5], END, *IDS, END]
    assert rows.flatten().tolist() == stream[:12]
    assert rows.dtype == np.uint16
    assert _load(path, 1, 4, skip=2).tolist() == rows[2:].tolist()


def test_load_tokens_reads_plain_text_as_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("badger beaver\n\nbison\n")
    assert _load(path, 1, 3).tolist() == [IDS[:3]]


def test_load_tokens_does_not_read_further_than_needed(tmp_path: Path) -> None:
    path = _write_jsonl(tmp_path / "a.jsonl", [ALPHABET] * 200)
    with path.open("a") as file:
        file.write("\nnot JSON\n")
    assert _load(path, 4, 8).shape == (4, 8)


@pytest.mark.parametrize("name", ["a.jsonl", "a.npy"])
def test_load_tokens_says_how_much_there_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.npy":
        np.save(path, np.zeros((2, 8), dtype=np.uint16))
    else:
        _write_jsonl(path, [ALPHABET] * 2)
    with pytest.raises(ConfigError, match=r"holds [34] sequences of 4 tokens, 9 after the first 1"):
        _load(path, 9, 4, skip=1)
    with pytest.raises(ConfigError, match="holds 0 sequences"):
        _load(path, 1, 100)


def test_load_tokens_cuts_array_rows_in_pieces(tmp_path: Path) -> None:
    array = np.arange(3 * 10, dtype=np.int32).reshape(3, 10)
    np.save(tmp_path / "a.npy", array)
    rows = _load(tmp_path / "a.npy", 6, 4)
    assert rows.tolist() == [row[i : i + 4].tolist() for row in array for i in (0, 4)]
    assert rows.dtype == np.uint16
    assert _load(tmp_path / "a.npy", 2, 4, skip=3).tolist() == rows[3:5].tolist()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(8, dtype=np.uint16), "1 dimensions"),
        (np.zeros((2, 8), dtype=np.float32), "type float32"),
        (np.full((2, 8), 60_000, dtype=np.uint16), "token ids 60000 to 60000; the tokenizer has 0"),
        (np.full((2, 8), -1, dtype=np.int64), "token ids -1"),
    ],
)
def test_load_tokens_refuses_other_arrays(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ConfigError, match=message):
        _load(tmp_path / "a.npy", 1, 4)


def test_load_tokens_refuses_what_is_no_array(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"not an array")
    with pytest.raises(ConfigError, match=r"not an \.npy array"):
        _load(tmp_path / "a.npy", 1, 4)
    (tmp_path / "b.npy").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"not an \.npy array"):
        _load(tmp_path / "b.npy", 1, 4)


def test_load_tokens_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.txt"):
        _load(tmp_path / "none.txt", 1, 4)
    with pytest.raises(ConfigError, match="a folder"):
        _load(tmp_path, 1, 4)


def test_load_tokens_draws_from_the_teacher() -> None:
    teacher = random_teacher()
    text = TextConfig(source="teacher", temperature=0.5)
    rows = load_tokens(text, teacher.tokenizer, teacher, sequences=3, length=6, seed=4, batch=2)
    expected = draw_tokens(
        teacher.model, teacher.tokenizer, sequences=3, length=6, temperature=0.5, seed=4, batch=2
    )
    assert np.array_equal(rows, expected)
    with pytest.raises(ConfigError, match="no teacher"):
        load_tokens(text, teacher.tokenizer, None, sequences=3, length=6, seed=4)


TEXT = np.arange(20, dtype=np.uint16).reshape(10, 2)
RETRIEVAL = 100 + np.arange(6, dtype=np.uint32).reshape(3, 2)


def _take(count: int, **options: float) -> list[list[list[int]]]:
    arguments = {"batch_sequences": 4, "seed": 0, "niah_share": 0.3} | options
    batches = training_batches(TEXT, RETRIEVAL, **arguments)  # type: ignore[arg-type]
    return [batch.tolist() for batch in islice(batches, count)]


def test_training_batches_resume_at_any_step() -> None:
    batches = _take(12)
    assert batches == _take(12)
    for step in (1, 5, 11):
        assert batches[step:] == _take(12 - step, start_step=step)
    assert batches != _take(12, seed=1)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.3, 1.0])
def test_training_batches_mix_the_share(share: float) -> None:
    for count in (1, 7, 10):
        rows = [row for batch in _take(count, niah_share=share) for row in batch]
        assert len(rows) == 4 * count
        assert sum(row[0] >= 100 for row in rows) == int(4 * count * share + 1e-9)


def test_training_batches_go_through_all_rows_each_epoch() -> None:
    rows = [
        row
        for batch in islice(training_batches(TEXT, batch_sequences=5, seed=0), 4)
        for row in batch
    ]
    first, second = ([int(row[0]) for row in half] for half in (rows[:10], rows[10:]))
    assert sorted(first) == sorted(second) == TEXT[:, 0].tolist()
    assert first != second


def test_training_batches_are_int64() -> None:
    batch = next(training_batches(TEXT, batch_sequences=3, seed=0))
    assert batch.dtype == torch.int64
    assert batch.shape == (3, 2)


@pytest.mark.parametrize(
    ("text", "retrieval", "share"),
    [(TEXT, None, 0.1), (TEXT[:0], RETRIEVAL, 0.5), (TEXT, RETRIEVAL[:, :1], 0.5)],
)
def test_training_batches_refuse_pools_that_do_not_fit(
    text: np.ndarray, retrieval: np.ndarray | None, share: float
) -> None:
    with pytest.raises(ValueError, match="rows"):
        training_batches(text, retrieval, niah_share=share, batch_sequences=2, seed=0)


def test_load_text_says_where_documents_start(tmp_path: Path) -> None:
    path = _write_jsonl(tmp_path / "a.jsonl", [ALPHABET[:3], ALPHABET[3:5], ALPHABET])
    text = TextConfig(source="file", path=str(path))
    options = {"length": 4, "seed": 0}
    packed = load_text(text, TOKENIZER, None, sequences=3, **options)
    assert packed.starts is not None
    stream = [*IDS[:3], END, *IDS[3:5], END, *IDS, END]
    assert packed.rows.flatten().tolist() == stream[:12]
    assert np.flatnonzero(packed.starts.flatten()).tolist() == [0, 4, 7]
    later = load_text(text, TOKENIZER, None, sequences=1, skip=1, **options)
    assert later.starts is not None
    assert later.starts.tolist() == packed.starts[1:2].tolist()


def test_load_text_knows_no_documents_in_plain_text_arrays_and_drawn_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("badger beaver bison\n")
    np.save(tmp_path / "a.npy", np.zeros((1, 3), dtype=np.uint16))
    for name in ("a.txt", "a.npy"):
        text = TextConfig(source="file", path=str(tmp_path / name))
        assert load_text(text, TOKENIZER, None, sequences=1, length=3, seed=0).starts is None
    teacher = random_teacher()
    drawn = load_text(TextConfig(), teacher.tokenizer, teacher, sequences=1, length=3, seed=0)
    assert drawn.starts is None


STARTS = np.random.default_rng(0).random(TEXT.shape) < 0.5


def _take_packed(count: int, **options: float) -> list[tuple[list[list[int]], list[list[bool]]]]:
    arguments = {"batch_sequences": 4, "seed": 0, "niah_share": 0.3} | options
    batches = packed_batches(Packed(TEXT, STARTS), Packed(RETRIEVAL), **arguments)  # type: ignore[arg-type]
    return [(b.input_ids.tolist(), b.starts.tolist()) for b in islice(batches, count)]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_packed_batches_are_the_training_batches_with_their_starts(share: float) -> None:
    found = _take_packed(12, niah_share=share)
    assert [ids for ids, _ in found] == _take(12, niah_share=share)
    assert found[5:] == _take_packed(7, niah_share=share, start_step=5)
    known = {tuple(row): starts for row, starts in zip(TEXT.tolist(), STARTS.tolist(), strict=True)}
    for ids, starts in found:
        for row, begins in zip(ids, starts, strict=True):
            inside = known.get(tuple(row), [False] * len(row))
            # A row begins something, whatever it holds.
            assert begins == [True, *inside[1:]]


def test_packed_batches_need_no_starts_and_no_prompts() -> None:
    batch = next(packed_batches(Packed(TEXT), batch_sequences=3, seed=0))
    assert torch.equal(batch.input_ids, next(training_batches(TEXT, batch_sequences=3, seed=0)))
    assert batch.starts.tolist() == [[True, False]] * 3
    with pytest.raises(ValueError, match="rows"):
        packed_batches(Packed(TEXT[:0]), batch_sequences=2, seed=0)


def test_bounds_of_packed_documents_cut_their_rows() -> None:
    batches = packed_batches(Packed(TEXT, STARTS), batch_sequences=5, seed=0)
    for batch in islice(batches, 4):
        bounds = document_bounds(batch.starts)
        assert bounds.dtype == torch.int32
        parts = [batch.input_ids.flatten()[a:b] for a, b in pairwise(bounds)]
        assert torch.equal(torch.cat(parts), batch.input_ids.flatten())
        assert all(len(part) > 0 for part in parts)
        assert len(parts) == int(batch.starts.sum())
