"""What happens to q and k between projection and operator, in plain torch: what the kernel must equal, and the CPU's path.

Shapes: B batch, T tokens, H query heads, G KV heads, n heads of a part, D head_dim.
Sources: RMSNorm (arXiv 1910.07467) as Qwen3 puts it on q and k; rotary embedding (RoFormer, arXiv 2104.09864) in the half-split
form of Hugging Face; queries times the logarithm of the position (as in arXiv 2501.19399).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from archsearch_kernels.prologue.heads import HeadPlan


def log_scale(positions: Tensor, training_tokens: int) -> Tensor:
    """log(t + a) / log(a) in fp32 at each position t from 0, with a the length that the model was trained at."""
    return torch.log(positions.float() + training_tokens) / math.log(training_tokens)


def prologue(
    q_BTHD: Tensor,
    k_BTGD: Tensor | None,
    plan: HeadPlan,
    *,
    q_weight_D: Tensor | None = None,
    k_weight_D: Tensor | None = None,
    norm_eps: float = 1e-6,
    cos_BTD: Tensor | None = None,
    sin_BTD: Tensor | None = None,
    factor_BT: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """kernel.prologue in plain torch: that function says what it computes. At least fp32 inside, results in q's dtype."""
    wide = torch.promote_types(q_BTHD.dtype, torch.float32)
    q, k = _norm(q_BTHD, q_weight_D, norm_eps, wide), None
    if k_BTGD is not None:
        k = _norm(k_BTGD, k_weight_D, norm_eps, wide)
    outputs = []
    for part in plan.parts:
        source = q if part.source == "q" else k
        assert source is not None, "the plan names heads of k, but there is no k"
        index = torch.tensor(part.heads, dtype=torch.long, device=q.device)
        x = source.index_select(2, index)
        if part.rotary:
            assert cos_BTD is not None, "the plan asks for rotation, but there are no tables"
            assert sin_BTD is not None
            cos, sin = (_of_heads(table, wide) for table in (cos_BTD, sin_BTD))
            first, second = x.chunk(2, dim=-1)
            x = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        if part.log_scale:
            assert factor_BT is not None, "the plan asks for log-scale, but there is no factor"
            x = x * factor_BT.to(wide)[..., None, None]
        outputs.append(x.to(q_BTHD.dtype))
    return tuple(outputs)


def _norm(x: Tensor, weight_D: Tensor | None, eps: float, wide: torch.dtype) -> Tensor:
    x = x.to(wide)
    if weight_D is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D.to(wide)


def _of_heads(table: Tensor, wide: torch.dtype) -> Tensor:
    """The half of a table that all of it repeats, with an axis for heads: [..., T, 1, D / 2]."""
    return table[..., : table.shape[-1] // 2].to(wide).unsqueeze(-2)
