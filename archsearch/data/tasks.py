"""Draws probes of every kind: retrieval from a haystack, and general ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import get_args

from transformers import PreTrainedTokenizerBase

from ..config import GeneralKind, ProbeKind, RetrievalKind
from ..errors import ConfigError
from ..metrics import UNSEEN, metric_name
from .general import GENERAL
from .niah import Misaligned, Pair, Probe, align
from .prompts import NUMBERS, Style, compose, encode, start_tokens
from .scenes import SCENES
from .unseen import PASSWORDS

__all__ = ["GENERAL_KINDS", "RETRIEVAL_KINDS", "UnknownWords", "make_probes", "metric_name"]

RETRIEVAL_KINDS: tuple[RetrievalKind, ...] = get_args(RetrievalKind)
GENERAL_KINDS: tuple[GeneralKind, ...] = get_args(GeneralKind)

_DRAWS = 50
_GOLDEN = 0.6180339887498949


class UnknownWords(ConfigError):
    """A kind of probes that the tokenizer cannot write."""


def make_probes(
    tokenizer: PreTrainedTokenizerBase,
    kind: ProbeKind,
    count: int,
    context: int,
    *,
    keys: int,
    digits: int,
    seed: int,
    start: int = 0,
    unseen: bool = False,
) -> list[Probe]:
    """Draws probes start to start + count of a kind; probe i depends on neither.

    A retrieval prompt and its answer take context tokens, or a few less; the depths of the needles asked for
    are spread evenly over any run of probes. keys is what scenes.py makes of it, digits the length of a
    value. General prompts have their own length: context, keys and digits are ignored. unseen draws retrieval
    prompts of the family that is never trained on, whose kind is `unseen_KIND`. Raises ConfigError where context is
    too short, or the tokenizer cannot tell answer and distractor apart in equally many tokens.
    """
    if kind not in SCENES and kind not in GENERAL:
        raise ValueError(f"kind {kind!r} is none of {', '.join((*SCENES, *GENERAL))}")
    num_keys = 1 if kind == "single" else keys
    name = f"{context}/{num_keys}/{digits}/{seed}" if kind in SCENES else str(seed)
    style, label = (PASSWORDS, f"{UNSEEN}{kind}") if unseen else (NUMBERS, kind)
    first_depth = Random(f"depth/{label}/{seed}").random()
    probes = []
    for index in range(start, start + count):
        rng = Random(f"probe/{label}/{name}/{index}")
        if kind in SCENES:
            depth = (first_depth + index * _GOLDEN) % 1.0
            draw = partial(
                _retrieval_pair, tokenizer, rng, kind, context, num_keys, digits, depth, style
            )
            probes.append(_first_aligned(tokenizer, draw, label, context))
        else:
            probes.append(_first_aligned(tokenizer, partial(GENERAL[kind], rng), kind, None))
    return probes


def _retrieval_pair(
    tokenizer: PreTrainedTokenizerBase,
    rng: Random,
    kind: str,
    context: int,
    keys: int,
    digits: int,
    depth: float,
    style: Style,
) -> Pair:
    """A haystack, and the same with the distractor in the needle asked for."""
    scene = SCENES[kind](rng, keys, digits, depth, style)
    distractor = style.distractor(rng, scene.answer, scene.values)
    clean = compose(tokenizer, rng, scene, context, style.filler)
    corrupt = clean.replace(scene.needle, scene.needle.replace(scene.answer, distractor))
    return Pair(clean, corrupt, f" {scene.answer}", f" {distractor}")


def _first_aligned(
    tokenizer: PreTrainedTokenizerBase, draw: Callable[[], Pair], kind: str, context: int | None
) -> Probe:
    """The first pair drawn whose tokens line up. Raises ConfigError after _DRAWS of them that do not."""
    reason, unknown = "", False
    for _ in range(_DRAWS):
        pair = draw()
        try:
            probe = align(tokenizer, pair, kind, context)
        except Misaligned as error:
            reason = f"{error.field} has {error.problem}"
            # Numbers that it lacks are a matter of probes.digits; made-up words come in one length.
            if kind.startswith(UNSEEN):
                unknown = unknown or tokenizer.unk_token_id in encode(tokenizer, pair.answer)
            continue
        if not _unknown(tokenizer, probe):
            return probe
        unknown = True
    if unknown:
        raise UnknownWords(f"{kind} probes: this tokenizer has no token for some of their words")
    field = "probes.digits: " if kind in SCENES else ""
    raise ConfigError(
        f"{field}{kind} probes: with this tokenizer {_DRAWS} draws gave no two prompts of equally many "
        f"tokens with answers of equally many; in the last one {reason}"
    )


def _unknown(tokenizer: PreTrainedTokenizerBase, probe: Probe) -> bool:
    """Whether a word of the pair has become the unknown token."""
    unknown, skipped = tokenizer.unk_token_id, len(start_tokens(tokenizer))
    return unknown in (*probe.prompt[skipped:], *probe.answer, *probe.corrupt_prompt[skipped:])
