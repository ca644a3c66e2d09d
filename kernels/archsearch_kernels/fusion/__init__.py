"""Outputs of both branches to o_proj's input: norm, gamma, bias and gate a head, in the heads' order. plan_fusion makes the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archsearch_kernels.exports import import_lazily

if TYPE_CHECKING:
    from archsearch_kernels.fusion.heads import FusionPlan, Head, plan_fusion
    from archsearch_kernels.fusion.kernel import fusion

__all__ = ["FusionPlan", "Head", "fusion", "plan_fusion"]
__getattr__ = import_lazily(
    __name__, {"FusionPlan": "heads", "Head": "heads", "fusion": "kernel", "plan_fusion": "heads"}
)
