"""The plain records that cross the boundary to a worker: JSON-able, no tensors, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ..config import GeneralKind, Metric, ProbeConfig
from .front import CONTROL

TrialStatus = Literal["ok", "failed", "pruned"]

WITHOUT_PROMPTS: tuple[Metric, ...] = ("kl", "top1_agreement", "fa_share", "cache_bytes")
"""Metrics that a trial has whatever its prompts."""


def measured_metrics(probes: ProbeConfig) -> list[Metric]:
    """The metrics of a trial with these prompts, in the order of Metric."""
    names = {name for kind in probes.kinds for name in (kind, f"niah_{kind}")}
    if names & set(get_args(GeneralKind)):
        names.add("general")
    found = {*WITHOUT_PROMPTS, *(f"{name}_{what}" for name in names for what in ("nll", "match"))}
    return [metric for metric in get_args(Metric) if metric in found]


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
    """Index into search.proxy_tokens."""
    retry_of: int | None = None
    metrics: tuple[str, ...] = ()
    """Names of the metrics that the result must hold."""

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
    """Where a distilled candidate's weights lie; the control study counts its candidates by itself."""
    control = "random-" if spec.method == CONTROL else ""
    return run_dir / "trials" / f"{control}{spec.candidate}-{spec.proxy_tokens}.safetensors"
