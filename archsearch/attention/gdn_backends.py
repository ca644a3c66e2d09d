"""Who computes Gated DeltaNet heads: our Triton kernels, FlashQLA, fla-core, plain torch. dispatch.py has their order.

Shapes: B batch, T tokens, H query heads, G heads of k and v, n selected heads, N sequences, D head_dim.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import HALF, STEP, TRAINING, Situation, dense, purpose_of
from .delta_rule import gated_delta
from .requirements import (
    gpu_lacks,
    imported,
    reason_of,
    triton_lacks,
    triton_version,
    version_numbers,
)

TRITON_DTYPES = (torch.bfloat16, torch.float32)
LARGEST_FLA_DIM = 256
FLASHQLA_DIM = 128
FLASHQLA_CHIPS = ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1))


class GatedDeltaCall(NamedTuple):
    """The arguments of dispatch.gated_delta_net, which says what they are."""

    q_BTHD: Tensor
    k_BTGD: Tensor
    v_BTGD: Tensor
    a_BTH: Tensor
    b_BTH: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor
    q_index_n: Tensor | None
    kv_index_n: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    output_final_state: bool

    def purpose(self) -> str:
        """What the call is for."""
        return purpose_of(self[:7] + self[9:10], self.q_BTHD.shape[1])


Result = tuple[Tensor, Tensor | None]
"""Outputs [B, T, n, D] in q's dtype, and final states [N, n, D, D] in fp32 where they were asked for."""


class Activated(NamedTuple):
    """What the recurrence takes, of the selected heads alone: q and k of unit length, g and beta in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def _activated(call: GatedDeltaCall, *, unit: bool = True) -> Activated:
    """Gathers the heads and applies norms and gates: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)."""
    q, k, v, a, b, A_log, dt_bias = call[:7]
    if call.q_index_n is not None and call.kv_index_n is not None:
        queries, keys = call.q_index_n.long(), call.kv_index_n.long()
        q, a, b = (x.index_select(2, queries) for x in (q, a, b))
        k, v = (x.index_select(2, keys) for x in (k, v))
        A_log, dt_bias = A_log.index_select(0, queries), dt_bias.index_select(0, queries)
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    beta = torch.sigmoid(b.float())
    return Activated(unit_rows(q) if unit else q, unit_rows(k) if unit else k, v, g, beta)


def unit_rows(x: Tensor) -> Tensor:
    """x over its L2 norm, with the epsilon under the root that fla-core uses, so that zeros stay zeros."""
    x_float = x.float()
    return (x_float * torch.rsqrt(x_float.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def run_torch(call: GatedDeltaCall) -> Result:
    """Chunkwise in plain torch, fp32 inside; a sequence at a time where they are packed."""
    inputs, scale = _activated(call), call.q_BTHD.shape[-1] ** -0.5
    if call.cu_seqlens is None:
        o, state = gated_delta(*inputs, scale=scale, initial_state=call.initial_state)
        return o, state if call.output_final_state else None
    bounds, (heads, dim) = call.cu_seqlens.tolist(), inputs.q.shape[2:]
    first = call.initial_state
    if first is None:
        first = inputs.g.new_zeros(len(bounds) - 1, heads, dim, dim)
    outputs, states = [], list(first.split(1))
    for number, (start, end) in enumerate(pairwise(bounds)):
        if start < end:
            part = (x[:, start:end] for x in inputs)
            o, states[number] = gated_delta(*part, scale=scale, initial_state=states[number])
            outputs.append(o)
    return torch.cat(outputs, 1), torch.cat(states) if call.output_final_state else None


def run_triton(call: GatedDeltaCall) -> Result:
    """Our kernels, which gather, norm and activate on chip."""
    operator, q, k = _kernels(), call.q_BTHD, call.k_BTGD
    q_index, kv_index = call.q_index_n, call.kv_index_n
    if q_index is None or kv_index is None:
        q_index = kv_index = _all_heads(q.shape[2], q.device)
    state = call.initial_state
    result: Result = operator.gated_delta_net(
        *(dense(x) for x in (q, k, call.v_BTGD, call.a_BTH, call.b_BTH)),
        call.A_log_H,
        call.dt_bias_H,
        q_index,
        kv_index,
        initial_state=None if state is None else state.float().contiguous(),
        cu_seqlens=call.cu_seqlens,
        output_final_state=call.output_final_state,
    )
    return result


@cache
def _all_heads(heads: int, device: torch.device) -> Tensor:
    # Made under inference_mode, the index could not serve a later backward pass.
    with torch.inference_mode(False):
        return torch.arange(heads, dtype=torch.int32, device=device)


def run_fla(call: GatedDeltaCall) -> Result:
    """fla-core's own kernels: recurrent for a single token, chunkwise otherwise."""
    step = call.purpose() == STEP
    name = "fused_recurrent_gated_delta_rule" if step else "chunk_gated_delta_rule"
    with _without_flashqla():
        return _recurrence(getattr(_fla(), name), call, norms_inside=not step)


