"""Looks into the prompts of a run before any work: they must fit, and own pairs must serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .config import ProbeKind, RunConfig, ScoringConfig
from .data.answers_file import read_answers
from .data.niah import Probe, retrieval_rows
from .data.pairs_file import read_pairs
from .data.tasks import GENERAL_KINDS, RETRIEVAL_KINDS, UnknownWords, make_probes
from .errors import ArchsearchError, ConfigError
from .evaluation.retrieval import check_names
from .models.sources import resolve_path

CAPABILITIES = ("retrieval", "general")
"""Those that have sub-probes of ours."""
UNSEEN_FIELD = "probes.unseen"
GENERAL_DRAWS = 4
"""Prompts of each general kind that are drawn to see how long they are."""


def check_probes(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, max_context: int, prompts: int
) -> None:
    """Draws probes of each kind and length and, where the run trains on prompts, such; reads own pairs.

    Raises ConfigError with the field, for own pairs also with the file.
    """
    scoring, own = config.scoring, Counter[str]()
    _check_retrieval(config, tokenizer, prompts)
    _check_general(config, tokenizer, max_context)
    limit = None if config.probes.beyond_window else max_context
    answers: list[Probe] = []
    for index, file in enumerate(config.probes.files):
        with naming(f"probes.files[{index}]"):
            path = resolve_path(file.path)
            answers += read_answers(path, tokenizer, file.name, max_tokens=limit)
    check_names(answers)
    if scoring.pairs_file is not None:
        with naming("scoring.pairs_file"):
            own = _check_pairs(scoring, resolve_path(scoring.pairs_file), tokenizer, max_context)
    _check_min_pairs(scoring, own)


def _check_retrieval(config: RunConfig, tokenizer: PreTrainedTokenizerBase, prompts: int) -> None:
    """Draws one prompt of each retrieval kind at each context: they may be too short for the needles."""
    parts: list[tuple[str, tuple[ProbeKind, ...], str, tuple[int, ...]]] = [
        ("probes.kinds", config.probes.kinds, "probes.contexts", config.probes.contexts),
        (
            "scoring.retrieval",
            config.scoring.retrieval,
            "scoring.contexts",
            config.scoring.contexts,
        ),
        (UNSEEN_FIELD, config.probes.unseen, "probes.contexts", config.probes.contexts),
    ]
    for kinds_field, kinds, field, contexts in parts:
        for index, context in enumerate(contexts):
            for kind in (kind for kind in kinds if kind in RETRIEVAL_KINDS):
                with (
                    _naming_kinds(kinds_field, config, tokenizer, context),
                    naming(f"{field}[{index}]"),
                ):
                    _draw(config, tokenizer, kind, 1, context, unseen=kinds_field == UNSEEN_FIELD)
    with naming("data.sequence_length"):
        retrieval_rows(
            tokenizer,
            min(prompts, 2),  # They take turns between one key and several.
            config.data.sequence_length,
            keys=config.probes.multi_keys,
            digits=config.probes.digits,
            seed=config.seed,
        )


def _check_general(config: RunConfig, tokenizer: PreTrainedTokenizerBase, max_context: int) -> None:
    """Draws general prompts: a tokenizer may not tell their answers apart, or the teacher may be too short."""
    parts = (("probes.kinds", config.probes.kinds), ("scoring.general", config.scoring.general))
    for field, kinds in parts:
        for kind in kinds:
            if kind in GENERAL_KINDS:
                with _naming_kinds(field, config, tokenizer, max_context), naming(field):
                    probes = _draw(config, tokenizer, kind, GENERAL_DRAWS, max_context)
                    _check_lengths(probes, kind, max_context)


def _check_pairs(
    scoring: ScoringConfig, path: Path, tokenizer: PreTrainedTokenizerBase, max_context: int
) -> Counter[str]:
    """Pairs in the file of each capability."""
    counts = Counter[str]()
    for capability, probes in read_pairs(path, tokenizer, max_tokens=max_context).items():
        counts[capability] += sum(map(len, probes.values()))
        if twice := set(probes) & set(_kinds(scoring, capability)):
            raise ConfigError(f"{path}: probe {min(twice)} is one of ours; allowed: another name")
    return counts


def _check_min_pairs(scoring: ScoringConfig, own: Mapping[str, int]) -> None:
    """Raises ConfigError where a capability cannot have as many pairs as it must; own are those of the file."""
    for capability in dict.fromkeys((*CAPABILITIES, *own)):
        kinds, count = _kinds(scoring, capability), own.get(capability, 0)
        most = len(kinds) * scoring.pairs + count
        if not most or most >= scoring.min_pairs:
            continue
        if not kinds:
            raise ConfigError(
                f"scoring.pairs_file: {scoring.pairs_file}: too few pairs of {capability} ({count}); allowed: "
                f"{scoring.min_pairs} or more together (scoring.min_pairs)"
            )
        file = f" and scoring.pairs_file {count} pairs of it" if count else ""
        raise ConfigError(
            f"scoring.min_pairs: {scoring.min_pairs}, but scoring.{capability} has {len(kinds)} sub-probes of "
            f"{scoring.pairs} pairs{file}; allowed: 1 to {most}"
        )


def _kinds(scoring: ScoringConfig, capability: str) -> tuple[str, ...]:
    """Our sub-probes of a capability; a file may name any other."""
    kinds: tuple[str, ...] = getattr(scoring, capability) if capability in CAPABILITIES else ()
    return kinds


def _draw(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    kind: ProbeKind,
    count: int,
    context: int,
    *,
    unseen: bool = False,
) -> list[Probe]:
    keys, digits = config.probes.multi_keys, config.probes.digits
    return make_probes(
        tokenizer, kind, count, context, keys=keys, digits=digits, seed=config.seed, unseen=unseen
    )


def _check_lengths(probes: list[Probe], name: str, max_context: int) -> None:
    longest = max((len(probe.prompt) + len(probe.answer) for probe in probes), default=0)
    if longest > max_context:
        raise ConfigError(
            f"{name}: prompts of {longest} tokens are beyond the teacher's {max_context}; allowed: other kinds, or a "
            "teacher of longer context"
        )


@contextmanager
def _naming_kinds(
    field: str, config: RunConfig, tokenizer: PreTrainedTokenizerBase, context: int
) -> Iterator[None]:
    """Names the kinds that the tokenizer does have words for, where it has none for the one that is drawn."""
    try:
        yield
    except UnknownWords as error:
        kinds: dict[str, tuple[ProbeKind, ...]] = {
            "scoring.retrieval": RETRIEVAL_KINDS,
            "scoring.general": GENERAL_KINDS,
            UNSEEN_FIELD: RETRIEVAL_KINDS,
        }
        able = [
            kind
            for kind in kinds.get(field, (*RETRIEVAL_KINDS, *GENERAL_KINDS))
            if _can_draw(config, tokenizer, kind, context, unseen=field == UNSEEN_FIELD)
        ]
        allowed = ", ".join(able) or "[] only"
        raise ConfigError(f"{field}: {error.__cause__ or error}; allowed: {allowed}") from error


def _can_draw(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    kind: ProbeKind,
    context: int,
    *,
    unseen: bool,
) -> bool:
    try:
        _draw(config, tokenizer, kind, 1, context, unseen=unseen)
    except ConfigError:
        return False
    return True


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Puts the field before an error that does not name one already."""
    try:
        yield
    except ArchsearchError as error:
        if str(error).startswith("probes."):
            raise
        raise type(error)(f"{field}: {error}") from error
