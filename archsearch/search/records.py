"""The plain records that cross the boundary to a worker: JSON-able, no tensors, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ..config import GeneralKind, ProbeConfig, RetrievalKind, RunConfig
from ..metrics import COSTS, DIVERGENCES, FIGURES, HARNESS, UNSEEN, metric_name
from .front import CONTROL

TrialStatus = Literal["ok", "failed", "pruned"]

WITHOUT_PROMPTS = (*DIVERGENCES, *COSTS)
"""Metrics that a trial has whatever its prompts."""


def measured_metrics(config: RunConfig) -> list[str]:
    """The metrics that every trial of a run has; of tasks of lm-eval those that the search is steered by.

    A trial may report more: each figure of a task, and groups of a file's prompts.
    """
    labels = [text.label for text in config.data.extra_heldout]
    search = config.search
    steering = [o.metric for o in search.objectives] + [c.metric for c in search.constraints]
    return [
        *DIVERGENCES,
        *(f"{name}_{label}" for label in labels for name in DIVERGENCES),
        *prompt_metrics(config.probes),
        *dict.fromkeys(name for name in steering if _of_task(name, config.harness.tasks)),
        *COSTS,
    ]


def prompt_metrics(probes: ProbeConfig) -> list[str]:
    """The metrics of answers to these prompts; those of one context alone only where there are several."""
    long = [kind for kind in get_args(RetrievalKind) if kind in probes.kinds]
    general = [kind for kind in get_args(GeneralKind) if kind in probes.kinds]
    unseen = [f"{UNSEEN}{kind}" for kind in get_args(RetrievalKind) if kind in probes.unseen]
    lengths = [f"@{context}" for context in probes.contexts] if len(probes.contexts) > 1 else []
    places = [(metric_name(kind), ["", *lengths]) for kind in (*long, *unseen)]
    places += [(name, [""]) for name in (*general, *(["general"] if general else []))]
    places += [(file.name, [""]) for file in probes.files]
    return [
        f"{name}_{what}{place}" for name, found in places for place in found for what in FIGURES
    ]


def _of_task(metric: str, tasks: tuple[str, ...]) -> bool:
    return any(metric.startswith(f"{HARNESS}{task}_") for task in tasks)


@dataclass(frozen=True)
class TrialSpec:
    """What a worker has to evaluate.

    candidate counts the evaluated head maps of a rung, seeds first; a retry carries the same candidate
    and the trial number it repeats in retry_of. parent is a checkpoint to start the weights from, or None.
    """

    candidate: int
    head_map: dict[str, Any]
    """HeadMap.to_json()."""
    proxy_tokens: int
    """Distillation tokens before the evaluation."""
    parent: str | None = None
    seed: int = 0
    method: str = "search"
    """The seed method, "search", or "random-control"."""
    rung: int = 0
    """Index into search.lengths."""
    retry_of: int | None = None
    metrics: tuple[str, ...] = ()
    """Names of the metrics that the result must hold."""
    retention: bool = False
    """Asked the prompts of search.retention, with the parent's weights as they are if there is a parent."""
    final: bool = False
    """Measured on the final stage's text and prompts, with intervals."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON data."""
        return {**asdict(self), "metrics": list(self.metrics)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrialSpec:
        """Reads to_json's form. Raises ValueError where it is malformed."""
        try:
            return cls(**{**data, "metrics": tuple(data.get("metrics", ()))})
        except TypeError as error:
            raise ValueError(f"trial spec: malformed ({error})") from error


@dataclass(frozen=True)
class TrialResult:
    """What a worker answers. A failed or pruned result says why in reason."""

    candidate: int
    status: TrialStatus
    reason: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    """Distillation tokens that were spent."""
    seconds: float = 0.0
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Lower and upper end of those metrics that have a confidence interval."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrialResult:
        """Reads to_json's form. Raises ValueError where it is malformed."""
        try:
            return cls(**data)
        except TypeError as error:
            raise ValueError(f"trial result: malformed ({error})") from error


def trained_path(run_dir: Path, spec: TrialSpec) -> Path:
    """Where a distilled candidate's weights lie; the control study counts its candidates by itself, as do baselines of retention."""
    others = "retention-" if spec.retention else ""
    others = "random-" if spec.method == CONTROL else others
    return run_dir / "trials" / f"{others}{spec.candidate}-{spec.proxy_tokens}.safetensors"
