"""How often Triton has compiled a kernel in this process."""

from __future__ import annotations

from typing import Any


def num_compilations(*kernels: Any) -> int:
    """Of all of them, on all devices."""
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())
