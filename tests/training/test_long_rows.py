"""Rows to tune on: text end to end and prompts, in what order, where documents begin, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archsearch.config import RunConfig
from archsearch.data.corpora import Packed, PackedBatch
from archsearch.errors import ConfigError
from archsearch.models.teacher import byte_tokenizer
from archsearch.training.long_rows import LONG_ROWS, long_batches, long_text

LENGTH = 400
TOKENIZER = byte_tokenizer()


def config_of(niah_share: float = 0.5, **long: Any) -> RunConfig:
    sections = {
        "schema": 1,
        "name": "check",
        "teacher": {"source": "none"},
        "data": {"niah_share": niah_share},
        "probes": {"multi_keys": 2, "digits": 2},
        "long_context": {
            "tokens": 10 * LENGTH,
            "sequence_length": LENGTH,
            "batch_tokens": 2 * LENGTH,
            **long,
        },
    }
    return RunConfig.model_validate(sections)


@dataclass(frozen=True)
class Text:
    packed: Packed
    rows: list[list[int]]
    """As they are tuned on."""


@pytest.fixture
def text() -> Text:
    draw = np.random.default_rng(0)
    letters = TOKENIZER("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)["input_ids"]
    ids = draw.choice(letters, (24, 96)).astype(np.uint16)
    rows = ids.reshape(-1)[: 5 * LENGTH].reshape(5, LENGTH)
    return Text(Packed(ids, draw.random((24, 96)) < 0.05), rows.tolist())


def test_rows_are_text_end_to_end_and_prompts_of_that_length(text: Text, tmp_path: Path) -> None:
    source = long_batches(config_of(), TOKENIZER, text.packed, tmp_path)
    batches = list(islice(source(0), 5))
    assert {tuple(batch.shape) for batch in batches} == {(2, LENGTH)}
    rows = [row.tolist() for batch in batches for row in batch]
    (kept,) = tmp_path.glob(f"{LONG_ROWS}-*.npy")
    prompts = np.load(kept).tolist()
    assert len(prompts) == 5
    # Every prompt and every row of text once: the share is a half.
    assert sorted(row for row in rows if row in prompts) == sorted(prompts)
    assert sorted(row for row in rows if row in text.rows) == sorted(text.rows)
    assert next(source(3)).equal(batches[3])


def test_kept_prompts_are_not_drawn_again(text: Text, tmp_path: Path) -> None:
    first = next(long_batches(config_of(), TOKENIZER, text.packed, tmp_path)(0))
    (kept,) = tmp_path.glob(f"{LONG_ROWS}-*.npy")
    np.save(kept, np.load(kept) * 0)
    again = next(long_batches(config_of(), TOKENIZER, text.packed, tmp_path)(0))
    assert sum(row.any() for row in first.numpy()) == 2
    assert sum(row.any() for row in again.numpy()) == 1
    assert next(long_batches(config_of(), TOKENIZER, text.packed)(0)).equal(first)


def test_needles_may_lie_in_the_text(text: Text) -> None:
    data = config_of().data.model_copy(update={"niah_text_share": 1.0})
    config = config_of().model_copy(update={"data": data})
    shared = []
    for found in (config_of(), config):
        rows = [
            row.tolist()
            for b in islice(long_batches(found, TOKENIZER, text.packed)(0), 5)
            for row in b
        ]
        prompts = [row for row in rows if row not in text.rows]
        assert len(prompts) == 5
        passages = {tuple(row[i : i + 12]) for row in text.rows for i in range(LENGTH - 12)}
        shared.append(
            sum(
                any(tuple(row[i : i + 12]) in passages for i in range(LENGTH - 12))
                for row in prompts
            )
        )
    assert shared == [0, 5]


def test_without_prompts_all_is_text(text: Text) -> None:
    batches = islice(long_batches(config_of(0.0), TOKENIZER, text.packed)(0), 5)
    assert all(row in text.rows for batch in batches for row in batch.tolist())


def test_packed_rows_tell_where_documents_begin(text: Text) -> None:
    marks = {
        tuple(row): starts.tolist()
        for row, starts in zip(text.rows, long_text(text.packed, LENGTH).starts, strict=True)
    }
    assert any(sum(row) > 1 for row in marks.values())
    plain = islice(long_batches(config_of(), TOKENIZER, text.packed)(0), 5)
    packed = list(islice(long_batches(config_of(packed=True), TOKENIZER, text.packed)(0), 5))
    for ids, batch in zip(plain, packed, strict=True):
        assert isinstance(batch, PackedBatch)
        assert batch.input_ids.equal(ids)
        for row, starts in zip(ids.tolist(), batch.starts.tolist(), strict=True):
            assert starts == [True, *marks.get(tuple(row), [False] * LENGTH)[1:]]
    # Text without marks: the end-of-text token is all there is.
    unmarked = long_batches(config_of(packed=True), TOKENIZER, Packed(text.packed.rows))(0)
    assert next(unmarked).equal(packed[0].input_ids)


def test_text_shorter_than_a_row_is_refused(text: Text) -> None:
    short = Packed(text.packed.rows[:4])
    with pytest.raises(ConfigError, match=r"sequence_length: 400 is more than the 384 tokens"):
        long_batches(config_of(), TOKENIZER, short)
    prompts = long_batches(config_of(1.0), TOKENIZER, short)
    assert next(prompts(0)).shape == (2, LENGTH)
