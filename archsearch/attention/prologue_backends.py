"""Who norms and rotates queries and keys between projection and operator: our Triton kernel, torch ops.

Shapes: B batch, T tokens, n query heads, m heads of keys, D head_dim.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import Situation, dense, purpose_of
from .fusion import rms_norm
from .requirements import imported, reason_of, triton_lacks
from .rotary import PositionEmbeddings, rotate

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class PrologueCall(NamedTuple):
    """Raw q and k, both weights of their RMSNorm or neither, RoPE tables where there is a rotation, a factor on q."""

    q_BTnD: Tensor
    k_BTmD: Tensor
    q_weight_D: Tensor | None
    k_weight_D: Tensor | None
    norm_eps: float
    embeddings: PositionEmbeddings | None
    factor_BT: Tensor | None = None

    def situation(self) -> Situation:
        """What the choice depends on."""
        q = self.q_BTnD
        return Situation(q.device, q.dtype, q.shape[3], purpose_of(self[:4], q.shape[1]))


Result = tuple[Tensor, Tensor]
"""q and k in the shapes and dtype that they came in."""


def run_triton(call: PrologueCall) -> Result:
    """One launch for both, and one for their gradients."""
    q, k = dense(call.q_BTnD), dense(call.k_BTmD)
    cos, sin = call.embeddings or (None, None)
    result: Result = _kernels().prologue(
        q,
        k,
        _plan(q.shape[2], k.shape[2], cos is not None, call.factor_BT is not None, q.device),
        q_weight_D=call.q_weight_D,
        k_weight_D=call.k_weight_D,
        norm_eps=call.norm_eps,
        cos_BTD=cos,
        sin_BTD=sin,
        factor_BT=call.factor_BT,
    )
    return result


def run_torch(call: PrologueCall) -> Result:
    """Norm, then rotation, then the factor."""
    q, k = call.q_BTnD, call.k_BTmD
    if call.q_weight_D is not None and call.k_weight_D is not None:
        q, k = (
            rms_norm(x, weight, call.norm_eps)
            for x, weight in ((q, call.q_weight_D), (k, call.k_weight_D))
        )
    if call.embeddings is not None:
        q, k = rotate(q, call.embeddings), rotate(k, call.embeddings)
    if call.factor_BT is not None:
        # Near 1, the factor would lose most of its digits in half precision.
        q = (q * call.factor_BT[..., None, None]).to(q.dtype)
    return q, k


def triton_cannot(situation: Situation) -> str | None:
    """Why our kernel can't serve."""
    return triton_lacks(situation, TRITON_DTYPES) or reason_of(_kernels())


@cache
def _plan(heads: int, kv_heads: int, rotary: bool, log_scale: bool, device: torch.device) -> Any:
    """All heads of q and of k, in their order."""
    tables = importlib.import_module("archsearch_kernels.prologue.heads")
    parts = [
        tables.Part(source, tuple(range(count)), rotary=rotary, log_scale=scaled)
        for source, count, scaled in (("q", heads, log_scale), ("k", kv_heads, False))
    ]
    return tables.plan_heads(parts, heads, kv_heads, device)


@cache
def _kernels() -> Any:
    return imported("archsearch_kernels.prologue.kernel", "archsearch_kernels")