def run_flashqla(call: GatedDeltaCall) -> Result:
    """FlashQLA itself, which fla-core 0.6 would also find; it takes q and k of unit length."""
    return _recurrence(_flashqla().chunk_gated_delta_rule, call, norms_inside=False)


def _recurrence(operator: Any, call: GatedDeltaCall, *, norms_inside: bool) -> Result:
    """An entry point with fla-core's signature. Keywords only: the positional order differs between them."""
    inputs = _activated(call, unit=not norms_inside)
    o, state = operator(
        **inputs._asdict(),
        scale=call.q_BTHD.shape[-1] ** -0.5,
        initial_state=call.initial_state,
        output_final_state=call.output_final_state,
        use_qk_l2norm_in_kernel=norms_inside,
        cu_seqlens=call.cu_seqlens,
    )
    return o, state if call.output_final_state else None


@contextmanager
def _without_flashqla() -> Iterator[None]:
    """Keeps fla-core from handing its call on to FlashQLA, which is a backend of its own here."""
    before = os.environ.get("FLA_FLASH_QLA")
    os.environ["FLA_FLASH_QLA"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["FLA_FLASH_QLA"]
        else:
            os.environ["FLA_FLASH_QLA"] = before


def triton_cannot(situation: Situation) -> str | None:
    """Why our Triton kernels can't serve."""
    return triton_lacks(situation, TRITON_DTYPES) or reason_of(_kernels())


def flashqla_cannot(situation: Situation) -> str | None:
    """Why FlashQLA can't serve."""
    if (reason := gpu_lacks(situation, HALF)) is not None:
        return reason
    if situation.head_dim != FLASHQLA_DIM:
        return f"takes head_dim {FLASHQLA_DIM} only"
    if situation.capability not in FLASHQLA_CHIPS:
        return "needs a GPU of the Hopper generation or newer"
    if situation.capability[0] == 12 and (
        situation.purpose == TRAINING or situation.dtype != torch.bfloat16
    ):
        return "on this GPU it is for bf16 without a backward pass"
    return reason_of(_flashqla())


def fla_cannot(situation: Situation) -> str | None:
    """Why fla-core can't serve."""
    if (reason := gpu_lacks(situation, HALF)) is not None:
        return reason
    if situation.head_dim > LARGEST_FLA_DIM:
        return f"takes head_dim up to {LARGEST_FLA_DIM}"
    found, triton = _fla(), triton_version()
    if isinstance(found, str):
        return found
    trains_on_hopper = situation.purpose == TRAINING and situation.capability[0] == 9
    if trains_on_hopper and triton is not None and triton_miscompiles(triton):
        return f"Triton {triton} miscompiles its backward pass on Hopper; 3.7.1 does not"
    return None


def no_steps(situation: Situation) -> str | None:
    """Chunkwise kernels leave single tokens to the recurrent ones."""
    return "has no kernel for single tokens" if situation.purpose == STEP else None


def triton_miscompiles(version: str) -> bool:
    """Whether this version of Triton gets fla-core's gated backward wrong on Hopper GPUs: 3.4.0 to 3.7.0."""
    return (3, 4, 0) <= version_numbers(version) <= (3, 7, 0)


@cache
def _kernels() -> Any:
    return imported("archsearch_kernels.gdn.operator", "archsearch_kernels")


@cache
def _fla() -> Any:
    return imported("fla.ops.gated_delta_rule", "fla-core")


@cache
def _flashqla() -> Any:
    return imported("flash_qla", "flash-qla")
