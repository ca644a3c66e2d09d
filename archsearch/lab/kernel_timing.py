"""How kernel figures are taken: medians, profiles by stage, memory peaks, floors, and limits of time.

Floors of the gated delta rule are of chunks of 64 tokens and head_dim 128: least FLOPs and bytes a token-head.
"""

from __future__ import annotations

import gc
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from archsearch_kernels import timing

BYTES_PER_SECOND = 4.30e12
FLOPS_PER_SECOND = 690e12
"""What an H200 copies and multiplies (bf16, 8192^3), measured."""
FLOOR = {"forward": (167e3, 1032), "backward": (524e3, 1936)}
"""FLOPs and bytes of the gated delta rule, a token and head, D 128: products at chunks of 64, every input and output once in bf16,
and of the backward pass what it must keep of a chunk besides. A count made before these kernels, by which others are judged too."""
REPEAT_MS = 60
KERNEL_NAME_LENGTH = 60


class OutOfTime(Exception):
    """A limit of time was reached."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime inside after so many seconds: no threads, so that compilers are stopped between two steps of Python."""

    def stop(*_: Any) -> None:
        raise OutOfTime(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def floor_ms(token_heads: int, direction: str) -> float:
    """The gated delta rule's floor, by arithmetic or by memory."""
    flops, moved = FLOOR[direction]
    return 1e3 * token_heads * max(flops / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND)


def median_ms(call: Callable[[], object]) -> float:
    """Median time of a call with a cold L2, by GPU events."""
    return timing.median_ms(call, warmup_ms=15, repeat_ms=REPEAT_MS)


def stages_ms(call: Callable[[], object], repeats: int = 5) -> dict[str, float]:
    """Mean time of each GPU kernel of a call, longest first, by torch's profiler."""
    found: dict[str, float] = {}
    for key, ms in timing.kernel_ms(call, repeats).items():
        name = short_name(key)
        found[name] = found.get(name, 0.0) + ms
    kept = {name: ms for name, ms in found.items() if ms > 0}
    return dict(sorted(kept.items(), key=lambda item: -item[1]))


def short_name(kernel: str) -> str:
    """A kernel's name without its return type, template arguments and parameters."""
    name = re.sub(r"<.*|\(.*", "", kernel.removeprefix("void "))
    return name[-KERNEL_NAME_LENGTH:] or kernel[:KERNEL_NAME_LENGTH]


def peak_bytes(call: Callable[[], object]) -> int:
    """Most memory at once during a call, its results included, beyond what was allocated before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def relative_errors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """Norm of the difference over the norm of what is expected, a tensor; infinite where one is NaN."""
    errors = {}
    for name, right in expected.items():
        if not right.numel():
            continue
        norm = float(right.double().norm())
        difference = float((found[name].double() - right.double()).norm())
        error = difference / norm if norm else difference
        errors[name] = error if error == error else float("inf")  # noqa: PLR0124 - NaN
    return errors


def run_with_gradients(
    function: Callable[..., Any], arguments: Mapping[str, Any], d_out: Tensor | None = None
) -> dict[str, Tensor]:
    """`out` of a function of keyword arguments and the gradient of each that asks for one, by name.

    d_out: the output's gradient, random (the same each time) unless given.
    """
    leaves = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    out = function(**arguments)
    if d_out is None:
        generator = torch.Generator().manual_seed(7)
        drawn = torch.randn(out.shape, generator=generator).bfloat16()
        d_out = drawn.to(out.device, out.dtype)
    gradients = torch.autograd.grad(out, list(leaves.values()), d_out, allow_unused=True)
    found = {name: x for name, x in zip(leaves, gradients, strict=True) if x is not None}
    return {"out": out.detach(), **found}


def widened(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments in fp64, gradients asked for as before."""
    return {
        name: x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in arguments.items()
    }


def forget_compilations() -> None:
    """Has every kernel of archsearch_kernels compile, or load from Triton's cache on disk, at its next call."""
    from triton.runtime.jit import JITFunction

    # By type alone: isinstance would wake lazily imported modules.
    for kernel in [x for x in gc.get_objects() if issubclass(type(x), JITFunction)]:
        if kernel.fn.__module__.startswith("archsearch_kernels."):
            kernel.device_caches.clear()


@contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """The names of the Triton kernels that are compiled, or loaded from Triton's cache, inside."""
    from triton import knobs

    names: list[str] = []
    before = knobs.runtime.jit_post_compile_hook

    def note(**facts: Any) -> None:
        names.append(str(getattr(facts.get("fn"), "name", facts.get("repr"))))

    knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before
