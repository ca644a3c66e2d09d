"""What the gated delta rule's kernels take; shapes and names are kernel.py's. Nothing here waits for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from archsearch_kernels.gdn.schedule import MOST_CHUNKS
from archsearch_kernels.interpreter import INTERPRETED, check_device, check_tensors

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float32)
INTERPRETED_DTYPES = (torch.float32,)
"""Triton's interpreter multiplies the bits of bf16 numbers as if they were integers, and says nothing."""
GATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUNDS_DTYPES = (torch.int32, torch.int64)


def check_inputs(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    q_index_n: Tensor,
    kv_index_n: Tensor,
) -> None:
    """Types, shapes, devices and strides, and in the interpreter the values of the indices. Raises ValueError."""
    tiles, gates = (q_BTHD, k_BTGD, v_BTGD), (a_BTH, b_BTH)
    floats, indices = (*tiles, *gates, A_log_H, dt_bias_H), (q_index_n, kv_index_n)
    check_tensors("q, k, v, a, b, A_log, dt_bias, q_index, kv_index", (*floats, *indices))
    dtype, device = q_BTHD.dtype, q_BTHD.device
    if q_BTHD.ndim != 4 or k_BTGD.ndim != 4:
        raise ValueError(f"q {tuple(q_BTHD.shape)} and k {tuple(k_BTGD.shape)}: need 4 dimensions")
    batch, tokens, heads, dim = q_BTHD.shape
    groups = k_BTGD.shape[2]
    if dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {dim}; allowed: {', '.join(map(str, HEAD_DIMS))}")
    if dtype not in DTYPES or k_BTGD.dtype != dtype or v_BTGD.dtype != dtype:
        raise ValueError(f"q, k, v must all be bf16 or fp32; got {[x.dtype for x in tiles]}")
    if k_BTGD.shape != (batch, tokens, groups, dim) or v_BTGD.shape != k_BTGD.shape:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", tiles, strict=True))
        raise ValueError(f"{shapes} do not fit")
    of_tokens, of_heads = (batch, tokens, heads), (heads,)
    if (
        a_BTH.shape != of_tokens
        or b_BTH.shape != of_tokens
        or A_log_H.shape != of_heads
        or dt_bias_H.shape != of_heads
    ):
        raise ValueError(f"a, b must be {of_tokens}, A_log and dt_bias {of_heads}")
    for x in floats:
        if x.stride()[-1] != 1:
            raise ValueError("the last stride of every input must be 1")
        if x.dtype not in GATE_DTYPES:
            raise ValueError(f"a, b, A_log, dt_bias must be bf16, fp16 or fp32; got {x.dtype}")
        if x.device != device:
            raise _devices_differ((*floats, *indices))
    _check_indices(q_index_n, kv_index_n, heads, groups, device)
    check_device(device)
    if INTERPRETED and dtype not in INTERPRETED_DTYPES:
        raise ValueError("Triton's interpreter computes products of bf16 wrongly: use fp32 there")


def _check_indices(
    q_index_n: Tensor, kv_index_n: Tensor, heads: int, groups: int, device: torch.device
) -> None:
    for x in (q_index_n, kv_index_n):
        if x.dtype != torch.int32 or x.ndim != 1:
            raise ValueError("q_index and kv_index must be int32 vectors")
        if x.device != device:
            raise _devices_differ((q_index_n, kv_index_n), device)
    if q_index_n.shape != kv_index_n.shape:
        raise ValueError("q_index and kv_index must be equally long")
    if INTERPRETED:
        for name, x, count in (("q_index", q_index_n, heads), ("kv_index", kv_index_n, groups)):
            if wrong := [head for head in x.tolist() if not 0 <= head < count]:
                raise ValueError(f"{name} names heads {wrong} of {count}")


def check_options(
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunks_per_segment: int | None
) -> None:
    """Raises ValueError for what is no option; what cu_seqlens holds is schedule.py's to check, a state's shape check_state's."""
    check_tensors("initial_state, cu_seqlens", (initial_state, cu_seqlens), optional=True)
    if cu_seqlens is not None and (cu_seqlens.ndim != 1 or cu_seqlens.dtype not in BOUNDS_DTYPES):
        raise ValueError(
            f"cu_seqlens must be a vector of int32 or int64; got {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        )
    if chunks_per_segment is not None and not (
        isinstance(chunks_per_segment, int) and 1 <= chunks_per_segment <= MOST_CHUNKS
    ):
        raise ValueError(
            f"chunks_per_segment is {chunks_per_segment!r}; allowed: None, or 1 to {MOST_CHUNKS}"
        )


def check_parts(parts: int) -> None:
    """Raises ValueError for backward_parts that is no number of parts."""
    if not isinstance(parts, int) or parts < 1:
        raise ValueError(f"backward_parts is {parts!r}; allowed: whole numbers from 1 on")


def check_state(state: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises ValueError for an initial state of another shape, type or device."""
    if state is None:
        return
    if state.shape != shape or state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(
            f"initial_state must be fp32 {shape} without gaps; got {state.dtype} {tuple(state.shape)}"
        )
    if state.device != device:
        raise ValueError(f"initial_state is on {state.device}, q on {device}")


def check_no_gradient(*tensors: Tensor | None) -> None:
    """Raises ValueError where autograd would expect a backward pass of the bare forward."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            "gdn_forward has no backward: call operator.gated_delta_net, or this under torch.no_grad()"
        )


def _devices_differ(tensors: Sequence[Tensor], *devices: torch.device) -> ValueError:
    names = sorted({str(device) for device in (*devices, *(x.device for x in tensors))})
    return ValueError(f"all inputs must be on one device; got {names}")
