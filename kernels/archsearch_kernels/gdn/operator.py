"""The gated delta rule as a differentiable operator on a GPU: the kernels' forward and backward pass joined for autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from archsearch_kernels.gdn.backward import gdn_backward
from archsearch_kernels.gdn.gradients import Gates
from archsearch_kernels.gdn.inputs import check_parts
from archsearch_kernels.gdn.kernel import Call, Links, gdn_forward, run_forward


def gated_delta_net(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    q_index_n: Tensor,
    kv_index_n: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    chunks_per_segment: int | None = None,
    backward_parts: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """kernel.gdn_forward, which says what it computes, with gradients of all but the indices.

    Entries of q_index must differ, and every index be that of a head: neither is checked on a GPU. Heads that do not run get zero gradients. Until the backward pass, 276 bytes a token-head
    (bf16), and two fp32 states a segment where sequences are cut, are kept beside the inputs; there is no second derivative.
    The backward pass itself takes 1.7 kB a token-head (D 128), in backward_parts one after another only that of a part's tokens;
    sequences are then cut into more segments. Raises ValueError for what gdn_forward refuses and for fewer parts than one.
    """
    check_parts(backward_parts)
    tensors = (q_BTHD, k_BTGD, v_BTGD, a_BTH, b_BTH, A_log_H, dt_bias_H)
    states = () if initial_state is None else (initial_state,)
    # Whatever is no tensor is gdn_forward's to refuse.
    trains = any(getattr(x, "requires_grad", False) for x in (*tensors, *states))
    if not trains or not torch.is_grad_enabled():
        return gdn_forward(
            *tensors,
            q_index_n,
            kv_index_n,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            chunks_per_segment=chunks_per_segment,
        )
    options = (cu_seqlens, output_final_state, chunks_per_segment, backward_parts)
    o, final = _GatedDeltaNet.apply(  # type: ignore[no-untyped-call]
        *tensors, initial_state, q_index_n, kv_index_n, *options
    )
    return o, final


class _GatedDeltaNet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        """Takes seven tensors, the initial state, two indices and the options of gated_delta_net, in its order."""
        tensors, (initial_state, *indices), options = arguments[:7], arguments[7:10], arguments[10:]
        cu_seqlens, output_final_state, chunks_per_segment, backward_parts = options
        outcome = run_forward(
            *tensors,
            *indices,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            chunks_per_segment=chunks_per_segment,
            backward_parts=backward_parts,
        )
        call, links = outcome.call, outcome.links
        made: tuple[Tensor, ...] = ()
        if call is not None:
            made = (call.x, call.local, call.factors, call.g, call.c, call.totals)
        ctx.plan = None if call is None else call.plan
        # Not among the saved tensors, which come back as new objects: what is kept by index would never be found again.
        ctx.indices = indices
        ctx.save_for_backward(*tensors, initial_state, *made, *(links or ()))
        ctx.set_materialize_grads(False)
        return outcome.o_BTnD, outcome.final_NnDD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BTnD: Tensor | None, d_final: Tensor | None = None) -> Any:
        q, k, v, a, b, A_log, dt_bias, initial, *rest = ctx.saved_tensors
        q_index, kv_index = ctx.indices
        unused = (None,) * 6
        if ctx.plan is None or (do_BTnD is None and d_final is None):
            tensors = (q, k, v, a, b, A_log, dt_bias, initial)
            return *(None if x is None else torch.zeros_like(x) for x in tensors), *unused
        if do_BTnD is None:
            do_BTnD = q.new_zeros(*q.shape[:2], q_index.numel(), q.shape[3])
        call = Call(q, k, v, q_index, kv_index, initial, ctx.plan, *rest[:6])
        links = Links(*rest[6:]) if rest[6:] else None
        gates = Gates(a, b, A_log, dt_bias)
        return *gdn_backward(call, links, gates, do_BTnD, d_final), *unused
