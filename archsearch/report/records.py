"""What a report shows, as plain data: the evaluated candidates, the front and what it is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..fidelity.records import Study
from ..headmap import HeadMap, ModelShape
from ..metrics import is_share
from ..search.retention import Retention
from .score_records import ScoreFiles

Group = Literal["search", "seed", "random"]
"""Found by the sampler, supplied as a baseline, or part of the random control."""

OUTSIDE = "outside search.constraints"
"""Said of candidates that miss a bound."""

COST_METRICS = ("cache_bytes", "fa_share")
"""Metrics that say what a head map costs; the others say how good it is."""

METRIC_TITLES = {
    "kl": "KL to the teacher (nats a token)",
    "top1_agreement": "top-1 agreement with the teacher",
    "niah_single_nll": "single-key answer NLL (nats a token)",
    "niah_single_match": "single-key exact match",
    "niah_multikey_nll": "multi-key answer NLL (nats a token)",
    "niah_multikey_match": "multi-key exact match",
    "niah_multivalue_nll": "multi-value answer NLL (nats a token)",
    "niah_multivalue_match": "multi-value exact match",
    "niah_multiquery_nll": "multi-query answer NLL (nats a token)",
    "niah_multiquery_match": "multi-query exact match",
    "tracking_nll": "variable tracking answer NLL (nats a token)",
    "tracking_match": "variable tracking exact match",
    "copying_nll": "copying answer NLL (nats a token)",
    "copying_match": "copying exact match",
    "labels_nll": "label mapping answer NLL (nats a token)",
    "labels_match": "label mapping exact match",
    "arithmetic_nll": "arithmetic answer NLL (nats a token)",
    "arithmetic_match": "arithmetic exact match",
    "lookup_nll": "lookup answer NLL (nats a token)",
    "lookup_match": "lookup exact match",
    "agreement_nll": "agreement answer NLL (nats a token)",
    "agreement_match": "agreement exact match",
    "general_nll": "answer NLL of the general probes (nats a token)",
    "general_match": "exact match of the general probes",
    "fa_share": "share of full-attention heads",
    "cache_bytes": "cache bytes a sequence",
}

MAIN_METRICS = (
    "kl",
    "fa_share",
    "cache_bytes",
    "general_nll",
    "general_match",
    "niah_single_match",
    "niah_multikey_match",
    "niah_multivalue_match",
    "niah_multiquery_match",
    "tracking_match",
)
"""What a table shows beside the objectives where all metrics would make it too wide."""

METHOD_TITLES = {
    "all_full": "all full attention",
    "all_gdn": "all Gated DeltaNet",
    "causal": "causal score",
    "causal_per_layer": "causal, one a layer",
    "causal_per_layer_groups": "causal, one a layer, whole KV groups",
    "causal_groups": "causal, whole KV groups",
    "attribution": "attribution patching",
    "attribution_groups": "attribution, whole KV groups",
    "retrieval_heads": "retrieval-head copy score",
    "retrieval_heads_groups": "retrieval heads, whole KV groups",
    "duo_gates": "learned gates (DuoAttention)",
    "replacement_kl": "single-replacement KL",
    "replacement_kl_groups": "replacement KL, whole KV groups",
    "replacement_nll": "single-replacement retrieval NLL",
    "replacement_nll_groups": "replacement NLL, whole KV groups",
    "leave_one_in": "leave-one-in",
    "leave_one_in_groups": "leave-one-in, whole KV groups",
    "restoration": "layer-restoration KL",
    "blend": "causal + replacement",
    "blend_groups": "causal + replacement, whole KV groups",
    "program": "integer program, KL",
    "program_groups": "integer program, KL, whole KV groups",
    "program_bytes": "integer program, KL, bytes of layers",
    "program_both": "program, KL + NLL",
    "program_both_groups": "program, KL + NLL, whole KV groups",
    "program_both_bytes": "program, KL + NLL, bytes of layers",
    "even_layers": "evenly spaced layers",
    "random": "random seed",
    "random_groups": "random, whole KV groups",
    "search": "found by the search",
    "random-control": "random control",
}


def metric_title(metric: str) -> str:
    """What a metric is in words; the name itself where the config gave it."""
    name, _, context = metric.partition("@")
    if not context.isdigit():
        return METRIC_TITLES.get(metric, metric)
    return f"{METRIC_TITLES.get(name, name)} at {int(context):,} tokens"


@dataclass(frozen=True)
class Objective:
    """One objective of the search."""

    metric: str
    minimize: bool

    def better(self, a: float, b: float) -> bool:
        """Whether value a is strictly better than b."""
        return a < b if self.minimize else a > b


@dataclass(frozen=True)
class Candidate:
    """One evaluated head map."""

    candidate: int
    method: str
    group: Group
    head_map: HeadMap
    metrics: dict[str, float]
    proxy_tokens: int = 0
    on_front: bool = False
    also: tuple[str, ...] = ()
    """Other seed methods that chose the same map."""
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Lower and upper end of metrics of the final stage."""
    feasible: bool = True
    """Whether it meets search.constraints."""

    def shown(self, metric: str) -> str:
        """A metric in words, with its interval; empty where it was not measured."""
        if metric not in self.metrics:
            return ""
        value, ends = quantity(metric, self.metrics[metric]), self.intervals.get(metric, ())
        # Runs of earlier versions have ends that are alike, which say nothing.
        shown = [quantity(metric, end) for end in ends if len(set(ends)) > 1]
        return f"{value} ({' to '.join(shown)})" if shown else value

    @property
    def key(self) -> str:
        """Unique in a report: one candidate is measured again in each rung that it reaches."""
        # The random control counts its candidates by itself.
        own = "random-" if self.group == "random" else ""
        return f"{self.proxy_tokens}-{own}{self.candidate}"

    @property
    def label(self) -> str:
        """`#12 causal score`, as captions call it."""
        titles = [METHOD_TITLES.get(method, method) for method in (self.method, *self.also)]
        outside = "" if self.feasible else f", {OUTSIDE}"
        return f"#{self.candidate} {' = '.join(titles)}{outside}"


