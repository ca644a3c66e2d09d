"""Needle-in-a-haystack probes after RULER's single- and multi-key tasks, for any tokenizer.

Generated filler hides one or more needles, `The special magic number for KEY is VALUE.`; the prompt
ends by asking for one key and with the words before its value, so that the answer is the value alone.
Each probe is a pair, as in HydraHead (arXiv 2606.20097): in the corrupt prompt the asked needle has
another value, the distractor, and nothing else differs.

Shapes: N probes or rows, T tokens, A answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from ..progress import Progress, ignore_progress
from .lexicon import haystack_sentences
from .prompts import (
    KEYS,
    Script,
    compose,
    draw_distractor,
    draw_script,
    encode,
    fewer_questions,
    needle,
    question,
    vocabulary,
)

__all__ = [
    "KEYS",
    "KINDS",
    "Probe",
    "ProbeBatch",
    "haystack_sentences",
    "make_probes",
    "needle",
    "question",
    "retrieval_rows",
    "stack",
    "vocabulary",
]

KINDS = ("single", "multikey")

_DRAWS = 50
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Probe:
    """One clean and corrupt pair, as token ids; the model is given prompt + answer.

    prompt and corrupt_prompt have equal length, answer and distractor too. answer starts at the first
    token in which the two values differ, so that a tokenizer's lone space stays in the prompt.
    """

    kind: str
    context: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    corrupt_prompt: tuple[int, ...]
    distractor: tuple[int, ...]


class ProbeBatch(NamedTuple):
    """Probes as left-padded rows, on the CPU."""

    input_ids: Tensor
    """[N, T] int64: prompt + answer, with 0 as padding."""
    mask: Tensor
    """[N, T] int64: 1 at real tokens."""
    positions: Tensor
    """[N, A] int64: the column whose logits predict answer token j; -1 after a shorter answer's end."""


def make_probes(
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    count: int,
    context: int,
    *,
    keys: int,
    digits: int,
    seed: int,
) -> list[Probe]:
    """Draws count probes whose prompt + answer takes context tokens, or a few less.

    kind "single" hides one needle whatever keys says, "multikey" hides needles of that many keys. Probe i
    does not depend on count; the depths of the asked needles are spread evenly over any run of probes.
    Raises ConfigError where context is too short or the tokenizer cannot tell numbers apart.
    """
    num_keys = _num_keys(kind, keys)
    probes: list[Probe] = []
    for index in range(count):
        rng = Random(f"probe/{kind}/{context}/{num_keys}/{digits}/{seed}/{index}")
        depth = (Random(f"depth/{kind}/{seed}").random() + index * _GOLDEN) % 1.0
        for _ in range(_DRAWS):
            script = draw_script(rng, num_keys, digits, depth)
            probe = _pair(tokenizer, rng, script, kind, context)
            if probe is not None:
                probes.append(probe)
                break
        else:
            raise ConfigError(
                f"probes.digits: with this tokenizer, {_DRAWS} draws gave no two numbers of {digits} "
                "digits whose tokens differ and are equally many; try fewer digits"
            )
    return probes


def retrieval_rows(
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    length: int,
    *,
    keys: int,
    digits: int,
    seed: int,
    progress: Progress = ignore_progress,
) -> NDArray[np.uint32]:
    """Draws training rows [count, length]: single and multi-key prompts by turns, answers included.

    A multi-key row asks for its keys in random order, as many as fit, so that it teaches more than one
    answer. No row repeats a probe, whatever the seeds. Raises ConfigError where length is too short.
    """
    rows = np.empty((count, length), dtype=np.uint32)
    for index in range(count):
        rng = Random(f"row/{length}/{keys}/{digits}/{seed}/{index}")
        num_keys = _num_keys(KINDS[index % 2], keys)
        script = draw_script(rng, num_keys, digits, rng.random())
        script = replace(script, asked=tuple(rng.sample(list(script.values), num_keys)))
        script = fewer_questions(tokenizer, script, length)
        prompt = compose(tokenizer, rng, script, length)
        # Filler again, so that the row is full to its last token.
        tail = " ".join(islice(haystack_sentences(rng), 16))
        ids = encode(tokenizer, f"{prompt} {script.values[script.asked[-1]]}.\n\n{tail}")
        rows[index] = ids[:length]
        progress(index + 1, count)
    return rows


def stack(probes: Sequence[Probe], *, corrupt: bool = False) -> ProbeBatch:
    """Stacks prompt + answer, or corrupt_prompt + answer, of probes as left-padded rows."""
    prompts = [probe.corrupt_prompt if corrupt else probe.prompt for probe in probes]
    rows = [prompt + probe.answer for prompt, probe in zip(prompts, probes, strict=True)]
    width = max(map(len, rows), default=0)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    longest = max((len(probe.answer) for probe in probes), default=0)
    positions = torch.full((len(rows), longest), -1, dtype=torch.long)
    for index, (row, probe) in enumerate(zip(rows, probes, strict=True)):
        input_ids[index, width - len(row) :] = torch.tensor(row)
        mask[index, width - len(row) :] = 1
        size = len(probe.answer)
        positions[index, :size] = torch.arange(width - size - 1, width - 1)
    return ProbeBatch(input_ids, mask, positions)


def _num_keys(kind: str, keys: int) -> int:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    return 1 if kind == "single" else keys


def _pair(
    tokenizer: PreTrainedTokenizerBase, rng: Random, script: Script, kind: str, context: int
) -> Probe | None:
    """Writes both prompts of a probe; None where the tokens of the two values do not line up."""
    key = script.asked[-1]
    value, distractor = script.values[key], draw_distractor(rng, script)
    prompt = compose(tokenizer, rng, script, context)
    corrupt_prompt = prompt.replace(needle(key, value), needle(key, distractor))
    clean = encode(tokenizer, f"{prompt} {value}")
    other = encode(tokenizer, f"{prompt} {distractor}")
    corrupt = encode(tokenizer, f"{corrupt_prompt} {value}")
    start = next((i for i, (a, b) in enumerate(zip(clean, other, strict=False)) if a != b), None)
    if start is None or not len(clean) == len(other) == len(corrupt):
        return None
    if clean[start:] != corrupt[start:] or clean == corrupt:
        return None
    return Probe(
        kind,
        context,
        prompt=tuple(clean[:start]),
        answer=tuple(clean[start:]),
        corrupt_prompt=tuple(corrupt[:start]),
        distractor=tuple(other[start:]),
    )
