"""Prompts with their answers from a file, for evaluation alone: JSONL, or JSONL packed by gzip."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from .json_objects import Field, read_objects
from .niah import Probe
from .prompts import encode

GROUPING = {"kind": Field(str), "keys": Field(int)}
"""The fields that tell groups of prompts apart."""
FIELDS = {
    "prompt": Field(required=True),
    "answer": Field(required=True),
    **GROUPING,
    # The length of a prompt is not read: tokenizers differ.
    "tokens": Field(None),
}


def read_answers(
    path: Path, tokenizer: PreTrainedTokenizerBase, name: str, *, max_tokens: int | None = None
) -> list[Probe]:
    """The prompts of the file as probes of kind name: a match is a greedy continuation that starts with the answer.

    The answer's tokens are those that follow the prompt's in the two together. The group of a probe is its kind
    and number of keys (`multikey2`), its context the power of two that its tokens fit in. Raises
    ConfigError, `FILE:LINE: ...`, for a line that is no object of these fields, whose answer merges with the prompt, or
    that takes more than max_tokens; `FILE: ...` for a file that is empty or cannot be read.
    """
    probes = []
    for where, fields in read_objects(path, FIELDS):
        prompt = encode(tokenizer, fields["prompt"])
        whole = encode(tokenizer, fields["prompt"] + fields["answer"])
        answer = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt or not answer:
            raise ConfigError(
                f"{where}: field answer does not start a token of its own after the prompt with this tokenizer; "
                "allowed: an answer that does, such as one after a space"
            )
        if max_tokens is not None and len(whole) > max_tokens:
            raise ConfigError(
                f"{where}: prompt and answer of {len(whole)} tokens are beyond the teacher's {max_tokens}; allowed: "
                f"1 to {max_tokens} together, or more with probes.beyond_window: true"
            )
        context = 1 << (len(whole) - 1).bit_length()
        parts = (fields.get(name) for name in GROUPING)
        group = "".join(str(part) for part in parts if part is not None)
        probes.append(Probe(name, context, tuple(prompt), tuple(answer), (), (), group))
    if not probes:
        raise ConfigError(f"{path}: holds no prompts; allowed: a line of JSON for each")
    return probes
