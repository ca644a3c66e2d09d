"""A user's own pairs: a JSONL file of clean and corrupt prompts with their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from .niah import Misaligned, Pair, Probe, align

REQUIRED = ("clean", "corrupt", "answer", "distractor")
DEFAULTS = {"capability": "user", "probe": "pairs"}
"""Fields that a line may leave out, with what holds then."""
OPENING = "([{<\"'"
"""After these at the end of a prompt, the answer follows without a space."""


def read_pairs(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int | None = None
) -> dict[str, dict[str, list[Probe]]]:
    """The pairs of the file by capability and sub-probe, in the order of the file.

    Every line is an object of strings: clean and corrupt are prompts without the answer, which follows after
    a space unless clean ends in whitespace or an opening bracket or quote; answer is what clean calls for,
    distractor what corrupt does. Raises ConfigError: `FILE:LINE: field ...` for a line that is no such object,
    whose tokens do not line up, or whose prompt and answer take more than max_tokens; `FILE: ...` for a file without pairs or one that cannot be read.
    """
    found: dict[str, dict[str, list[Probe]]] = {}
    for where, line in _lines(path):
        fields = _fields(line, where)
        capability, name = fields["capability"], fields["probe"]
        probe = _probe(fields, tokenizer, where)
        if max_tokens is not None and probe.context > max_tokens:
            raise ConfigError(
                f"{where}: prompt and answer of {probe.context} tokens are beyond the teacher's {max_tokens}; allowed: "
                f"1 to {max_tokens} together"
            )
        found.setdefault(capability, {}).setdefault(name, []).append(probe)
    if not found:
        raise ConfigError(f"{path}: holds no pairs; allowed: a line of JSON for each")
    return found


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, each after its file and number."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def _fields(line: str, where: str) -> dict[str, str]:
    """A line's fields, defaults included."""
    allowed = f"allowed: {', '.join((*REQUIRED, *DEFAULTS))}"
    try:
        data: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); allowed: an object a line") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a {type(data).__name__}; allowed: an object a line")
    for name in REQUIRED:
        if name not in data:
            raise ConfigError(f"{where}: field {name} is missing; {allowed}")
    for name, value in data.items():
        if name not in (*REQUIRED, *DEFAULTS):
            raise ConfigError(f"{where}: field {name} is unknown; {allowed}")
        if not isinstance(value, str):
            raise ConfigError(
                f"{where}: field {name} is a {type(value).__name__}; allowed: a string"
            )
        if not value.strip():
            raise ConfigError(f"{where}: field {name} is empty; allowed: text")
    for name, other in (("corrupt", "clean"), ("distractor", "answer")):
        if data[name] == data[other]:
            raise ConfigError(f"{where}: field {name} equals {other}; allowed: another text")
    return DEFAULTS | data


def _probe(fields: dict[str, str], tokenizer: PreTrainedTokenizerBase, where: str) -> Probe:
    clean, corrupt = fields["clean"], fields["corrupt"]
    answer, distractor = fields["answer"].strip(), fields["distractor"].strip()
    space = "" if clean[-1].isspace() or clean[-1] in OPENING else " "
    pair = Pair(clean, corrupt, space + answer, space + distractor)
    try:
        return align(tokenizer, pair, fields["probe"])
    except Misaligned as error:
        raise ConfigError(
            f"{where}: field {error.field} has {error.problem}; allowed: other tokens, equally many"
        ) from error
