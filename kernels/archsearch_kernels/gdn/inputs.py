"""What the gated delta rule's kernels take; shapes and names are kernel.py's."""

from __future__ import annotations

import torch
from torch import Tensor

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float32)


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
    """Shapes, types, devices and strides; values of the indices are the caller's, since reading them would wait for the GPU.

    Raises ValueError.
    """
    tiles, gates = (q_BTHD, k_BTGD, v_BTGD), (a_BTH, b_BTH)
    batch, tokens, heads, dim = q_BTHD.shape
    if dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {dim}; allowed: {', '.join(map(str, HEAD_DIMS))}")
    if q_BTHD.dtype not in DTYPES or any(x.dtype != q_BTHD.dtype for x in tiles):
        raise ValueError(f"q, k, v must all be bf16 or fp32; got {[x.dtype for x in tiles]}")
    groups = k_BTGD.shape[2]
    if k_BTGD.shape != (batch, tokens, groups, dim) or v_BTGD.shape != k_BTGD.shape:
        raise ValueError(f"q {q_BTHD.shape}, k {k_BTGD.shape} and v {v_BTGD.shape} do not fit")
    if any(x.shape != (batch, tokens, heads) for x in gates) or any(
        x.shape != (heads,) for x in (A_log_H, dt_bias_H)
    ):
        raise ValueError(f"a, b must be {(batch, tokens, heads)}, A_log and dt_bias {(heads,)}")
    floats = (*tiles, *gates, A_log_H, dt_bias_H)
    if any(x.stride(-1) != 1 for x in floats):
        raise ValueError("the last stride of every input must be 1")
    if any(x.dtype != torch.int32 or x.ndim != 1 for x in (q_index_n, kv_index_n)):
        raise ValueError("q_index and kv_index must be int32 vectors")
    if q_index_n.shape != kv_index_n.shape:
        raise ValueError("q_index and kv_index must be equally long")
    devices = {x.device for x in (*floats, q_index_n, kv_index_n)}
    if len(devices) > 1:
        raise ValueError(f"all inputs must be on one device; got {sorted(map(str, devices))}")


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
