"""A user's own pairs: a JSONL file of clean and corrupt prompts with their answers."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from .json_objects import Field, read_objects
from .niah import Misaligned, Pair, Probe, align

DEFAULTS = {"capability": "user", "probe": "pairs"}
"""Fields that a line may leave out, with what holds then."""
FIELDS = {
    **dict.fromkeys(("clean", "corrupt", "answer", "distractor"), Field(required=True)),
    **dict.fromkeys(DEFAULTS, Field()),
}
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
    for where, given in read_objects(path, FIELDS):
        _check_differences(given, where)
        fields = DEFAULTS | given
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


def _check_differences(fields: dict[str, str], where: str) -> None:
    for name, other in (("corrupt", "clean"), ("distractor", "answer")):
        if fields[name] == fields[other]:
            raise ConfigError(f"{where}: field {name} equals {other}; allowed: another text")


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
