"""Trains one head map long, on a worker, and measures it at every length on the way.

The search's own proxies are trained as its trials are, each by itself; all other lengths are readings of one long run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from copy import copy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..headmap import HeadMap
from ..models.full_heads import rope_fader
from ..search.records import TrialSpec
from ..search.space import analytic_costs
from ..search.trained import Trunk, load_to_go_on, save_trained
from ..search.trial import TrialWorker
from ..training.distill import distill
from ..training.loop import NonFiniteLoss
from ..training.readings import distill_with_readings
from .records import LongSpec, Reading, Run

SECOND_SEED = 1
"""Added to the config's seed for the order of the batches of a map that is trained a second time."""


class LongWorker:
    """Trains LongSpecs: `LongWorker(payload)(spec)` answers a Run. The payload is TrialWorker's."""

    def __init__(self, payload: dict[str, Any]) -> None:
        """Loads what a trial's worker does."""
        self._long = StudyTrials(payload)
        self._own = self._long.on_own_text()

    def __call__(self, spec: LongSpec) -> Run:
        """Trains and measures a map. The same spec gives the same metrics.

        Raises NonFiniteLoss, and whatever a trial's parts raise: executors make a reason of it.
        """
        started = time.monotonic()
        head_map = HeadMap.from_json(spec.head_map)
        seed = self._long.config.seed + SECOND_SEED * spec.seed
        torch.manual_seed(seed)
        # After the long run, whose checkpoint has all of it by then.
        found = self._long.read_long(head_map, spec, seed)
        found += self._own.read_proxies(head_map, spec.settings.proxies, seed)
        found.sort(key=lambda reading: reading.tokens)
        return Run(tuple(found), time.monotonic() - started)


class StudyTrials(TrialWorker):
    """A trial's worker that reads a map at several lengths."""

    def on_own_text(self) -> Self:
        """The same worker on the run's own training text: of a study's longer one, batches would be others."""
        self.teacher_logits()  # one store for both
        own = copy(self)
        own._train_dir, own._train, own._full = self.run_dir, None, None
        return own

    def read_long(self, head_map: HeadMap, spec: LongSpec, seed: int) -> list[Reading]:
        """Readings of one long run, from 0 tokens to the end."""
        settings = spec.settings

        def measure(model: HydraHeadForCausalLM, tokens: int) -> dict[str, float]:
            # At 0 tokens a search measures the teacher's own full-attention heads, without the student's branch.
            model = model if tokens else self.cut(head_map, trains=False)
            return self._measured(model, head_map, tokens)

        try:
            student = self.cut(head_map, trains=True)
            found = distill_with_readings(
                student,
                self.teacher,
                partial(self.batches, seed=seed),
                readings=settings.trunk_lengths,
                measure=measure,
                config=self.config.distill.model_copy(update={"decay_share": settings.decay_share}),
                logits=self.teacher_logits(),
                checkpoint=None if spec.checkpoint is None else Path(spec.checkpoint),
                before_step=self._fader(student),
            )
        finally:
            student = None  # type: ignore[assignment]
            self.free_memory()
        return [Reading(r.tokens, r.values, r.loss, r.seconds) for r in found]

    def read_proxies(
        self, head_map: HeadMap, proxies: tuple[int, ...], seed: int
    ) -> Iterator[Reading]:
        """Readings of a candidate that is promoted from proxy to proxy; these ascend."""
        seconds, parent = 0.0, None
        with TemporaryDirectory() as folder:
            for tokens in proxies:
                path = Path(folder) / f"{tokens}.safetensors"
                reading = self._read_proxy(head_map, tokens, seed, parent, path)
                seconds, parent = seconds + reading.seconds, path
                yield Reading(tokens, reading.metrics, reading.loss, seconds)

    def _read_proxy(
        self, head_map: HeadMap, tokens: int, seed: int, parent: Path | None, path: Path
    ) -> Reading:
        """TrialWorker's distillation step for step, on batches of that seed; its weights go to path."""
        config, batch_tokens = self.config, self._batch_tokens
        try:
            student = self.cut(head_map, trains=True)
            done = 0 if parent is None else load_to_go_on(student, parent)
            goes_on = config.distill.decay_share < 1 and tokens < max(config.search.proxy_tokens)
            trunk = Trunk(student, config, batch_tokens) if goes_on else None
            result = distill(
                student,
                self.teacher,
                partial(self.batches, seed=seed),
                tokens=max(0, tokens - done),
                config=config.distill,
                start_step=round(done / batch_tokens),
                logits=self.teacher_logits(),
                at_fork=None if trunk is None else trunk.keep,
                before_step=self._fader(student),
            )
            spec = TrialSpec(0, head_map.to_json(), tokens)
            save_trained(student, path, config, spec, done + result.tokens, trunk)
            metrics = self._measured(student, head_map, tokens)
        finally:
            student = None  # type: ignore[assignment]
            self.free_memory()
        return Reading(tokens, metrics, result.last_loss, result.seconds)

    def _measured(
        self, model: HydraHeadForCausalLM, head_map: HeadMap, tokens: int
    ) -> dict[str, float]:
        metrics = self.measure(model)
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteLoss(f"at {tokens} tokens {', '.join(sorted(bad))} is not finite")
        return metrics | analytic_costs(head_map, self.config.cost)

    @property
    def _batch_tokens(self) -> int:
        return self.batch_sequences * self.config.data.sequence_length

    def _fader(self, student: HydraHeadForCausalLM) -> Any:
        return rope_fader(student, self.config.student.full, self._batch_tokens)
