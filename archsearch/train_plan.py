"""What a chosen head map is going to be trained on: whose it is, for how long, with which settings, and what that costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .changes import differences
from .chosen import Choice, Chosen, find
from .config import RunConfig
from .data.corpora import Packed
from .errors import ConfigError
from .evaluation.harness import check_harness_package
from .export import check_directory, check_writable
from .footprint import checkpoint_bytes, teacher_bytes
from .headmap import HeadMap, Operator
from .ignored import ignored_in_training
from .inputs import check_teacher_files
from .models.kernels import check_kernels
from .models.teacher import TeacherInfo, inspect_teacher, pick_device
from .plan import Speed, duration, matmul_rate
from .rundir import RunDir
from .search.trial import RETRIEVAL_FILE, SUPERNET_FILE, TRAIN_FILE
from .search_plan import TRAINING_COST, evaluation_tokens
from .stages import check_supernet
from .train_settings import (
    digest_of,
    field_of,
    read_settings,
    settings_of,
    whole_batches,
)
from .training.long_rows import long_text

TRAINING_FILE = "training.json"
FOLDER = "train"
"""In a run directory: a folder for each training that is given none."""


@dataclass(frozen=True)
class TrainPlan:
    """A training of a chosen head map. settings are all that its result depends on, as plain JSON data."""

    config: RunConfig
    """The run's, with what --set changes."""
    chosen: Chosen
    directory: Path
    settings: dict[str, Any]
    text_tokens: int
    """Of the run's training text; 0 where it has none, and text is made first."""
    warnings: tuple[str, ...]
    seconds: float
    """Estimated, in all."""
    disk_bytes: int

    @property
    def head_map(self) -> HeadMap:
        """What is trained."""
        return self.chosen.head_map

    @property
    def tokens(self) -> int:
        """Of distillation, in whole batches; none for a map of full attention alone, which is the teacher's."""
        return 0 if self.head_map.fa_share == 1 else whole_batches(self.config)

    @property
    def makes_text(self) -> bool:
        """Whether the run has no training text."""
        return not self.text_tokens

    @property
    def name(self) -> str:
        """The head map in words."""
        return f"{self.chosen.name}, {self.head_map.fa_share:.1%} full-attention heads"

    def lines(self) -> list[str]:
        """The plan as text."""
        distill, long = self.config.distill, self.config.long_context
        text = "; training text is made first"
        if self.text_tokens:
            share = 1 - self.config.data.niah_share
            times = max(self.tokens, long.tokens) * share / self.text_tokens
            text = f"; the text is gone over {times:.1f} times" if times > 1 else ""
        stages = [f"{self.tokens:,} tokens of distillation at {distill.learning_rate:g}"]
        if long.tokens:
            stages.append(
                f"{long.tokens:,} tokens in rows of {long.sequence_length:,} at {long.learning_rate:g}"
            )
        return [
            f"  student   {self.name} -> {self.directory}",
            f"  training  {', then '.join(stages)}{text}",
            f"  in all about {duration(self.seconds)}",
            *(f"  warning: {warning}" for warning in self.warnings),
        ]


def plan_training(
    run_dir: RunDir,
    choice: Choice,
    *,
    tokens: int | None = None,
    overrides: Sequence[str] = (),
    to: Path | None = None,
) -> TrainPlan:
    """Checks a run, the options and this machine, and estimates the work. Nothing is written.

    tokens are those of distillation: without a number FACTOR times the run's longest proxy. Raises ConfigError for what does not
    fit, EnvironmentFault for what the machine lacks.
    """
    choice.check("train")
    config = read_settings(run_dir, tokens, overrides)
    (tokens,) = config.search.proxy_tokens
    if to is not None and not (to / TRAINING_FILE).exists():
        check_writable(to)  # Before the seconds that the rest takes.
    check_supernet(run_dir, config)
    run_dir.require_search(SUPERNET_FILE)
    info = inspect_teacher(config.teacher)
    chosen = find(run_dir, choice, info.shape)
    head_map = chosen.head_map
    _check(config, info, head_map, tokens)
    text_tokens = _text_tokens(run_dir, config)
    if text_tokens:
        check_rows(config, run_dir)
    settings = settings_of(run_dir, config, head_map, tokens)
    directory = to or run_dir / FOLDER / digest_of(settings)
    plan = TrainPlan(
        config,
        chosen,
        directory.absolute(),
        settings,
        text_tokens,
        tuple(ignored_in_training(config, [field_of(override) for override in overrides])),
        0.0,
        _disk_bytes(config, info),
    )
    check_place(plan)
    return replace(plan, seconds=_seconds(plan, info))


