"""What a config sets and another of its options leaves without effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import get_args

from .config import (
    FinalConfig,
    FullConfig,
    ProbeConfig,
    RetrievalKind,
    RunConfig,
    ScoreMethod,
    Section,
)
from .data.documents import marks_documents
from .footprint import TRAIN
from .models.teacher import pick_device
from .plan import text_origin, texts
from .search.driver import scored_methods
from .search.seeds import DRAWN, most_seeds
from .search_plan import planned_rungs

Row = tuple[tuple[str, ...], bool, str]
"""Fields or whole sections by their paths, whether they are ignored, and why."""


def ignored_options(config: RunConfig, methods: Collection[ScoreMethod] | None = None) -> list[str]:
    """A sentence on each field or section that the config sets without effect.

    methods are the scores to compute; those of a whole run where they are None.
    """
    found = []
    execution = config.execution
    if execution.executor == "serial" and (
        execution.workers > 1 or execution.gpus_per_worker or execution.threads_per_worker
    ):
        found.append("execution: the serial executor runs one worker in this process as it is")
    methods = scored_methods(config) if methods is None else methods
    named: list[str] = []
    for paths, holds, reason in [
        *_scoring_rows(config, methods),
        *_search_rows(config),
        *_text_rows(config),
        *_training_rows(config),
        (("long_context",), True, "archsearch train alone reads it"),
    ]:
        for path in paths if holds else ():
            # What lies in a section that is ignored as a whole is not named again.
            if _is_set(config, path) and not any(f"{path}.".startswith(f"{n}.") for n in named):
                named.append(path)
                found.append(f"{path} is ignored: {reason}")
    return [*_ignored_sources(config), *found, *_weakened(config), *_starved(config)]


def ignored_in_training(config: RunConfig, fields: Collection[str]) -> list[str]:
    """Those of the fields that `archsearch train` was given without effect, a sentence each.

    The config's one proxy has the tokens of distillation.
    """
    form, long = config.distill.teacher_logits, config.long_context
    is_distilled = bool(max(config.search.proxy_tokens))
    search = config.search.model_copy(update={"proxy_tokens": (1,)})
    once = "a student that is trained by itself sees each batch once: nothing is kept"
    names = [name for name in type(long).model_fields if name != "tokens"]
    rows = [
        (("distill",), not is_distilled, "--tokens is 0"),
        (("distill.teacher_logits",), form != "topk", once),
        (("distill.cache_gib",), True, once),
        # Heads that a student keeps are as section student says, distilled or not.
        *_training_rows(config.model_copy(update={"search": search})),
        (tuple(f"long_context.{n}" for n in names), not long.tokens, "long_context.tokens is 0"),
    ]
    found: dict[str, str] = {}
    for paths, holds, reason in rows:
        for path in paths if holds else ():
            for field in fields:
                if f"{field}.".startswith(f"{path}."):
                    found.setdefault(field, f"{field} is ignored: {reason}")
    return [*found.values()]


def has_haystacks(probes: ProbeConfig) -> bool:
    """Whether any prompt has a length to choose."""
    return bool({*probes.kinds, *probes.unseen} & set(get_args(RetrievalKind)))


def _ignored_sources(config: RunConfig) -> Iterator[str]:
    uses = {"path": "file", "name": "datasets", "split": "datasets", "temperature": "teacher"}
    for part, text in texts(config.data).items():
        for key, source in uses.items():
            if key in text.model_fields_set and text.source != source:
                yield f"data.{part}.{key} is ignored: data.{part}.source is {text.source}, not {source}"


def _weakened(config: RunConfig) -> Iterator[str]:
    """Sentences on fields that do less than they say."""
    supernet, distill, length = config.supernet, config.distill, config.data.sequence_length
    distilled = bool(max(config.search.lengths))
    for name, section, is_read in (
        ("supernet", supernet, supernet.source == TRAIN),
        ("distill", distill, distilled),
    ):
        if is_read and section.batch_tokens < length and _is_set(section, "batch_tokens"):
            yield (
                f"{name}.batch_tokens: {section.batch_tokens} is less than a sequence of data.sequence_length {length} "
                "tokens: a batch is one sequence"
            )
    train = config.data.train
    if distill.packed and distilled and not marks_documents(train):
        yield (
            f"distill.packed: text from {text_origin(train)} does not mark its documents: they end at end-of-text tokens "
            "alone, and a row without any stays whole"
        )


def _starved(config: RunConfig) -> Iterator[str]:
    """Sentences on limits that leave too little to a search."""
    search, named = config.search, most_seeds(config.search.seeds)
    if named >= search.trials:
        yield (
            f"search.trials: {search.trials}, and search.seeds.methods are up to {named} head maps, which come first: "
            f"little or nothing is left to search.sampler {search.sampler}"
        )
    for number, rung in enumerate(planned_rungs(config)):
        share = 1 + search.random_control
        least = named if not number else 1
        if rung.count < min(rung.wanted, least * share):
            of = f" of up to {named} seeds" if not number else ""
            yield (
                f"search.max_tokens: {search.max_tokens} pays for {rung.count // share} head maps{of} at "
                f"{rung.tokens} tokens of distillation; {1 / len(search.lengths):.2g} of it is for each proxy"
            )


def _text_rows(config: RunConfig) -> Iterator[Row]:
    data = config.data
    drawn = "data.train.source is teacher: sequences that share text are always left out"
    yield ("data.overlap",), data.train.source == "teacher", drawn
    yield ("data.niah_text_share",), not data.niah_share, "data.niah_share is 0"
    no_haystacks = not has_haystacks(config.probes)
    yield ("probes.contexts",), no_haystacks, "probes.kinds has no retrieval prompts"
    yield ("harness",), not config.harness.tasks, "harness.tasks is empty"


def _scoring_rows(config: RunConfig, methods: Collection[ScoreMethod]) -> Iterator[Row]:
    scoring, seeds = config.scoring, config.search.seeds
    yield ("scoring.contexts",), not scoring.retrieval, "scoring.retrieval is empty"
    yield (
        ("scoring.pairs", "scoring.max_draws"),
        not (scoring.retrieval or scoring.general),
        "scoring.retrieval and scoring.general are empty",
    )
    yield (
        ("scoring.receiver_share", "scoring.sender_rounds"),
        not scoring.sender_pairs,
        "scoring.sender_pairs is 0",
    )
    no_gates = "duo_gates is not among the scores"
    yield ("scoring.gate_steps",), "duo_gates" not in methods, no_gates
    yield (
        ("search.seeds.random_maps",),
        not ({*DRAWN} & {*seeds.methods} or seeds.every_selector),
        "search.seeds.methods has no random",
    )


def _search_rows(config: RunConfig) -> Iterator[Row]:
    search = config.search
    yield ("search.min_gain",), search.patience is None, "search.patience is not given"
    one = "search.proxy_tokens has one proxy: nobody goes on"
    yield ("search.halving",), len(search.proxy_tokens) == 1, one
    options = tuple(f"search.final.{name}" for name in FinalConfig.model_fields if name != "tokens")
    yield options, search.final.tokens is None, "search.final.tokens is not given"


def _training_rows(config: RunConfig) -> Iterator[Row]:
    supernet, distill, full = config.supernet, config.distill, config.student.full
    yield (
        tuple(f"supernet.{name}" for name in ("rank", "init", "stop_below", "stop_gain", "replay")),
        supernet.source != TRAIN,
        "the supernet is loaded as it is stored",
    )
    unfitted = supernet.init.bias == "fitted" and not supernet.gdn.bias
    yield ("supernet.init.bias",), unfitted, "supernet.gdn.bias is false"
    yield (
        (*(f"student.full.{name}" for name in FullConfig.model_fields), "distill"),
        not max(config.search.lengths),
        "no candidate is distilled with search.proxy_tokens [0]; archsearch fidelity and train alone read it",
    )
    yield (
        ("student.full.rope_fade", "student.full.rope_fade_tokens"),
        full.rope,
        "student.full.rope is true",
    )
    forms = ("log_scale_form", "log_scale_tokens", "log_scale_training")
    scaled = "student.full.log_scale is false"
    yield tuple(f"student.full.{name}" for name in forms), not full.log_scale, scaled
    kept = f"distill.teacher_logits is {distill.teacher_logits}"
    yield ("distill.top_k",), distill.teacher_logits != "topk", f"{kept}, not topk"
    yield ("distill.cache_gib",), distill.teacher_logits == "exact", f"{kept}: nothing is kept"
    yield (
        ("search.retention",),
        not config.search.retention.prompts,
        "search.retention.prompts is 0",
    )
    yield (
        ("supernet.replay", "distill.replay"),
        pick_device(config.teacher.device).type != "cuda",
        "the teacher is on the CPU, which has no launches to save",
    )


def _is_set(section: Section, path: str) -> bool:
    """Whether the user asks for something there: a switch or a zero that is the default anyway asks for nothing."""
    name, _, rest = path.partition(".")
    if name not in section.model_fields_set:
        return False
    value = getattr(section, name)
    if isinstance(value, Section):
        return any(_is_set(value, part) for part in ([rest] if rest else value.model_fields_set))
    is_nothing = isinstance(value, bool) or not value
    return not (is_nothing and value == type(section).model_fields[name].default)
