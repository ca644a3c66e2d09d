"""Causal softmax attention by torch's SDPA, its kernels asked for by name, so that none is slow without a word."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HOPPER = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
"""SDPA's own choice took 13.0 ms forward where cuDNN took 7.6 (B 1, T 32768, 16 heads, D 128, one H200; no record of the lab book)."""
OLDER = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
WIDE = (SDPBackend.EFFICIENT_ATTENTION,)
"""The one fused kernel for fp32."""
HALF = (torch.bfloat16, torch.float16)


def attend(q_BTnD: Tensor, k_BTmD: Tensor, v_BTmD: Tensor) -> Tensor:
    """[B, T, n, D]; query head i reads KV head i m / n. Raises RuntimeError where no fused kernel takes the call."""
    k_BTmD, v_BTmD = (_spread(x, q_BTnD) for x in (k_BTmD, v_BTmD))
    q, k, v = (x.transpose(1, 2) for x in (q_BTnD, k_BTmD, v_BTmD))
    grouped = k.shape[1] < q.shape[1]
    if not q.is_cuda:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return o.transpose(1, 2)
    with sdpa_kernel(list(_kernels(q.dtype, q.device)), set_priority=True):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return o.transpose(1, 2)


def _spread(x_BTmD: Tensor, q_BTnD: Tensor) -> Tensor:
    """KV heads repeated where the only fused kernel has no grouped mode."""
    if q_BTnD.dtype in HALF or not q_BTnD.is_cuda or x_BTmD.shape[2] == q_BTnD.shape[2]:
        return x_BTmD
    return x_BTmD.repeat_interleave(q_BTnD.shape[2] // x_BTmD.shape[2], dim=2)


@cache
def _kernels(dtype: torch.dtype, device: torch.device) -> tuple[SDPBackend, ...]:
    if dtype not in HALF:
        return WIDE
    return HOPPER if torch.cuda.get_device_capability(device) >= (9, 0) else OLDER
