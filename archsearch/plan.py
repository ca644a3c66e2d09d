"""What a run is going to do: its stages, and an estimate of tokens, time and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from .config import DataConfig, RunConfig, ScoreMethod, TextConfig
from .data.sampling import MOST_ON_GPU
from .footprint import TRAIN, Footprint, footprint
from .models.teacher import TeacherInfo, pick_device
from .report.records import bytes_text
from .search.driver import scored_methods
from .search.final import final_config
from .search_plan import (
    GENERAL_TOKENS,
    SearchDone,
    planned_rungs,
    search_forwards,
    search_lines,
    seconds_left,
)

STAGES = ("teacher", "data", "supernet", "scores", "search", "report")

DECODE_EFFICIENCY, FORWARD_EFFICIENCY = 0.08, 0.4
"""Shares of a CPU's matmul rate that drawing text and forwards reach (stated, not measured)."""
GPU_EFFICIENCY, GPU_WIDTH, GPU_MOST = 0.18, 576, 0.55
"""Share of a GPU's matmul rate at that hidden size, growing with it up to the last. Measured on an H200: 12 to 26% in
alignment, distillation and evaluation of SmolLM2-135M, 54 to 66% at hidden size 2048."""
GPU_SCORING = 0.25
"""Share of that rate in scoring, whose forwards are short: measured on an H200 with SmolLM2-135M."""
GPU_STEP_SECONDS = 1e-3
"""A layer's share of a decode step on a GPU, bound by launches: measured on an H200, whatever the batch."""
RAY_SECONDS = 10.0
"""Starting Ray and its workers, without their models."""

DRAWN_PAIRS = 1.5
"""Pairs drawn for each that the teacher answers."""
ANSWER_TOKENS = 6
MLP_SHARE = 0.6
"""Share of the MLPs in a forward: with attention frozen, only they run again."""
SENDER_ROUNDS = 2
"""Rounds of path patching after which no receiver is new."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage, what it does in words (a line or several), and its estimated seconds (0: a moment)."""

    name: str
    what: str
    seconds: float
    finished: bool = False


@dataclass(frozen=True)
class Done:
    """What a run has done of stages that are not finished."""

    aligned: float = 0.0
    """Share of the alignment."""
    scored: Collection[ScoreMethod] = ()
    search: SearchDone = field(default_factory=SearchDone)


@dataclass(frozen=True)
class Plan:
    """The stages of a run and what they need."""

    stages: tuple[PlannedStage, ...]
    needs: Footprint
    rate_flops: float
    gpu_room: int = 0
    """Memory in bytes of the GPUs that it would run on; 0 where there are none."""
    reused: tuple[str, ...] = ()
    """Lines on what is taken of another run."""

    @property
    def seconds(self) -> float:
        """Estimated seconds of the stages that are still to do."""
        return sum(stage.seconds for stage in self.stages if not stage.finished)

    def lines(self) -> list[str]:
        """The plan as text, a line a stage and one of totals."""
        rows = [line for stage in self.stages for line in _stage_lines(stage)]
        gpu = f", {bytes_text(self.needs.gpu)} of GPU memory" if self.needs.gpu else ""
        total = (
            f"  {'in all':<9} {duration(self.seconds):<9} at {self.rate_flops / 1e9:,.0f} GFLOP/s; "
            f"{bytes_text(self.needs.host)} of memory{gpu}, {bytes_text(self.needs.disk)} of disk"
        )
        if self.needs.gpu <= self.gpu_room or not self.gpu_room:
            return [*self.reused, *rows, total]
        room = bytes_text(self.gpu_room)
        hint = "lower distill.batch_tokens, supernet.batch_tokens or execution.workers"
        return [*self.reused, *rows, total, f"  warning: the GPU memory here is {room}: {hint}"]


