"""Seconds a candidate at each proxy length, and hours of a search, from the measured rates of distillation."""

from __future__ import annotations

import time

import torch

from ..config import RunConfig
from ..evaluation.divergence import TeacherReference, divergence
from ..evaluation.retrieval import retrieval
from ..search.trial import EVALUATION_TOKENS, evaluation_probes
from ..search_plan import promoted_candidates
from ..training.teacher_logits import FORMS
from .step_bench import Bench, done_by

LENGTHS = (0, 500_000, 2_000_000, 8_000_000)
"""Proxy lengths in tokens that a candidate is priced at, beside the config's."""
TRIALS = 200
PRICED = ("exact", *FORMS, "mean_row, replayed")
"""The ways to distil that candidates are priced by."""


def time_candidate(bench: Bench) -> dict[str, float]:
    """Seconds to cut a candidate for training and to measure it, of the second try; extra texts and tasks left out."""
    teacher, config = bench.teacher, bench.config
    tokens = EVALUATION_TOKENS[teacher.device.type]
    shape = (config.data.heldout_sequences, config.data.sequence_length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(teacher.model.config.vocab_size, shape, generator=generator)
    reference = TeacherReference(teacher, ids, batch_tokens=tokens)
    # Files of prompts, whose lengths are their own, are left out too.
    probes = evaluation_probes(
        teacher,
        config.model_copy(update={"probes": config.probes.model_copy(update={"files": ()})}),
    )
    seconds = {}
    for _ in range(2):
        start = time.perf_counter()
        student = bench.student().requires_grad_(False)
        seconds["cut"] = done_by(teacher.device) - start
        start = time.perf_counter()
        divergence(student, reference)
        seconds["text"] = done_by(teacher.device) - start
        start = time.perf_counter()
        retrieval(student, probes, batch_tokens=tokens)
        seconds["prompts"] = done_by(teacher.device) - start
    return seconds


def price(bench: Bench, parts: dict[str, float]) -> None:
    """Records seconds a candidate at each proxy length, with and without a kept teacher, and hours of a whole search."""
    fixed = sum(parts.values())
    lengths = sorted({*LENGTHS, *bench.config.search.proxy_tokens})
    for case in (name for name in PRICED if name in bench.rates):
        rate = bench.rates[case]
        facts = {"tokens_a_second": rate, "parts": parts}
        for tokens in lengths:
            name = f"seconds a candidate, {tokens:,} tokens, {case}"
            bench.add(name, fixed + tokens / rate, "s", **facts)
        seconds = sum(
            count * (fixed + tokens / rate)
            for count, tokens in zip(
                evaluations(bench.config), bench.config.search.proxy_tokens, strict=True
            )
        )
        facts |= {"evaluations": evaluations(bench.config)}
        bench.add(f"hours of a search of {TRIALS} candidates, {case}", seconds / 3600, "h", **facts)
    for work in ("alignment", "alignment, replayed"):
        if work in bench.rates:
            hours = bench.config.supernet.tokens / bench.rates[work] / 3600
            bench.add(f"hours of {work}", hours, "h", tokens=bench.config.supernet.tokens)


def evaluations(config: RunConfig) -> list[int]:
    """Candidates that a search of TRIALS evaluates at each of its proxies, as plans estimate it."""
    search = config.search.model_copy(update={"trials": TRIALS})
    later = promoted_candidates(config.model_copy(update={"search": search}))
    return [TRIALS * (2 if search.random_control else 1), *[later] * (len(search.proxy_tokens) - 1)]
