"""What the metrics of a trial are called, and what their names tell of them.

| name | is |
|---|---|
| `kl`, `top1_agreement` | divergence from the teacher on the held-out text; with `_LABEL` on that of data.extra_heldout |
| `NAME_nll`, `NAME_match` | answers to prompts: NAME is `niah_KIND`, `tracking`, a general kind or `general` (the mean of these), `unseen_KIND` (probes.unseen), or the name of a file (probes.files) |
| `NAME_nll@CONTEXT` | the same on prompts of CONTEXT tokens alone, where probes.contexts has several |
| `lm_TASK_METRIC` | a task of lm-eval |
| `fa_share`, `cache_bytes` | costs of the head map |
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator

RetrievalKind = Literal["single", "multikey", "multivalue", "multiquery", "tracking"]
"""Retrieval sub-probes after RULER: needles in a haystack, and variable tracking."""
GeneralKind = Literal["copying", "labels", "arithmetic", "lookup", "agreement"]
"""General sub-probes: short prompts that need no data set."""
ProbeKind = Literal[RetrievalKind, GeneralKind]

Metric = Literal[
    "kl",
    "top1_agreement",
    "niah_single_nll",
    "niah_single_match",
    "niah_multikey_nll",
    "niah_multikey_match",
    "niah_multivalue_nll",
    "niah_multivalue_match",
    "niah_multiquery_nll",
    "niah_multiquery_match",
    "tracking_nll",
    "tracking_match",
    "copying_nll",
    "copying_match",
    "labels_nll",
    "labels_match",
    "arithmetic_nll",
    "arithmetic_match",
    "lookup_nll",
    "lookup_match",
    "agreement_nll",
    "agreement_match",
    "general_nll",
    "general_match",
    "fa_share",
    "cache_bytes",
]
"""The metrics that need no name of the config's own."""
DIVERGENCES = ("kl", "top1_agreement")
COSTS = ("fa_share", "cache_bytes")
FIGURES = ("nll", "match")
"""What is measured of the answers to prompts: nats an answer token, and the share that greedy decoding gives."""
UNSEEN = "unseen_"
HARNESS = "lm_"
LABEL = r"^[a-z][a-z0-9_]*$"
"""What a name that the config gives looks like."""

_CONFIGURED = re.compile(
    r"(?:kl|top1_agreement)_[a-z][a-z0-9_]*|[a-z][a-z0-9_]*_(?:nll|match)(?:@[1-9][0-9]*)?|lm_.+"
)


def check_metric(name: str) -> str:
    """The name, if it could be a metric's. Raises ValueError where it could not.

    Whether a run has a metric of that name depends on its prompts, texts and tasks.
    """
    if name not in get_args(Metric) and not _CONFIGURED.fullmatch(name):
        known = ", ".join(get_args(Metric))
        raise ValueError(
            f"{name!r} is no metric; allowed: {known}, NAME_nll@CONTEXT, NAME_match@CONTEXT, kl_LABEL, "
            "top1_agreement_LABEL, lm_TASK_METRIC"
        )
    return name


MetricName = Annotated[str, AfterValidator(check_metric)]


def metric_name(kind: str) -> str:
    """What metrics of a kind of prompts are called: `niah_KIND` for needles, else the kind itself."""
    return f"niah_{kind}" if kind in get_args(RetrievalKind) and kind != "tracking" else kind


def is_reserved(label: str) -> bool:
    """Whether metrics named by that label could be taken for those of other prompts."""
    kinds = (*get_args(RetrievalKind), *get_args(GeneralKind))
    prefixes = (UNSEEN, HARNESS, "niah_")
    # A group of a file named `niah` could be called as a kind of needles is.
    names = {"general", *kinds, *map(metric_name, kinds), *(p.removesuffix("_") for p in prefixes)}
    return label in names or label.startswith((*prefixes, *DIVERGENCES))


def is_share(name: str) -> bool:
    """Whether a metric is a share between 0 and 1."""
    return name == "fa_share" or name.startswith("top1_agreement") or _figure(name) == "match"


def is_loss(name: str) -> bool:
    """Whether a metric is in nats: 0 or more, and better when smaller."""
    return name == "kl" or name.startswith("kl_") or _figure(name) == "nll"


def _figure(name: str) -> str:
    """The last word of the name of a metric of prompts, a context left out; none of others'."""
    return (
        ""
        if name.startswith((HARNESS, *DIVERGENCES))
        else name.partition("@")[0].rpartition("_")[2]
    )