def check_place(plan: TrainPlan) -> None:
    """Raises ConfigError where the directory holds anything but this training, EnvironmentFault where its rest cannot be written."""
    directory = plan.directory
    if (directory / TRAINING_FILE).exists():
        old = RunDir(directory).read_json(TRAINING_FILE)
        found = old.get("settings") if isinstance(old, dict) else None
        if not isinstance(found, dict):
            raise ConfigError(f"{directory / TRAINING_FILE}: damaged, no settings in it")
        changes = differences(found, json.loads(json.dumps(plan.settings)))
        if changes:
            named = "; ".join(f"{key}: {was!r} -> {now!r}" for key, (was, now) in changes.items())
            raise ConfigError(
                f"{directory}: holds a training with other settings ({named}); allowed: another --to, or the same options"
            )
        if old.get("done") is True:
            return
    # What a kill may have left of the first file does not count.
    elif not directory.is_dir() or any(not p.name.startswith(".") for p in directory.iterdir()):
        check_directory(directory)
    check_writable(directory)


def _check(config: RunConfig, info: TeacherInfo, head_map: HeadMap, tokens: int) -> None:
    """Raises ConfigError or EnvironmentFault for whatever would stop the training later."""
    long, probes, longest = config.long_context, config.probes, max(config.probes.contexts)
    if not long.tokens and (not tokens or head_map.fa_share == 1):
        what = "the map is the teacher's" if tokens else "--tokens is 0"
        raise ConfigError(
            f"train: nothing to do: {what} and long_context.tokens is 0; allowed: more of either"
        )
    if longest > info.max_context and not probes.beyond_window:
        raise ConfigError(
            f"probes.contexts: {longest} is beyond the teacher's {info.max_context} tokens; allowed: 1 to "
            f"{info.max_context}, or more with probes.beyond_window: true"
        )
    if long.tokens and long.loss == "kl" and long.sequence_length > info.max_context:
        raise ConfigError(
            f"long_context.loss: kl takes a teacher that reaches {long.sequence_length} tokens, this one has "
            f"{info.max_context}; allowed: next_token, or shorter rows"
        )
    is_packed = (config.distill.packed and tokens) or (long.packed and long.tokens)
    if is_packed and any(Operator.NHA in row for row in head_map.layers):
        raise ConfigError("distill.packed, long_context.packed: not with NHA heads; allowed: false")
    device = pick_device(config.teacher.device)
    check_harness_package(config.harness)
    check_teacher_files(config.teacher)
    dtype, head_dim = config.teacher.dtype, info.shape.head_dim
    check_kernels(config.kernels, device, dtype, head_dim, trains=True)


def check_rows(config: RunConfig, place: RunDir) -> None:
    """Raises ConfigError where the training text there is too short for a row of section long_context."""
    long = config.long_context
    if long.tokens:
        rows = Packed(np.load(place / TRAIN_FILE, mmap_mode="r"))
        long_text(rows, long.sequence_length, needed=config.data.niah_share < 1)


def _text_tokens(run_dir: RunDir, config: RunConfig) -> int:
    names = [TRAIN_FILE, *([RETRIEVAL_FILE] if config.data.niah_share > 0 else [])]
    if any(not (run_dir / name).exists() for name in names):
        return 0
    return int(np.load(run_dir / TRAIN_FILE, mmap_mode="r").size)


def _disk_bytes(config: RunConfig, info: TeacherInfo) -> int:
    """Both checkpoints, the larger one twice while it is replaced, and the export."""
    long = config.long_context
    as_long = config.distill.model_copy(update={"trainable": long.trainable})
    sizes = [checkpoint_bytes(config, info)]
    if long.tokens:
        sizes.append(checkpoint_bytes(config.model_copy(update={"distill": as_long}), info))
    return sum(sizes) + max(sizes) + 2 * teacher_bytes(config, info)


def _seconds(plan: TrainPlan, info: TeacherInfo) -> float:
    device = pick_device(plan.config.teacher.device)
    speed, long = Speed.of(info, device.type, matmul_rate(device)), plan.config.long_context
    stages = 1 + bool(plan.tokens) + bool(long.tokens)
    tokens = TRAINING_COST * (plan.tokens + long.tokens) + stages * evaluation_tokens(plan.config)
    return tokens * speed.forward
