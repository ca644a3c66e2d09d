"""Norm, rotation and scale of q and k, written in parts as a layer's operators read them. plan_heads makes the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archsearch_kernels.exports import import_lazily

if TYPE_CHECKING:
    from archsearch_kernels.prologue.heads import HeadPlan, Part, plan_heads
    from archsearch_kernels.prologue.kernel import prologue
    from archsearch_kernels.prologue.reference import log_scale

__all__ = ["HeadPlan", "Part", "log_scale", "plan_heads", "prologue"]
__getattr__ = import_lazily(
    __name__,
    {
        "HeadPlan": "heads",
        "Part": "heads",
        "log_scale": "reference",
        "plan_heads": "heads",
        "prologue": "kernel",
    },
)
