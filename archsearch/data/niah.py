"""Probes as pairs of token ids, their batches, and training rows of needle-in-a-haystack prompts.

A probe is a pair, as in HydraHead (arXiv 2606.20097): the clean prompt is followed by an answer, the
corrupt one, of as many tokens, calls for another, the distractor. What the prompts say lies in scenes.py
(retrieval) and general.py; tasks.py draws probes of every kind.

Shapes: N probes or rows, T tokens, A answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..progress import Progress, ignore_progress
from .lexicon import haystack_sentences
from .prompts import (
    KEYS,
    compose,
    compose_in_text,
    draw_script,
    encode,
    fewer_questions,
    needle,
    question,
    vocabulary,
)

__all__ = [
    "KEYS",
    "Misaligned",
    "Pair",
    "Probe",
    "ProbeBatch",
    "align",
    "haystack_sentences",
    "needle",
    "question",
    "retrieval_rows",
    "stack",
    "vocabulary",
]


class Pair(NamedTuple):
    """The texts of a probe: the model is given clean + answer, whose distractor is what corrupt calls for."""

    clean: str
    corrupt: str
    answer: str
    """With the space before it, if there is one."""
    distractor: str
    cut: bool = False
    """Whether to keep no more tokens of the longer answer than the shorter has: the first that differs decides."""


@dataclass(frozen=True)
class Probe:
    """One clean and corrupt pair, as token ids; the model is given prompt + answer.

    prompt and corrupt_prompt have equal length, answer and distractor too. answer starts at the first
    token in which the two values differ, so that a tokenizer's lone space stays in the prompt. Probes from a file of
    answers have no corrupt prompt and no distractor: both are empty.
    """

    kind: str
    context: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    corrupt_prompt: tuple[int, ...]
    distractor: tuple[int, ...]
    group: str = ""
    """What tells it from others of its kind, where a file has several sorts."""

    @property
    def clean_row(self) -> tuple[int, ...]:
        """The clean prompt and all of its answer but the last token, which predicts nothing that is asked."""
        return self.prompt + self.answer[:-1]

    @property
    def corrupt_row(self) -> tuple[int, ...]:
        """The corrupt prompt, followed as the clean one is."""
        return self.corrupt_prompt + self.answer[:-1]


class ProbeBatch(NamedTuple):
    """Probes as padded rows, on the CPU."""

    input_ids: Tensor
    """[N, T] int64: prompt + answer, with 0 as padding."""
    mask: Tensor
    """[N, T] int64: 1 at real tokens."""
    positions: Tensor
    """[N, A] int64: the column whose logits predict answer token j; -1 after a shorter answer's end."""


class Misaligned(ValueError):
    """A tokenizer gives the texts of a pair tokens that do not line up; field is the text to blame."""

    def __init__(self, field: str, problem: str) -> None:
        self.field, self.problem = field, problem
        super().__init__(f"{field}: {problem}")


def align(
    tokenizer: PreTrainedTokenizerBase, pair: Pair, kind: str, context: int | None = None
) -> Probe:
    """The pair as tokens; context is its own length where not given. Raises Misaligned where lengths differ."""
    clean = encode(tokenizer, pair.clean + pair.answer)
    other = encode(tokenizer, pair.clean + pair.distractor)
    corrupt = encode(tokenizer, pair.corrupt + pair.answer)
    start = next((i for i, (a, b) in enumerate(zip(clean, other, strict=False)) if a != b), None)
    if clean == other:
        raise Misaligned("distractor", f"the same tokens as the answer, {pair.answer!r}")
    if start is None or (len(other) != len(clean) and not pair.cut):
        bare = len(encode(tokenizer, pair.clean))
        sizes = f"{len(other) - bare} tokens, {pair.distractor!r}; answer has {len(clean) - bare}, "
        raise Misaligned("distractor", sizes + repr(pair.answer))
    if len(corrupt) != len(clean):
        sizes = f"{len(corrupt)} tokens with the answer; clean has {len(clean)}"
        raise Misaligned("corrupt", sizes)
    if clean[start:] != corrupt[start:]:
        raise Misaligned("corrupt", f"other tokens for {pair.answer!r} than clean")
    if clean == corrupt:
        raise Misaligned("corrupt", "the same tokens as clean")
    end = min(len(clean), len(other))
    return Probe(
        kind,
        end if context is None else context,
        prompt=tuple(clean[:start]),
        answer=tuple(clean[start:end]),
        corrupt_prompt=tuple(corrupt[:start]),
        distractor=tuple(other[start:end]),
    )


def retrieval_rows(
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    length: int,
    *,
    keys: int,
    digits: int,
    seed: int,
    text_NT: NDArray[Any] | None = None,
    text_share: float = 0.0,
    progress: Progress = ignore_progress,
) -> NDArray[np.uint32]:
    """Draws training rows [count, length]: single and multi-key prompts by turns, answers included.

    A multi-key row asks for its keys in random order, as many as fit, so that it teaches more than one
    answer. About text_share of the rows hide their needles in a row of text_NT each, of length tokens or more; the
    others in generated sentences. No row repeats a probe, whatever the seeds. Raises ConfigError where length is too
    short.
    """
    rows = np.empty((count, length), dtype=np.uint32)
    for index in range(count):
        rng = Random(f"row/{length}/{keys}/{digits}/{seed}/{index}")
        num_keys = keys if index % 2 else 1
        script = draw_script(rng, num_keys, digits, rng.random())
        script = replace(script, asked=tuple(rng.sample(list(script.values), num_keys)))
        script = fewer_questions(tokenizer, script, length)
        # A stream of its own, so that the rows without text are those of a run without any.
        place = Random(f"place/{seed}/{index}")
        if text_NT is not None and len(text_NT) and place.random() < text_share:
            ids = text_NT[place.randrange(len(text_NT))].tolist()
            prompt = compose_in_text(tokenizer, rng, script.scene(), length, ids)
        else:
            prompt = compose(tokenizer, rng, script.scene(), length)
        # Filler again, so that the row is full to its last token.
        tail = " ".join(islice(haystack_sentences(rng), 16))
        ids = encode(tokenizer, f"{prompt} {script.values[script.asked[-1]]}.\n\n{tail}")
        rows[index] = ids[:length]
        progress(index + 1, count)
    return rows


def stack(probes: Sequence[Probe], *, corrupt: bool = False, right: bool = False) -> ProbeBatch:
    """Stacks prompt + answer, or corrupt_prompt + answer, of probes as rows padded on the left, or on the right."""
    prompts = [probe.corrupt_prompt if corrupt else probe.prompt for probe in probes]
    rows = [prompt + probe.answer for prompt, probe in zip(prompts, probes, strict=True)]
    width = max(map(len, rows), default=0)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    longest = max((len(probe.answer) for probe in probes), default=0)
    positions = torch.full((len(rows), longest), -1, dtype=torch.long)
    for index, (row, probe) in enumerate(zip(rows, probes, strict=True)):
        end = len(row) if right else width
        input_ids[index, end - len(row) : end] = torch.tensor(row)
        mask[index, end - len(row) : end] = 1
        size = len(probe.answer)
        positions[index, :size] = torch.arange(end - size - 1, end - 1)
    return ProbeBatch(input_ids, mask, positions)
