"""What kernels ask of a machine: a GPU, a dtype, a version of Triton, a package. Each check says what is lacking, or None."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection
from functools import cache
from typing import Any

import torch

from .backends import STEP, Situation

TRITON_DIMS = (16, 32, 64, 128, 256)
OLDEST_TRITON = (3, 6)


def gpu_lacks(situation: Situation, dtypes: Collection[torch.dtype]) -> str | None:
    """Why a kernel for GPUs of compute capability 8 and these dtypes can't serve."""
    if situation.device.type != "cuda":
        return "needs a CUDA device"
    if situation.capability < (8, 0):
        return "needs compute capability 8.0 or newer"
    if situation.dtype not in dtypes:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"takes {names} only"
    return None


def triton_lacks(situation: Situation, dtypes: Collection[torch.dtype]) -> str | None:
    """Why Triton kernels of ours for these dtypes can't serve."""
    if (reason := gpu_lacks(situation, dtypes)) is not None:
        return reason
    if situation.head_dim not in TRITON_DIMS:
        return f"takes head_dim {', '.join(map(str, TRITON_DIMS))}"
    found = triton_version()
    if found is None:
        return "Triton is not installed"
    if version_numbers(found)[:2] < OLDEST_TRITON:
        return f"needs Triton 3.6 or newer, this is {found}"
    return None


def leaves_steps(situation: Situation) -> str | None:
    """Of memory-bound kernels, whose work on a single token is nothing beside their launch.

    To bind their many arguments costs the host about what torch's few small ops do.
    """
    return (
        "leaves single tokens, bound by launches, to torch" if situation.purpose == STEP else None
    )


@cache
def triton_version() -> str | None:
    """Triton's version, None where it can't be imported."""
    found = imported("triton", "Triton")
    return None if isinstance(found, str) else str(found.__version__)


def version_numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def imported(module: str, package: str) -> Any:
    """A module, or the reason why there is none."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"{package} is not installed (no module {error.name})"
    except Exception as error:  # a broken install raises anything
        return f"{package} fails to import ({type(error).__name__}: {error})"


def reason_of(found: Any) -> str | None:
    """What `imported` says where there is no module."""
    return found if isinstance(found, str) else None
