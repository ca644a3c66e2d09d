"""The worker of the search: cuts a candidate out of the supernet, distils it if asked, and measures it.

A worker is built once a process from a plain payload and reads the rest from the run directory.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..attention.positions import set_rope_share
from ..config import RunConfig
from ..data.answers_file import read_answers
from ..data.corpora import Packed, packed_batches, training_batches
from ..data.niah import Probe
from ..data.tasks import RETRIEVAL_KINDS, make_probes
from ..errors import ConfigError, EnvironmentFault
from ..evaluation.divergence import TeacherReference, divergence
from ..evaluation.harness import open_harness
from ..evaluation.intervals import Bootstrap, MeasureWithIntervals
from ..evaluation.retrieval import retrieval
from ..evaluation.shares import Interval
from ..execution.base import DEVICE_MEMORY, HOST_MEMORY
from ..headmap import HeadMap
from ..models.cut import cut
from ..models.full_heads import FullBranch, full_branch, rope_fader, rope_share
from ..models.kernels import use_kernels
from ..models.sources import resolve_path
from ..models.supernet import Supernet
from ..models.teacher import Teacher, load_teacher
from ..training.distill import distill
from ..training.loop import NonFiniteLoss
from ..training.packing import RawBatch
from ..training.teacher_logits import TeacherLogits
from .final import final_config, final_file
from .records import TrialResult, TrialSpec, trained_path
from .space import analytic_costs
from .trained import Trunk, load_to_go_on, load_trained, save_trained

TRAIN_FILE, RETRIEVAL_FILE, HELDOUT_FILE = "train.npy", "retrieval.npy", "heldout.npy"
STARTS_FILE = "train_starts.npy"
"""Where documents begin in TRAIN_FILE, if its source has documents."""
SUPERNET_FILE = "supernet.safetensors"
TEACHER_LOGITS = "teacher_logits"
"""Folder of what candidates share of the teacher's answers, beyond distill.cache_gib, until the search is done;
made again where it is missing."""

PROBE_SEED = 7_000_003
"""Offset of the evaluation probes' seed from the run's, so that scores and trials use other prompts."""

RETENTION_SEED = 500_009
"""The same for prompts of search.retention."""

EVALUATION_TOKENS = {"cpu": 4096, "cuda": 65_536}
"""Most tokens of one evaluation forward, by device."""

GAMMA_SEQUENCES = 8
"""Training rows on which the gammas of normed full-attention heads are measured."""

NON_FINITE = "non-finite"


def heldout_file(label: str) -> str:
    """The file of an extra held-out text."""
    return f"heldout-{label}.npy"


class TrialWorker:
    """Evaluates TrialSpecs: `TrialWorker(payload)(spec)` answers a TrialResult.

    payload: {"config": RunConfig as JSON data, "run_dir": path}. From the run directory come the
    held-out tokens, the supernet and, for proxies with tokens, the training tokens, these from "train_dir" if given.
    """

    def __init__(self, payload: dict[str, Any]) -> None:
        """Loads teacher, supernet and prompts. Raises ConfigError or EnvironmentFault where one is missing."""
        self.config = _read_config(payload["config"])
        self.run_dir = Path(payload["run_dir"])
        self._train_dir = Path(payload.get("train_dir", self.run_dir))
        # With the serial executor this process has said who computes what.
        use_kernels(self.config.kernels, once=True)
        self.teacher = load_teacher(self.config.teacher)
        self.supernet = Supernet.load(self.run_dir / SUPERNET_FILE, self.teacher)
        self._tokens = EVALUATION_TOKENS[self.teacher.device.type]
        self._reference = self._read_reference(HELDOUT_FILE)
        labels = [text.label for text in self.config.data.extra_heldout]
        self._extra = {
            label: self._read_reference(heldout_file(label), self._reference.weight_VC)
            for label in labels
        }
        self._probes = evaluation_probes(self.teacher, self.config)
        self._fresh: list[Probe] | None = None
        self._final: MeasureWithIntervals | None = None
        self._harness = open_harness(self.config, self.teacher)
        self._full: FullBranch | None = None
        self._train: tuple[NDArray[Any], NDArray[Any] | None] | None = None
        self._logits: TeacherLogits | None = None

    def __call__(self, spec: TrialSpec) -> TrialResult:
        """Evaluates one candidate. The same spec gives the same metrics.

        Too little memory, and values that are not finite, come back as a failed result; calling again
        with its spec replays it. Anything else is raised.
        """
        started = time.monotonic()
        torch.manual_seed(spec.seed)
        reason: str | None = None
        metrics: dict[str, float] = {}
        intervals: dict[str, tuple[float, float]] = {}
        tokens = 0
        try:
            metrics, intervals, tokens = self._evaluate(spec)
        except NonFiniteLoss as error:
            reason = f"{NON_FINITE}: {error}"
        except torch.OutOfMemoryError as error:
            reason = f"{DEVICE_MEMORY}: {_first_line(error)}"
        except (MemoryError, RuntimeError) as error:
            if not _is_host_memory(error):
                raise
            reason = f"{HOST_MEMORY}: {_first_line(error)}"
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            reason = f"{NON_FINITE}: {', '.join(bad)}"
            metrics = {name: value for name, value in metrics.items() if name not in bad}
        return TrialResult(
            candidate=spec.candidate,
            status="ok" if reason is None else "failed",
            reason=reason,
            metrics=metrics,
            intervals=intervals,
            tokens=tokens,
            seconds=time.monotonic() - started,
        )

    def _evaluate(self, spec: TrialSpec) -> tuple[dict[str, float], dict[str, Interval], int]:
        """All metrics, their intervals, and the distillation tokens spent."""
        head_map = HeadMap.from_json(spec.head_map)
        # An all-FA candidate is the teacher: its gradients are rounding noise, which Adam blows up.
        distils = spec.proxy_tokens > 0 and head_map.fa_share < 1
        intervals: dict[str, Interval] = {}
        try:
            student = self.cut(head_map, trains=distils)
            train = self._train_as_promoted if spec.retention else self._distil
            tokens = train(student, spec) if distils else 0
            if spec.retention:
                metrics = self._measure_retention(student)
            elif spec.final:
                metrics, intervals = self._measure_finally(student)
            else:
                metrics = self.measure(student)
        finally:
            student = None  # type: ignore[assignment]
            self.free_memory()
        metrics |= analytic_costs(head_map, self.config.cost)
        if missing := sorted(set(spec.metrics) - set(metrics)):
            raise ConfigError(
                f"search: {', '.join(missing)} is no metric that a trial has; allowed: {', '.join(sorted(metrics))}"
            )
        return metrics, intervals, tokens

    def cut(self, head_map: HeadMap, *, trains: bool) -> HydraHeadForCausalLM:
        """The student of a map. In distillation its full-attention heads become what the teacher's are not."""
        full = None
        if trains:
            if self._full is None:
                self._full = read_branch(self.teacher, self.config, self._train_dir)
            full = self._full
        return cut(self.teacher, self.supernet, head_map, copy=trains, full=full)

    def measure(self, student: HydraHeadForCausalLM) -> dict[str, float]:
        """Every metric but the costs."""
        metrics = divergence(student, self._reference)
        for label, reference in self._extra.items():
            found = divergence(student, reference)
            metrics |= {f"{name}_{label}": value for name, value in found.items()}
        metrics |= retrieval(student, self._probes, batch_tokens=self._tokens)
        if self._harness is not None:
            metrics |= self._harness.measure(student)
        return metrics

    def _measure_finally(
        self, student: HydraHeadForCausalLM
    ) -> tuple[dict[str, float], dict[str, Interval]]:
        """The same on the final stage's text and prompts, and intervals of what is a mean over these."""
        if self._final is None:
            self._final = self._read_final()
        metrics, intervals = self._final(student)
        if self._harness is not None:
            metrics |= self._harness.measure(student)
        return metrics, intervals

    def _read_final(self) -> MeasureWithIntervals:
        config, options = final_config(self.config), self.config.search.final
        assert config is not None
        weight_VC = self._reference.weight_VC
        files = {"": HELDOUT_FILE} | {f"_{label}": heldout_file(label) for label in self._extra}
        return MeasureWithIntervals(
            {
                suffix: self._read_reference(final_file(name), weight_VC)
                for suffix, name in files.items()
            },
            evaluation_probes(self.teacher, config),
            Bootstrap(options.resamples, options.confidence, config.seed),
            batch_tokens=self._tokens,
        )

    def _measure_retention(self, student: HydraHeadForCausalLM) -> dict[str, float]:
        if self._fresh is None:
            self._fresh = retention_probes(self.teacher, self.config)
        return retrieval(student, self._fresh, batch_tokens=self._tokens)

    def _train_as_promoted(self, student: HydraHeadForCausalLM, spec: TrialSpec) -> int:
        """Takes the parent's weights as they are; without one, trains as a candidate is that reaches the last proxy."""
        if spec.parent is not None:
            tokens = load_trained(student, Path(spec.parent))
            set_rope_share(student, rope_share(self.config.student.full, tokens))
            return 0
        spent, parent = 0, None
        lengths = self.config.search.lengths
        for tokens in (n for n in lengths if 0 < n <= spec.proxy_tokens):
            step = replace(spec, proxy_tokens=tokens, parent=parent)
            spent += self._distil(student, step)
            parent = str(trained_path(self.run_dir, step))
        return spent

    def _distil(self, student: HydraHeadForCausalLM, spec: TrialSpec) -> int:
        """Trains the student up to spec.proxy_tokens, those of its parent included, and saves it."""
        config = self.config.distill
        done = load_to_go_on(student, Path(spec.parent)) if spec.parent is not None else 0
        batch_tokens = self.batch_sequences * self.config.data.sequence_length
        # Only where a longer proxy may come, and where it has something to go on from.
        goes_on = config.decay_share < 1 and spec.proxy_tokens < self.config.search.lengths[-1]
        trunk = Trunk(student, self.config, batch_tokens) if goes_on else None
        result = distill(
            student,
            self.teacher,
            self.batches,
            tokens=max(0, spec.proxy_tokens - done),
            config=config,
            start_step=round(done / batch_tokens),
            logits=self.teacher_logits(),
            at_fork=None if trunk is None else trunk.keep,
            before_step=rope_fader(student, self.config.student.full, batch_tokens),
        )
        total = done + result.tokens
        save_trained(student, trained_path(self.run_dir, spec), self.config, spec, total, trunk)
        return result.tokens

    def teacher_logits(self) -> TeacherLogits:
        """What this worker's candidates share of the teacher's answers to the batches."""
        if self._logits is None:
            folder = self.run_dir / TEACHER_LOGITS
            self._logits = TeacherLogits(self.teacher, self.config.distill, folder=folder)
        return self._logits

    @property
    def batch_sequences(self) -> int:
        """Sequences of a distillation step."""
        return max(1, self.config.distill.batch_tokens // self.config.data.sequence_length)

    def batches(self, start_step: int, seed: int | None = None) -> Iterator[RawBatch]:
        """The distillation's batches: the same for every candidate, so that none is lucky. seed is the config's."""
        if self._train is None:
            self._train = self._read_train()
        text, rows = self._train
        options: dict[str, Any] = {
            "niah_share": self.config.data.niah_share if rows is not None else 0.0,
            "batch_sequences": self.batch_sequences,
            "seed": self.config.seed if seed is None else seed,
            "start_step": start_step,
        }
        marks = self._train_dir / STARTS_FILE
        if self.config.distill.packed and marks.exists():
            starts = _read_tokens(marks)
            prompts = None if rows is None else Packed(rows)
            return packed_batches(Packed(text, starts), prompts, **options)
        return training_batches(text, rows, **options)

    def _read_train(self) -> tuple[NDArray[Any], NDArray[Any] | None]:
        text = _read_tokens(self._train_dir / TRAIN_FILE)
        if self.config.data.niah_share <= 0:
            return text, None
        return text, _read_tokens(self._train_dir / RETRIEVAL_FILE)

    def _read_reference(self, name: str, weight_VC: Tensor | None = None) -> TeacherReference:
        tokens_NT = torch.from_numpy(_read_tokens(self.run_dir / name).astype(np.int64))
        return TeacherReference(
            self.teacher, tokens_NT, batch_tokens=self._tokens, weight_VC=weight_VC
        )

    def free_memory(self) -> None:
        """Lets go of what the last candidate held."""
        gc.collect()
        if self.teacher.device.type == "cuda":
            torch.cuda.empty_cache()


def read_branch(teacher: Teacher, config: RunConfig, run_dir: Path) -> FullBranch:
    """The full-attention heads of a distilled candidate, as section student.full has them."""
    options = config.student.full
    if not options.norm:
        return FullBranch(options)
    rows = _read_tokens(run_dir / TRAIN_FILE)[:GAMMA_SEQUENCES]
    return full_branch(teacher, options, torch.from_numpy(rows.astype(np.int64)))


def evaluation_probes(teacher: Teacher, config: RunConfig) -> list[Probe]:
    """The prompts of every trial, disjoint from the scores': retrieval kinds at each context, general ones and files once."""
    probes = config.probes
    kinds = [(kind, False) for kind in probes.kinds] + [(kind, True) for kind in probes.unseen]
    drawn = [
        probe
        for kind, unseen in kinds
        # General prompts have a length of their own.
        for context in (probes.contexts if kind in RETRIEVAL_KINDS else probes.contexts[:1])
        for probe in make_probes(
            teacher.tokenizer,
            kind,
            probes.prompts,
            context,
            keys=probes.multi_keys,
            digits=probes.digits,
            seed=config.seed + PROBE_SEED,
            unseen=unseen,
        )
    ]
    read = [read_answers(resolve_path(f.path), teacher.tokenizer, f.name) for f in probes.files]
    return [*drawn, *(probe for found in read for probe in found)]


def retention_probes(teacher: Teacher, config: RunConfig) -> list[Probe]:
    """The prompts of search.retention: of the same making as a trial's, and none of them."""
    wanted = {"kinds": config.search.retention.kinds, "prompts": config.search.retention.prompts}
    probes = config.probes.model_copy(update={**wanted, "unseen": (), "files": ()})
    seed = config.seed + RETENTION_SEED
    return evaluation_probes(teacher, config.model_copy(update={"probes": probes, "seed": seed}))


def _read_config(data: dict[str, Any]) -> RunConfig:
    fields = dict(data)
    if "schema_" in fields:
        fields["schema"] = fields.pop("schema_")
    return RunConfig.model_validate(fields)


def _read_tokens(path: Path) -> NDArray[Any]:
    try:
        tokens: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise EnvironmentFault(f"{path}: cannot be read ({error})") from error
    return tokens


def _is_host_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
