"""Where the kernels can run: on a GPU, or in Triton's interpreter, in which they are tried and tested on a CPU.

Triton decides when it is imported: TRITON_INTERPRET=1 must be set before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether the kernels of this package, which are made when they are imported, are interpreted."""
SET_LATE = INTERPRETED is isinstance(tl.sum, JITFunction)
"""Whether Triton's own functions, made when Triton was imported, are not what our kernels are."""
DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)


def check_device(device: torch.device) -> None:
    """Raises ValueError where the kernels cannot run on this device."""
    if device.type in DEVICES and not SET_LATE:
        return
    if SET_LATE:
        raise ValueError("TRITON_INTERPRET was changed after Triton was imported: set it before")
    raise ValueError(
        f"inputs are on {device}; allowed: a CUDA device, or the CPU where TRITON_INTERPRET=1 is set before "
        "Triton is imported"
    )


def check_tensors(names: str, values: Sequence[object], *, optional: bool = False) -> None:
    """Raises ValueError for the first value that is no tensor, nor None where that is allowed; names: those of all, by commas."""
    for number, x in enumerate(values):
        if not isinstance(x, Tensor) and not (optional and x is None):
            name = names.split(", ")[number]
            raise ValueError(f"{name} must be a tensor; got {type(x).__name__}")