def _stage_lines(stage: PlannedStage) -> list[str]:
    what, *more = stage.what.splitlines() or [""]
    time = "done" if stage.finished else duration(stage.seconds)
    # What is left to do of a stage that is done need not be said.
    rest = [] if stage.finished else [f"{'':<22}{line}" for line in more]
    return [f"  {stage.name:<9} {time:<9} {what}", *rest]


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
    tokens = max(supernet, *config.search.lengths)
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

    skip keeps a corpus that serves as held-out text too from being trained on there: each takes its first rows.
    """
    data = config.data
    rows = math.ceil(train_tokens(config) / data.sequence_length)
    # Whoever trains on a share of prompts needs one at least.
    prompts = max(1, round(rows * data.niah_share)) if rows and data.niah_share else 0
    same = [count for text, count in heldout_rows(config) if _corpus(text) == _corpus(data.train)]
    skip = max(same, default=0) if data.train.source != "teacher" else 0
    return TrainingRows(max(1, rows - prompts) if rows else 0, prompts, skip)


def heldout_rows(config: RunConfig) -> list[tuple[TextConfig, int]]:
    """The held-out texts and how many sequences of each are read, those of the final stage included."""
    found, final = config.data.heldout_texts, final_config(config)
    if final is None:
        return found
    more = final.data.heldout_texts
    return [(text, count + own) for (text, count), (_, own) in zip(found, more, strict=True)]


def texts(data: DataConfig) -> dict[str, TextConfig]:
    """The texts of a config by their field within data."""
    extra = {f"extra_heldout[{index}]": text for index, text in enumerate(data.extra_heldout)}
    return {"train": data.train, "heldout": data.heldout, **extra}


def text_origin(text: TextConfig) -> str:
    """Where a text comes from, in words."""
    named = {"file": text.path, "datasets": text.name, "docstrings": "Python's docstrings"}
    return named.get(text.source) or "the teacher"


def _corpus(text: TextConfig) -> dict[str, Any]:
    """What decides which documents a text has; a teacher's temperature does not, nor what a held-out text adds."""
    return text.model_dump(include={*TextConfig.model_fields} - {"temperature"})


@dataclass(frozen=True)
class Speed:
    """Seconds a token that a device takes for a model's forward and for drawing text, the latter also a step."""

    device: str
    forward: float
    draw: float
    step: float

    @classmethod
    def of(cls, info: TeacherInfo, device: str, rate_flops: float) -> Speed:
        """Estimates from a matmul rate in FLOP/s."""
        flops = 2 * info.num_parameters / rate_flops
        if device == "cpu":
            return cls(device, flops / FORWARD_EFFICIENCY, flops / DECODE_EFFICIENCY, 0.0)
        forward = flops / min(GPU_MOST, GPU_EFFICIENCY * info.hidden_size / GPU_WIDTH)
        return cls(device, forward, forward, GPU_STEP_SECONDS * info.shape.num_layers)


def make_plan(
    config: RunConfig,
    info: TeacherInfo,
    finished: Collection[str] = (),
    *,
    last: str = STAGES[-1],
    done: Done = Done(),
    rate_flops: float | None = None,
    device: str | None = None,
) -> Plan:
    """Estimates a run up to the stage `last` from the teacher's size and a matmul rate, measured here and now if not given.

    finished: stages that are done; done: what there is of the others. device is "cpu" or "cuda", the config's where it is None.
    """
    place = pick_device(config.teacher.device) if device is None else torch.device(device)
    rate = rate_flops or matmul_rate(place)
    speed = Speed.of(info, place.type, rate)
    work = {
        "teacher": _teacher(info),
        "data": _data(config, speed),
        "supernet": _supernet(config, info, speed, done.aligned),
        "scores": _scores(config, info, speed, done.scored),
        "search": _search(config, info, speed, done.search),
        "report": ("Pareto plot, head maps, pareto.json", 0.0),
    }
    names = STAGES[: STAGES.index(last) + 1]
    stages = tuple(PlannedStage(name, *work[name], finished=name in finished) for name in names)
    searches = "search" in names
    needs = footprint(config, info, place.type, searches=searches)
    return Plan(stages, needs, rate, _gpu_room(config, place, searches=searches))


def _gpu_room(config: RunConfig, place: torch.device, *, searches: bool) -> int:
    """Memory in bytes of the GPUs that the run's workers share, or of that of the stages before the search."""
    if place.type == "cpu":
        return 0
    share = _workers(config) * config.execution.gpus_per_worker if searches else 1
    count = math.ceil(share) or 1
    present = range(min(count, torch.cuda.device_count()))
    return sum(torch.cuda.get_device_properties(index).total_memory for index in present)


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


def _data(config: RunConfig, speed: Speed) -> tuple[str, float]:
    seconds, said = 0.0, []
    length = config.data.sequence_length
    data = config.data
    parts = [("train", data.train, training_rows(config).text)]
    names = ["held-out", *(text.label for text in data.extra_heldout)]
    parts += [(name, *part) for name, part in zip(names, heldout_rows(config), strict=True)]
    for name, text, sequences in parts:
        if not sequences:
            continue
        said.append(f"{sequences * length:,} {name} tokens from {text_origin(text)}")
        if text.source == "teacher":
            steps = math.ceil(sequences / MOST_ON_GPU) * length
            seconds += sequences * length * speed.draw + steps * speed.step
    return ", ".join(said), seconds


