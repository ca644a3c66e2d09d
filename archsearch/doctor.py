"""What this machine offers: versions, devices, which backend each operator uses and why, and whether it is right."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from .attention.dispatch import OPERATORS
from .attention.gdn_backends import triton_miscompiles
from .kernel_proofs import proofs, summary
from .preflight import memory_limit
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


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; ok is False where something is wrong."""

    topic: str
    text: str
    ok: bool = True


def examine() -> Iterator[Finding]:
    """All findings, one after the other; none raises."""
    for topic, check in CHECKS.items():
        try:
            yield check(topic)
        except Exception as error:  # whatever a broken install raises is the finding
            yield Finding(topic, f"{type(error).__name__}: {error}", ok=False)
    for name in OPERATORS:
        yield from _operator(name)


def _packages(topic: str) -> Finding:
    return Finding(topic, ", ".join(f"{name} {_version(name) or 'no'}" for name in PACKAGES))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine(topic: str) -> Finding:
    free = psutil.virtual_memory().available
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    return Finding(
        topic,
        f"{psutil.cpu_count() or 1} cores, {torch.get_num_threads()} torch threads, "
        f"{bytes_text(free)} of {bytes_text(memory_limit())} memory free, "
        f"{bytes_text(disk)} free in {tempfile.gettempdir()}",
    )


def _devices(topic: str) -> Finding:
    if not torch.cuda.is_available():
        return Finding(topic, "no CUDA device: models run on the CPU")
    names = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        names.append(f"cuda:{index} {name}, {bytes_text(free)} of {bytes_text(total)} free")
    return Finding(topic, "; ".join(names))


def _operator(name: str) -> Iterator[Finding]:
    """Who is chosen for an operator, and a line a backend: its errors, or why it can't serve."""
    title = OPERATORS[name].title
    try:
        yield Finding(title, summary(name))
    except Exception as error:  # a backend that was asked for and can't serve, or a broken install
        yield Finding(title, str(error), ok=False)
    for proof in proofs(name):
        yield Finding(f"  {proof.backend}", proof.text, ok=proof.ok)


def _ray(topic: str) -> Finding:
    importlib.import_module("ray")
    return Finding(topic, f"ray {_version('ray')} imports; workers are started by a run")


def _triton(topic: str) -> Finding:
    found = _version("triton")
    if found is None:
        return Finding(topic, "not installed: no GPU kernels of our own or of fla-core")
    if triton_miscompiles(found):
        return Finding(
            topic,
            f"{found}: fla-core's backward pass is not used on Hopper GPUs, where it is miscompiled before 3.7.1",
        )
    return Finding(topic, found)


CHECKS: dict[str, Callable[[str], Finding]] = {
    "packages": _packages,
    "machine": _machine,
    "devices": _devices,
    "Triton": _triton,
    "Ray": _ray,
}
