"""What happens to head outputs between operator and o_proj, in plain torch: what the kernel must equal, and the CPU's path.

Shapes: B batch, T tokens, H query heads, F heads of the full branch, n heads of the linear branch, R rows of gamma and bias,
E heads of the gate, D head_dim. Source: HydraHead (arXiv 2606.20097), the fusion step, with the bias and gate of this project.
"""

from __future__ import annotations

import torch
from torch import Tensor

from archsearch_kernels.fusion.heads import FusionPlan


def fusion(
    full_BTFD: Tensor | None,
    linear_BTnD: Tensor | None,
    plan: FusionPlan,
    *,
    gamma_RD: Tensor | None = None,
    bias_RD: Tensor | None = None,
    gate_BTED: Tensor | None = None,
    gate_factor: float = 2.0,
    norm_eps: float = 1e-6,
) -> Tensor:
    """kernel.fusion in plain torch: that function says what it computes. At least fp32 inside, result in the branches' dtype."""
    some = linear_BTnD if full_BTFD is None else full_BTFD
    assert some is not None, "one branch must be there"
    wide = torch.promote_types(some.dtype, torch.float32)
    outputs = []
    for head in plan.heads:
        branch = full_BTFD if head.in_full else linear_BTnD
        assert branch is not None, "the plan reads a branch that is missing"
        x = branch[:, :, head.place].to(wide)
        if head.norm:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
        if gamma_RD is not None and head.row is not None:
            x = x * gamma_RD.to(wide)[head.row]
        if bias_RD is not None and head.row is not None:
            x = x + bias_RD.to(wide)[head.row]
        if gate_BTED is not None and head.gate is not None:
            x = x * gate_factor * torch.sigmoid(gate_BTED[:, :, head.gate].to(wide))
        outputs.append(x)
    return torch.cat(outputs, dim=-1).to(some.dtype)
