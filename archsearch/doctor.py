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
from torch import Tensor

from archsearch_kernels.gdn.reference import gated_delta_reference

from .attention.delta_rule import triton_miscompiles
from .attention.gdn import backend_reason, gated_delta
from .preflight import memory_limit
from .report.records import bytes_text

PACKAGES = ("torch", "transformers", "optuna", "ray", "fla-core", "triton", "flash-attn", "gguf")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest error over the reference's largest value that a backend may show."""


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


def _full_attention(topic: str) -> Finding:
    return Finding(topic, "torch scaled_dot_product_attention: the only backend so far")


def _gated_delta_net(topic: str) -> Finding:
    """Names the backend and compares a tiny forward and backward with the fp32 reference."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    error = gated_delta_error(device, dtype)
    ok = error <= TOLERANCE[dtype]
    verdict = "agree with" if ok else "DIFFER from"
    return Finding(
        topic,
        f"{backend_reason()}; a small forward and backward {verdict} the fp32 reference "
        f"(relative error {error:.1e})",
        ok=ok,
    )


def gated_delta_error(device: torch.device, dtype: torch.dtype, *, length: int = 130) -> float:
    """Largest difference of outputs and gradients from the reference, over the reference's largest value."""
    inputs = _random_inputs(device, length)
    worst = 0.0
    given = _outputs_and_gradients(gated_delta, [x.to(dtype) for x in inputs])
    wanted = _outputs_and_gradients(gated_delta_reference, inputs)
    for got, right in zip(given, wanted, strict=True):
        scale = right.abs().max().clamp_min(1e-6)
        worst = max(worst, float((got.float() - right).abs().max() / scale))
    return worst


def _random_inputs(device: torch.device, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, 2, 64, generator=generator) for _ in range(3))
    g = -torch.rand(1, length, 2, generator=generator)
    beta = torch.rand(1, length, 2, generator=generator)
    normed = [torch.nn.functional.normalize(x, dim=-1) for x in (q, k)]
    return [x.to(device) for x in (*normed, v, g, beta)]


def _outputs_and_gradients(
    operator: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor]
) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, _ = operator(*leaves, scale=leaves[0].shape[-1] ** -0.5)
    gradients = torch.autograd.grad(out.float().square().mean(), leaves)
    return [out.detach(), *gradients]


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
            f"{found} miscompiles the gated backward on Hopper GPUs; 3.7.1 does not",
            ok=not _has_hopper(),
        )
    return Finding(topic, found)


def _has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


CHECKS: dict[str, Callable[[str], Finding]] = {
    "packages": _packages,
    "machine": _machine,
    "devices": _devices,
    "full attention (F)": _full_attention,
    "Gated DeltaNet (G)": _gated_delta_net,
    "Triton": _triton,
    "Ray": _ray,
}
