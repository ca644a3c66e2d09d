"""Trains one head map long, on a worker, and measures it at every length on the way."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..headmap import HeadMap
from ..models.full_heads import rope_fader
from ..search.space import analytic_costs
from ..search.trial import TrialWorker
from ..training.loop import NonFiniteLoss
from ..training.readings import distill_with_readings
from .records import LongSpec, Reading, Run

SECOND_SEED = 1
"""Added to the config's seed for the order of the batches of a map that is trained a second time."""


class LongWorker:
    """Trains LongSpecs: `LongWorker(payload)(spec)` answers a Run. The payload is TrialWorker's."""

    def __init__(self, payload: dict[str, Any]) -> None:
        """Loads what a trial's worker does."""
        self._trials = TrialWorker(payload)

    def __call__(self, spec: LongSpec) -> Run:
        """Trains and measures a map. The same spec gives the same metrics.

        Raises NonFiniteLoss, and whatever a trial's parts raise: executors make a reason of it.
        """
        started, trials = time.monotonic(), self._trials
        head_map = HeadMap.from_json(spec.head_map)
        seed = trials.config.seed + SECOND_SEED * spec.seed
        torch.manual_seed(seed)
        costs = analytic_costs(head_map, trials.config.cost)
        batch_tokens = trials.batch_sequences * trials.config.data.sequence_length
        path = None if spec.checkpoint is None else Path(spec.checkpoint)

        def measure(model: HydraHeadForCausalLM, tokens: int) -> dict[str, float]:
            # At 0 tokens a search measures the teacher's own full-attention heads, without the student's branch.
            metrics = trials.measure(model if tokens else trials.cut(head_map, trains=False))
            bad = [name for name, value in metrics.items() if not math.isfinite(value)]
            if bad:
                raise NonFiniteLoss(f"at {tokens} tokens {', '.join(sorted(bad))} is not finite")
            return metrics | costs

        try:
            student = trials.cut(head_map, trains=True)
            found = distill_with_readings(
                student,
                trials.teacher,
                partial(trials.batches, seed=seed),
                readings=spec.settings.lengths,
                measure=measure,
                config=trials.config.distill.model_copy(
                    update={"decay_share": spec.settings.decay_share}
                ),
                logits=trials.teacher_logits(),
                checkpoint=path,
                before_step=rope_fader(student, trials.config.student.full, batch_tokens),
            )
        finally:
            student = None  # type: ignore[assignment]
            trials.free_memory()
        readings = tuple(Reading(r.tokens, r.values, r.loss, r.seconds) for r in found)
        return Run(readings, time.monotonic() - started)
