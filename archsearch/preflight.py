"""Checks before any work: the config against the teacher, and the machine against the config."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import get_args

import psutil
import torch

from .config import ExecutionConfig, GeneralKind, ProbeConfig, RetrievalKind, RunConfig
from .errors import ArchsearchError, ConfigError, EnvironmentFault
from .evaluation.harness import check_harness_package
from .footprint import TRAIN
from .ignored import has_haystacks
from .inputs import check_inputs, check_teacher_files
from .metrics import DIVERGENCES, HARNESS, UNSEEN
from .models.kernels import check_kernels
from .models.teacher import TeacherInfo, pick_device, resolve_path
from .passwords import HIDDEN
from .plan import Plan, texts, training_rows
from .report.records import bytes_text
from .search.records import measured_metrics, prompt_metrics
from .search.samplers import require_packages
from .search.space import check_constraints
from .search.storage import check_storage


def check_config(config: RunConfig, info: TeacherInfo) -> None:
    """Checks the config against the teacher and the files that it names.

    Raises ConfigError with the field and what is allowed, EnvironmentFault for a file that is damaged and
    for a backend that this machine can't run.
    """
    lengths = {"data.sequence_length": config.data.sequence_length}
    if has_haystacks(config.probes) and not config.probes.beyond_window:
        lengths["probes.contexts"] = max(config.probes.contexts)
    if config.scoring.retrieval:
        lengths["scoring.contexts"] = max(config.scoring.contexts)
    for field, length in lengths.items():
        if length > info.max_context:
            hint = ", or more with probes.beyond_window: true" if field.startswith("probes") else ""
            raise ConfigError(
                f"{field}: {length} is beyond the teacher's {info.max_context} tokens; allowed: "
                f"1 to {info.max_context}{hint}"
            )
    if config.scoring.replacement_length > config.data.sequence_length:
        raise ConfigError(
            f"scoring.replacement_length: {config.scoring.replacement_length} is above "
            f"data.sequence_length {config.data.sequence_length}"
        )
    if config.scoring.replacement_sequences > config.data.heldout_sequences:
        raise ConfigError(
            f"scoring.replacement_sequences: {config.scoring.replacement_sequences} is above "
            f"data.heldout_sequences {config.data.heldout_sequences}"
        )
    distill = config.distill
    if distill.teacher_logits == "topk" and distill.top_k > info.vocab_size:
        raise ConfigError(
            f"distill.top_k: {distill.top_k} is beyond the teacher's vocabulary; allowed: 1 to {info.vocab_size}"
        )
    _check_metrics(config)
    check_constraints(config.search.constraints, info.shape, config.cost)
    check_kernels(
        config.kernels,
        pick_device(config.teacher.device),
        config.teacher.dtype,
        info.shape.head_dim,
        trains=bool(training_rows(config).text),
    )
    check_inputs(config, info)


def _check_metrics(config: RunConfig) -> None:
    """Raises ConfigError for an objective or bound on a metric that the run does not have."""
    allowed, search = measured_metrics(config), config.search
    wanted = {f"search.objectives[{i}]": o.metric for i, o in enumerate(search.objectives)}
    wanted |= {f"search.constraints[{i}]": c.metric for i, c in enumerate(search.constraints)}
    for field, metric in wanted.items():
        if metric not in allowed:
            raise ConfigError(
                f"{field}.metric: {metric} needs {_needed_for(metric, config.probes)}; allowed with those that it has: "
                f"{', '.join(allowed)}"
            )


def _needed_for(metric: str, probes: ProbeConfig) -> str:
    """What a config that lacks a metric needs, in words."""
    name, _, context = metric.partition("@")
    kinds = (*get_args(RetrievalKind), *get_args(GeneralKind))
    found = [k for k in kinds if name in prompt_metrics(ProbeConfig(kinds=(k,)))]
    needed, place = " or ".join(found), "kinds"
    if name.startswith(UNSEEN):
        needed, place = name.removeprefix(UNSEEN).rpartition("_")[0], "unseen"
    elif name.startswith(HARNESS):
        return "its task among harness.tasks"
    elif not found and name.startswith(DIVERGENCES):
        return "its label among data.extra_heldout"
    elif not found:
        named = [file.name for file in probes.files if name.startswith(f"{file.name}_")]
        only = f" (groups and lengths of {named[0]} are only reported)" if named else ""
        return f"its name among probes.files{only}"
    also = f" and {context} among several probes.contexts" if context else ""
    return f"{needed} among probes.{place}{also}"


def check_machine(config: RunConfig, *, searches: bool = True) -> None:
    """Finds what the machine lacks before any work. Raises EnvironmentFault, or ConfigError for a value.

    The teacher's device, packages of the corpora, files named in the config; where it searches, also the executor and the storage.
    """
    pick_device(config.teacher.device)
    if searches:
        _check_executor(config.execution)
        require_packages(config.search.sampler)
        url = config.search.storage
        # A run's own config lacks the password, with which alone there is something to find out.
        if url is not None and HIDDEN not in url:
            check_storage(url)
    if config.supernet.source != TRAIN:
        _check_file("supernet.source", config.supernet.source)
    if config.scoring.pairs_file is not None:
        _check_file("scoring.pairs_file", config.scoring.pairs_file)
    for file_index, file in enumerate(config.probes.files):
        _check_file(f"probes.files[{file_index}].path", file.path)
    check_harness_package(config.harness)
    if config.harness.include_path is not None:
        _check_file("harness.include_path", config.harness.include_path)
    for field, text in texts(config.data).items():
        if text.source == "file":
            _check_file(f"data.{field}.path", str(text.path))
        if text.source == "datasets" and importlib.util.find_spec("datasets") is None:
            raise EnvironmentFault(
                f"data.{field}: the Python package datasets is not installed (pip install datasets)"
            )
    check_teacher_files(config.teacher)


def _check_executor(execution: ExecutionConfig) -> None:
    """GPUs and cores against the workers, and the executor's package.

    More processes than cores are refused; two are let pass anywhere, so that small configs run on any machine.
    """
    wanted, count = execution.workers * execution.gpus_per_worker, torch.cuda.device_count()
    if wanted > count:
        raise EnvironmentFault(
            f"execution: {execution.workers} workers with {execution.gpus_per_worker:g} GPUs each need "
            f"{wanted:g} GPUs, this machine has {count}"
        )
    most = max(2, os.cpu_count() or 1)
    if execution.executor == "ray" and not execution.gpus_per_worker and execution.workers > most:
        raise ConfigError(
            f"execution.workers: {execution.workers} without GPUs; allowed on this machine: 1 to {most}"
        )
    if execution.executor == "ray" and importlib.util.find_spec("ray") is None:
        raise EnvironmentFault("execution.executor: the Python package ray is not installed")


def _check_file(field: str, source: str) -> None:
    try:
        resolve_path(source)
    except ArchsearchError as error:
        raise type(error)(f"{field}: {error}") from error


def check_memory(plan: Plan) -> None:
    """Raises EnvironmentFault where the plan needs more host memory than the machine has at all."""
    total = memory_limit()
    if plan.needs.host > total:
        raise EnvironmentFault(
            f"the run needs about {bytes_text(plan.needs.host)} of memory, this machine has "
            f"{bytes_text(total)}: use fewer execution.workers or a smaller teacher"
        )


def memory_limit() -> int:
    """Host memory in bytes that this process may use: the machine's, or its control group's if less."""
    total = int(psutil.virtual_memory().total)
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total
