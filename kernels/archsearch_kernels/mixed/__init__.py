"""A whole layer between projections and o_proj: prologue, full attention beside Gated DeltaNet, fusion. plan_mixed makes the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archsearch_kernels.exports import import_lazily

if TYPE_CHECKING:
    from archsearch_kernels.mixed.heads import MixedPlan, Switches, plan_mixed
    from archsearch_kernels.mixed.operator import mixed_heads

__all__ = ["MixedPlan", "Switches", "mixed_heads", "plan_mixed"]
__getattr__ = import_lazily(
    __name__,
    {
        "MixedPlan": "heads",
        "Switches": "heads",
        "mixed_heads": "operator",
        "plan_mixed": "heads",
    },
)
