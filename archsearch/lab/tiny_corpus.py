"""Training rows for the tiny teacher: generated filler with needles, and questions about them.

Three kinds of rows, so that recall is asked for often enough to be learnt in minutes: documents (filler
hides needles, questions follow), recitals (the same needles said again and again) and plain filler.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from archsearch.data.lexicon import haystack_sentences
from archsearch.data.niah import KEYS, needle, question, vocabulary

Row = tuple[list[int], list[float]]
"""Token ids and the loss weight of each."""

DIGITS = 4
SPARE_WORDS = ("A", "An", "In", "on")
"""Words of the shipped teacher's vocabulary that the generator does not use at present."""
RECALL_WEIGHT = 8.0
"""Loss weight of a value that the row has already given; other tokens weigh 1."""
FIRST_VALUE_WEIGHT = 0.1
"""Loss weight of a value at its first mention, which nothing predicts."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer of the generator's vocabulary; numbers are split into pairs of digits."""
    numbers = [str(digit) for digit in range(10)] + [f"{pair:02d}" for pair in range(100)]
    words = ["<pad>", "<bos>", "<unk>", *sorted({*vocabulary(), *SPARE_WORDS}), *numbers]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = Sequence(
        [
            Split(Regex(r"\s+"), "removed"),
            Split(Regex(r"[A-Za-z]+|[0-9]{1,2}|[^A-Za-z0-9\s]"), "isolated"),
        ]
    )
    core.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", words.index("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<bos>",
        unk_token="<unk>",
    )


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of (ids [B, T], loss weights [B, T]), endless; every worker draws its own stream.

    lengths are tried by turns; each batch holds batch_tokens tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        lengths: tuple[int, ...],
        batch_tokens: int,
        seed: int,
    ) -> None:
        self.tokenizer, self.lengths, self.batch_tokens, self.seed = (
            tokenizer,
            lengths,
            batch_tokens,
            seed,
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = torch.utils.data.get_worker_info()
        rng = Random(f"rows/{self.seed}/{info.id if info else 0}")
        writer = _Writer(self.tokenizer, rng)
        while True:
            length = rng.choice(self.lengths)
            rows = [writer.row(length) for _ in range(self.batch_tokens // length)]
            ids = torch.from_numpy(np.array([ids for ids, _ in rows], dtype=np.int64))
            weights = torch.from_numpy(np.array([w for _, w in rows], dtype=np.float32))
            yield ids, weights


class _Writer:
    """Composes rows from sentences that are tokenised once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: Random) -> None:
        self.rng = rng
        self.bos = int(tokenizer.bos_token_id)
        self._tokenizer = tokenizer
        self.filler = [self.encode(text) for text in islice(haystack_sentences(rng), 20_000)]
        self.needles = {key: self.encode(needle(key, "1122")) for key in KEYS}
        self.questions = {key: self.encode(question(key)) for key in KEYS}
        self.pairs = [self.encode(f"{pair:02d}")[0] for pair in range(100)]
        self.stop = self.encode(".")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, no BOS."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def row(self, length: int) -> Row:
        """One row of exactly length tokens."""
        draw = self.rng.random()
        if draw < 0.55:
            ids, weights = self._document(length)
        elif draw < 0.85:
            ids, weights = self._recital(length)
        else:
            ids, weights = [], []
        while len(ids) < length - 1:
            self._add(ids, weights, self._story(1)[0], 1.0)
        return [self.bos, *ids[: length - 1]], [1.0, *weights[: length - 1]]

    def _value(self) -> list[int]:
        return [self.pairs[self.rng.randrange(10, 100)], self.pairs[self.rng.randrange(100)]]

    def _story(self, count: int) -> list[list[int]]:
        start = self.rng.randrange(len(self.filler) - count)
        return self.filler[start : start + count]

    @staticmethod
    def _add(ids: list[int], weights: list[float], part: list[int], weight: float) -> None:
        ids += part
        weights += [weight] * len(part)

    def _statement(
        self, ids: list[int], weights: list[float], key: str, value: list[int], weight: float
    ) -> None:
        """The needle about key: all but its placeholder value and full stop, then the real ones."""
        self._add(ids, weights, self.needles[key][:-3], 1.0)
        self._add(ids, weights, value, weight)
        self._add(ids, weights, self.stop, 1.0)

    def _document(self, length: int) -> Row:
        """Filler that hides needles, then questions, about as long as the row."""
        rng = self.rng
        most = max(1, min(32, (length - 40) // 40))
        keys = rng.sample(KEYS, rng.randint(1, most))
        values = {key: self._value() for key in keys}
        asked = rng.sample(keys, rng.randint(1, len(keys)))
        budget = length - 2 - 11 * len(keys) - 27 * len(asked)
        sentences: list[list[int] | str] = []
        for sentence in self._story(max(1, length // 6)):
            if len(sentence) > budget:
                break
            sentences.append(sentence)
            budget -= len(sentence)
        for key in keys:
            sentences.insert(rng.randint(0, len(sentences)), key)
        ids: list[int] = []
        weights: list[float] = []
        for part in sentences:
            if isinstance(part, str):
                self._statement(ids, weights, part, values[part], FIRST_VALUE_WEIGHT)
            else:
                self._add(ids, weights, part, 1.0)
        for key in asked:
            self._add(ids, weights, self.questions[key], 0.2)
            self._add(ids, weights, values[key], RECALL_WEIGHT)
            self._add(ids, weights, self.stop, 1.0)
        return ids, weights

    def _recital(self, length: int) -> Row:
        """Needles said over and over in random order, with a sentence of filler now and then."""
        rng = self.rng
        keys = rng.sample(KEYS, rng.randint(2, 40))
        values: dict[str, list[int]] = {}
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            key = rng.choice(keys)
            weight = RECALL_WEIGHT if key in values else FIRST_VALUE_WEIGHT
            self._statement(ids, weights, key, values.setdefault(key, self._value()), weight)
            if rng.random() < 0.3:
                self._add(ids, weights, self._story(1)[0], 1.0)
        return ids, weights


def filler_rows(
    tokenizer: PreTrainedTokenizerFast, count: int, length: int, seed: int
) -> NDArray[np.int64]:
    """Plain filler rows [count, length] after BOS, for a held-out perplexity."""
    writer = _Writer(tokenizer, Random(f"filler/{seed}"))
    rows = np.empty((count, length), dtype=np.int64)
    for index in range(count):
        ids = [writer.bos]
        for sentence in writer._story(length // 3):
            ids += sentence
        rows[index] = ids[:length]
    return rows