def _supernet(
    config: RunConfig, info: TeacherInfo, speed: Speed, aligned: float
) -> tuple[str, float]:
    if config.supernet.source != TRAIN:
        return f"loaded from {config.supernet.source}", 1.0
    attention = 4 * info.hidden_size * info.shape.num_heads * info.shape.head_dim
    twins = 3 * attention * info.shape.num_layers / info.num_parameters
    there = f", {aligned:.0%} done" if aligned else ""
    what = f"{info.shape.total_heads:,} twins aligned on {config.supernet.tokens:,} tokens{there}"
    return what, (1 - aligned) * config.supernet.tokens * speed.forward * (1 + 2 * twins)


def _scores(
    config: RunConfig, info: TeacherInfo, speed: Speed, scored: Collection[ScoreMethod]
) -> tuple[str, float]:
    scoring, shape, methods = config.scoring, info.shape, scored_methods(config)
    pairs = (len(scoring.retrieval) + len(scoring.general)) * scoring.pairs
    own = f" and those of {scoring.pairs_file}" if scoring.pairs_file else ""
    groups = shape.num_layers * shape.num_kv_heads
    names = ", ".join(f"{name} (done)" if name in scored else name for name in methods)
    what = (
        f"{shape.total_heads:,} heads and {groups:,} KV groups by {names}, on "
        f"{pairs} clean and corrupt pairs{own}"
    )
    costs = _score_tokens(config, info)
    forward = speed.forward / (GPU_SCORING if speed.device == "cuda" else 1)
    left = [name for name in methods if name not in scored]
    return what, forward * sum(costs[name] for name in ("pairs", *left)) if left else 0.0


def _score_tokens(config: RunConfig, info: TeacherInfo) -> dict[str, float]:
    """What drawing pairs and each scoring method cost, in tokens of a whole forward."""
    scoring, shape = config.scoring, info.shape
    context = sum(scoring.contexts) / len(scoring.contexts)
    retrieval = len(scoring.retrieval) * scoring.pairs * context
    general = len(scoring.general) * scoring.pairs * GENERAL_TOKENS
    both = retrieval + general
    text = scoring.replacement_sequences * scoring.replacement_length
    # A change in one layer runs through half of the layers on the average.
    swaps = 0.5 * shape.num_layers * (shape.num_heads + shape.num_kv_heads)
    # Nothing changes before the needle, which stands anywhere.
    lengths = bool(scoring.retrieval) * context + bool(scoring.general) * GENERAL_TOKENS
    sent = scoring.sender_pairs * lengths / 2
    num_pairs = (len(scoring.retrieval) + len(scoring.general)) * scoring.pairs
    received = swaps * MLP_SHARE * num_pairs * ANSWER_TOKENS
    senders = 0.5 * shape.total_heads * MLP_SHARE * sent * min(SENDER_ROUNDS, scoring.sender_rounds)
    return {
        "pairs": 2 * DRAWN_PAIRS * both + text,
        "causal": 2 * both + received + senders,
        "attribution": 5 * both,
        "retrieval_heads": retrieval or general,
        "duo_gates": 6 * scoring.gate_steps * context,
        "replacement_kl": swaps * text,
        "replacement_nll": swaps * (retrieval or general),
        "leave_one_in": swaps * text,
        "restoration": 0.5 * shape.num_layers * text,
    }


def _search(
    config: RunConfig, info: TeacherInfo, speed: Speed, done: SearchDone
) -> tuple[str, float]:
    workers, rungs = _workers(config), planned_rungs(config, done)
    total = speed.forward * search_forwards(config, rungs)
    # Workers on one device share what it can do.
    devices = workers * config.execution.gpus_per_worker if speed.device == "cuda" else 1
    total = min(total / max(1, devices), seconds_left(config, done))
    ray = RAY_SECONDS if config.execution.executor == "ray" else 0.0
    what = "\n".join(search_lines(config, rungs, done))
    return what, total + _teacher(info)[1] + ray


def _workers(config: RunConfig) -> int:
    return config.execution.workers if config.execution.executor == "ray" else 1
