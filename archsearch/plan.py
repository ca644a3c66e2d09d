"""What a run is going to do: its stages, and an estimate of tokens, time and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from .config import RunConfig, TextConfig
from .models.teacher import TeacherInfo, pick_device
from .report.records import bytes_text

STAGES = ("teacher", "data", "supernet", "scores", "search", "report")
TRAIN = "train"
"""The value of supernet.source that trains a supernet in the run."""
DECODE_EFFICIENCY = 0.08
FORWARD_EFFICIENCY = 0.4
"""Shares of the measured matmul rate that drawing text and forwards reach (stated, not measured)."""
WORKER_OVERHEAD_BYTES = 600 * 1024**2
"""Python with torch and transformers loaded."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage, what it does in words, and its estimated seconds (0: a moment)."""

    name: str
    what: str
    seconds: float
    finished: bool = False


@dataclass(frozen=True)
class Plan:
    """The stages of a run and what they need."""

    stages: tuple[PlannedStage, ...]
    memory_bytes: int
    disk_bytes: int
    rate_flops: float

    @property
    def seconds(self) -> float:
        """Estimated seconds of the stages that are still to do."""
        return sum(stage.seconds for stage in self.stages if not stage.finished)

    def lines(self) -> list[str]:
        """The plan as text, a line a stage and one of totals."""
        rows = [
            f"  {s.name:<9} {'done' if s.finished else duration(s.seconds):<9} {s.what}"
            for s in self.stages
        ]
        total = (
            f"  in all about {duration(self.seconds)} at {self.rate_flops / 1e9:,.0f} GFLOP/s, "
            f"{bytes_text(self.memory_bytes)} of memory, {bytes_text(self.disk_bytes)} of disk"
        )
        return [*rows, total]


def duration(seconds: float) -> str:
    """Seconds in the unit a person would take."""
    if seconds < 1:
        return "moments"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def train_tokens(config: RunConfig) -> int:
    """Distinct training tokens that the run needs: none with a loaded supernet and no distillation."""
    supernet = config.supernet.tokens if config.supernet.source == TRAIN else 0
    tokens = max(supernet, *config.search.proxy_tokens)
    most = config.data.max_train_sequences
    return tokens if most is None else min(tokens, most * config.data.sequence_length)


@dataclass(frozen=True)
class TrainingRows:
    """The sequences that a run trains on: rows of text, retrieval prompts, and the rows of the text to pass over."""

    text: int
    prompts: int
    skip: int


def training_rows(config: RunConfig) -> TrainingRows:
    """How many training sequences the run reads; none of either kind where it trains nothing.

    skip keeps a corpus that serves as held-out text too from being trained on there.
    """
    data = config.data
    rows = math.ceil(train_tokens(config) / data.sequence_length)
    prompts = round(rows * data.niah_share)
    same_corpus = data.train.source != "teacher" and _corpus(data.train) == _corpus(data.heldout)
    skip = data.heldout_sequences if same_corpus else 0
    return TrainingRows(max(1, rows - prompts) if rows else 0, prompts, skip)


def _corpus(text: TextConfig) -> dict[str, Any]:
    """What decides which documents a text has; a teacher's temperature does not."""
    return text.model_dump(exclude={"temperature"})


def evaluation_tokens(config: RunConfig) -> int:
    """Tokens of one candidate's evaluation: held-out text, single and multi-key prompts."""
    text = config.data.heldout_sequences * config.data.sequence_length
    return text + 2 * config.probes.prompts * sum(config.probes.contexts)