@dataclass(frozen=True)
class Failure:
    """A trial without a result, and why."""

    candidate: int
    method: str
    proxy_tokens: int
    reason: str


@dataclass(frozen=True)
class Rung:
    """All that was evaluated after the same number of distillation tokens."""

    proxy_tokens: int
    candidates: tuple[Candidate, ...]
    hypervolume: dict[str, float] = field(default_factory=dict)
    """front, seeds and (where it was run) random."""
    reference: tuple[float, ...] = ()
    confidence: float | None = None
    """Of the intervals, where this is the final stage."""

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The points that no other dominates, the cheapest first."""
        found = [candidate for candidate in self.candidates if candidate.on_front]
        return tuple(sorted(found, key=lambda c: c.metrics.get("cache_bytes", 0)))


@dataclass(frozen=True)
class RunSummary:
    """A finished (or half finished) run, ready to be drawn; one that only scored heads has no rungs."""

    name: str
    config: dict[str, Any]
    objectives: tuple[Objective, ...]
    rungs: tuple[Rung, ...]
    failures: tuple[Failure, ...] = ()
    pruned: tuple[Failure, ...] = ()
    """Candidates that did not go on to a proxy of so many tokens."""
    stops: tuple[str, ...] = ()
    """What ended the search before all candidates were begun."""
    met: tuple[str, ...] = ()
    """Each constraint, and how many of the last rung's candidates meet it."""
    unmet: str | None = None
    """How near the last rung's candidates came to the constraints, where none meets them."""
    stages: tuple[dict[str, Any], ...] = ()
    methods: tuple[dict[str, Any], ...] = ()
    """Seconds of each scoring method."""
    scores: ScoreFiles = field(default_factory=ScoreFiles)
    shape: ModelShape | None = None
    """None where nothing was evaluated."""
    retention: Retention | None = None
    """What the found map keeps of the teacher's accuracy, where that was measured."""
    fidelity: Study | None = None
    """How well proxies predict long training, where that was measured."""

    @property
    def last(self) -> Rung:
        """The rung whose front is the run's result."""
        return self.rungs[-1]

    @property
    def quality(self) -> Objective:
        """The first objective that is no cost, or the first one."""
        for objective in self.objectives:
            if objective.metric not in COST_METRICS:
                return objective
        return self.objectives[0]


def quantity(metric: str, value: float) -> str:
    """A metric's value as a person reads it: bytes with a unit, shares in percent, others in 3 digits."""
    if metric == "cache_bytes":
        return bytes_text(value)
    if is_share(metric):
        return f"{100 * value:.4g}%"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def bytes_text(value: float) -> str:
    """Bytes with a binary unit, three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}" if unit != "B" else f"{value:.0f} B"
        value /= 1024
    return f"{value:.3g} TiB"
