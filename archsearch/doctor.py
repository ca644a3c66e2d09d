"""What this machine offers: versions, devices, which backend each operator uses and why, and whether it is right."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from .attention.backends import INFERENCE, TRAINING
from .attention.dispatch import OPERATORS
from .attention.gdn_backends import triton_miscompiles
from .config import RunConfig
from .errors import ArchsearchError, ConfigError
from .findings import Finding
from .kernel_report import WORKER, KernelReport, Scope, Target
from .kernel_workers import Workers
from .models.kernels import TRAINING_DTYPE, check_environment
from .models.teacher import inspect_teacher, pick_device
from .plan import training_rows
from .preflight import check_machine, memory_limit
from .report.records import bytes_text

PACKAGES = (
    "torch",
    "transformers",
    "optuna",
    "ray",
    "triton",
    "fla-core",
    "flash-qla",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "gguf",
)
DIM = {"cpu": 64, "cuda": 128}
DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16", "float32")}
"""Of heads, where no config says what a run is of. On a GPU scores take fp32 of a bf16 teacher too."""

MOST_WORKERS = 8
WORKER_BYTES = 2 * 1024**3
"""Host memory that a child may come to, with a GPU's libraries and a compiler in it."""


def examine(
    config: RunConfig | None = None,
    scope: Scope | None = None,
    *,
    waiting: Callable[[str], None] = lambda text: None,
    command: Sequence[str] = WORKER,
) -> Generator[Finding, None, None]:
    """All findings, each as soon as it and those before it are known; with a config, of what its run needs.

    waiting is told now and then what is worked on. Raises ConfigError for a name in the scope, or in the environment, that no backend has.
    """
    scope = scope or Scope()
    check_scope(scope)
    check_environment()
    target, faults = _target(config)
    with Workers(command, _num_workers()) as workers:
        report = KernelReport(target, scope, workers)
        for topic, check in CHECKS.items():
            try:
                yield check(topic, config)
            except Exception as error:  # whatever a broken install raises is the finding
                yield Finding(topic, f"{type(error).__name__}: {error}", "WRONG")
        yield from faults
        yield from report.findings(waiting)


def complaint(findings: Sequence[Finding]) -> str:
    """What needs attention, in a line; nothing where all that is needed is well."""
    names: dict[str, list[str]] = {"WRONG": [], "lacks": [], "open": []}
    title = ""
    for finding in findings:
        indented = finding.topic.startswith(" ")
        title = title if indented else finding.topic
        if finding.needed and finding.verdict != "ok":
            name = f"{title}: {finding.topic.strip()}" if indented else title
            names[finding.verdict].append(name)
    said = {
        "WRONG": "needs attention: {}",
        "lacks": "cannot serve here: {}",
        "open": "not done in time (see --seconds): {}",
    }
    return "; ".join(
        said[verdict].format(", ".join(some)) for verdict, some in names.items() if some
    )


def check_scope(scope: Scope) -> None:
    """Raises ConfigError for a name that no backend has, and for seconds that are no time."""
    if not scope.seconds > 0:
        raise ConfigError(f"--seconds {scope.seconds:g}: allowed: more than 0, inf for no limit")
    backends = (backend for operator in OPERATORS.values() for backend in operator.backends)
    allowed = list(dict.fromkeys(backend.name for backend in backends))
    if unknown := set(scope.named) - set(allowed):
        raise ConfigError(
            f"--backend {min(unknown)}: no such backend; allowed: {', '.join(allowed)}"
        )


def _num_workers() -> int:
    free = min(psutil.virtual_memory().available, memory_limit())
    return max(1, min(MOST_WORKERS, os.cpu_count() or 1, int(free // WORKER_BYTES)))


def _target(config: RunConfig | None) -> tuple[Target, list[Finding]]:
    """What to prove, and what this machine lacks for the run."""
    here = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    usual = Target(str(here), DIM[here.type], DTYPES[here.type])
    if config is None:
        return usual, []
    title = f"run {config.name}"
    try:
        device, dtype = pick_device(config.teacher.device), config.teacher.dtype
        dim = inspect_teacher(config.teacher).shape.head_dim
    except ArchsearchError as error:
        return usual, [Finding(title, str(error), "WRONG")]
    needed: set[tuple[str, str]] = {(INFERENCE, dtype)}
    if training_rows(config).text:
        trained = TRAINING_DTYPE[device.type]
        needed.add((TRAINING, dtype if trained is None else str(trained).removeprefix("torch.")))
    dtypes = tuple(dict.fromkeys((*DTYPES[device.type], *(name for _, name in sorted(needed)))))
    target = Target(str(device), dim, dtypes, frozenset(needed), config.kernels)
    try:
        check_machine(config)
    except ArchsearchError as error:
        return target, [Finding(title, str(error), "WRONG")]
    said = f"{config.teacher.source} in {dtype} on {device}, head_dim {dim}: nothing is missing"
    return target, [Finding(title, said)]


def _packages(topic: str, config: RunConfig | None) -> Finding:
    return Finding(topic, ", ".join(f"{name} {_version(name) or 'no'}" for name in PACKAGES))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine(topic: str, config: RunConfig | None) -> Finding:
    free = psutil.virtual_memory().available
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    return Finding(
        topic,
        f"{psutil.cpu_count() or 1} cores, {torch.get_num_threads()} torch threads, "
        f"{bytes_text(free)} of {bytes_text(memory_limit())} memory free, "
        f"{bytes_text(disk)} free in {tempfile.gettempdir()}",
    )


def _devices(topic: str, config: RunConfig | None) -> Finding:
    if not torch.cuda.is_available():
        return Finding(topic, "no CUDA device: models run on the CPU")
    names = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        names.append(f"cuda:{index} {name}, {bytes_text(free)} of {bytes_text(total)} free")
    return Finding(topic, "; ".join(names))


def _ray(topic: str, config: RunConfig | None) -> Finding:
    """Ray is wrong where the run asks for it and it is not there, or where it is there and broken."""
    if config is not None and config.execution.executor == "serial":
        return Finding(topic, "not needed: execution.executor is serial")
    if config is None and _version("ray") is None:
        return Finding(topic, "not installed: configs need execution.executor serial")
    importlib.import_module("ray")
    return Finding(topic, f"ray {_version('ray')} imports; workers are started by a run")


def _triton(topic: str, config: RunConfig | None) -> Finding:
    found = _version("triton")
    if found is None:
        return Finding(topic, "not installed: no GPU kernels of our own or of fla-core")
    if triton_miscompiles(found):
        return Finding(
            topic,
            f"{found}: fla-core's backward pass is not used on Hopper GPUs, where it is miscompiled before 3.7.1",
        )
    return Finding(topic, found)


CHECKS: dict[str, Callable[[str, RunConfig | None], Finding]] = {
    "packages": _packages,
    "machine": _machine,
    "devices": _devices,
    "Triton": _triton,
    "Ray": _ray,
}
