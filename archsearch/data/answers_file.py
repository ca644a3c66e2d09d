"""Prompts with their answers from a file, for evaluation alone: JSONL, or JSONL packed by gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from .niah import Probe
from .prompts import encode

REQUIRED = ("prompt", "answer")
GROUPING = {"kind": (str, "a string"), "keys": (int, "an integer")}
"""The fields that tell groups of prompts apart, with their type, also in words."""
OPTIONAL = (*GROUPING, "tokens")
"""tokens, the length of a prompt, is not read: tokenizers differ."""


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
    for where, line in _lines(path):
        fields = _fields(line, where)
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


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, each after its file and number."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error})") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


def _fields(line: str, where: str) -> dict[str, Any]:
    allowed = f"allowed: {', '.join((*REQUIRED, *OPTIONAL))}"
    try:
        data: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); allowed: an object a line") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a {type(data).__name__}; allowed: an object a line")
    unknown = [name for name in data if name not in (*REQUIRED, *OPTIONAL)]
    if unknown:
        raise ConfigError(f"{where}: field {unknown[0]} is unknown; {allowed}")
    for name in REQUIRED:
        if not isinstance(data.get(name), str) or not data[name].strip():
            raise ConfigError(
                f"{where}: field {name} is no text; allowed: a string that is not blank"
            )
    for name, (kind, words) in GROUPING.items():
        # JSON's true is an int to Python; null is as good as nothing.
        if type(data.get(name)) not in (kind, NoneType):
            raise ConfigError(f"{where}: field {name} is {data[name]!r}; allowed: {words}")
    return data