def make_plan(
    config: RunConfig,
    info: TeacherInfo,
    finished: Collection[str] = (),
    *,
    rate_flops: float | None = None,
) -> Plan:
    """Estimates a run from the teacher's size and a matmul rate, measured here and now if not given."""
    rate = rate_flops or matmul_rate(pick_device(config.teacher.device))
    forward = 2 * info.num_parameters / (rate * FORWARD_EFFICIENCY)
    work = {
        "teacher": _teacher(info),
        "data": _data(config, info, rate),
        "supernet": _supernet(config, info, forward),
        "scores": _scores(config, info, forward),
        "search": _search(config, forward),
        "report": ("Pareto plot, head maps, pareto.json", 0.0),
    }
    stages = tuple(PlannedStage(name, *work[name], finished=name in finished) for name in STAGES)
    memory, disk = _memory_bytes(config, info), _disk_bytes(config, info)
    return Plan(stages, memory, disk, rate)


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of a square matmul on the device, fp32 on a CPU and bf16 on a GPU; takes some 0.1 s."""
    size, dtype = (512, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    a = torch.ones(size, size, device=device, dtype=dtype)
    spent, count = 0.0, 0
    a @ a
    while spent < 0.1:
        start = time.perf_counter()
        float((a @ a)[0, 0])
        spent += time.perf_counter() - start
        count += 1
    return 2 * size**3 * count / spent


def _teacher(info: TeacherInfo) -> tuple[str, float]:
    shape = info.shape
    millions = info.num_parameters / 1e6
    size = f"{millions:,.0f}" if millions >= 10 else f"{millions:.2g}"
    what = (
        f"{shape.family}, {size} M parameters, {shape.num_layers} layers x "
        f"{shape.num_heads} heads, {shape.num_kv_heads} KV heads of {shape.head_dim}"
    )
    return what, 2 + info.num_parameters / 2e7


def _data(config: RunConfig, info: TeacherInfo, rate: float) -> tuple[str, float]:
    drawn, said = 0, []
    heldout = config.data.heldout_sequences * config.data.sequence_length
    for name, text, tokens in (
        ("train", config.data.train, train_tokens(config)),
        ("held-out", config.data.heldout, heldout),
    ):
        if not tokens:
            continue
        origin = {"file": text.path, "datasets": text.name}.get(text.source, "the teacher")
        said.append(f"{tokens:,} {name} tokens from {origin}")
        drawn += tokens if text.source == "teacher" else 0
    return ", ".join(said), drawn * 2 * info.num_parameters / (rate * DECODE_EFFICIENCY)


def _supernet(config: RunConfig, info: TeacherInfo, forward: float) -> tuple[str, float]:
    if config.supernet.source != TRAIN:
        return f"loaded from {config.supernet.source}", 1.0
    attention = 4 * info.hidden_size * info.shape.num_heads * info.shape.head_dim
    twins = 3 * attention * info.shape.num_layers / info.num_parameters
    what = f"{info.shape.total_heads:,} twins aligned on {config.supernet.tokens:,} tokens"
    return what, config.supernet.tokens * forward * (1 + 2 * twins)


def _scores(config: RunConfig, info: TeacherInfo, forward: float) -> tuple[str, float]:
    scoring = config.scoring
    pairs = 2 * scoring.pairs * 2 * scoring.context
    alone = scoring.replacement_sequences * scoring.replacement_length
    what = (
        f"{2 * scoring.pairs} clean and corrupt pairs of {scoring.context} tokens, "
        f"each of {info.shape.total_heads:,} heads replaced alone"
    )
    return what, forward * (1.5 * pairs + 0.5 * info.shape.total_heads * alone)


def _search(config: RunConfig, forward: float) -> tuple[str, float]:
    search = config.search
    candidates = search.trials * (2 if search.random_control else 1)
    tokens = evaluation_tokens(config)
    each = [forward * (tokens + 4 * steps) for steps in search.proxy_tokens]
    # Later rungs take the fronts alone, some third of the candidates.
    counts = [candidates, *[max(1, search.trials // 3)] * (len(each) - 1)]
    control = f" and {search.trials} random" if search.random_control else ""
    proxies = ", ".join(f"{steps:,}" for steps in search.proxy_tokens)
    what = (
        f"{search.trials} trials{control} by {search.sampler}, proxies of {proxies} tokens, "
        f"{_workers(config)} {config.execution.executor} worker(s)"
    )
    total = sum(count * cost for count, cost in zip(counts, each, strict=True))
    on_gpu = pick_device(config.teacher.device).type == "cuda"
    return what, total / (_workers(config) if on_gpu else 1)


def _workers(config: RunConfig) -> int:
    return config.execution.workers if config.execution.executor == "ray" else 1


def _element_bytes(config: RunConfig) -> int:
    return 4 if config.teacher.dtype == "float32" else 2


def _twin_parameters(info: TeacherInfo) -> int:
    shape = info.shape
    # q, k, v and the output gate, each hidden_size x (H D) a layer.
    return 4 * info.hidden_size * shape.num_heads * shape.head_dim * shape.num_layers


def _memory_bytes(config: RunConfig, info: TeacherInfo) -> int:
    """Host memory at the peak, counting a GPU's as the host's: the larger of alignment and search."""
    teacher = info.num_parameters * _element_bytes(config)
    twins = 4 * _twin_parameters(info)
    aligning = 4 * twins if config.supernet.source == TRAIN else twins
    logits = 4 * info.vocab_size * 2048
    distilling = 3 * twins if max(config.search.proxy_tokens) else 0
    worker = teacher + twins + distilling + logits + WORKER_OVERHEAD_BYTES
    if config.execution.executor == "ray":
        workers = config.execution.workers * worker + 2 * WORKER_OVERHEAD_BYTES
    else:
        workers = worker
    return max(teacher + aligning + logits + WORKER_OVERHEAD_BYTES, workers)


def _disk_bytes(config: RunConfig, info: TeacherInfo) -> int:
    twins = 4 * _twin_parameters(info)
    checkpoint = 3 * twins if config.supernet.source == TRAIN else 0
    # A distilled candidate is stored in fp16; later rungs take some third of them.
    stored = config.search.trials if config.search.proxy_tokens[0] else config.search.trials // 3
    distilled = stored * twins // 2 if max(config.search.proxy_tokens) else 0
    return checkpoint + twins + distilled + 64 * 1024**2
