"""The gated delta rule of chosen heads. gated_delta_net is differentiable, gdn_forward the forward pass alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archsearch_kernels.exports import import_lazily

if TYPE_CHECKING:
    from archsearch_kernels.gdn.kernel import gdn_forward
    from archsearch_kernels.gdn.operator import gated_delta_net

__all__ = ["gated_delta_net", "gdn_forward"]
__getattr__ = import_lazily(__name__, {"gated_delta_net": "operator", "gdn_forward": "kernel"})
