"""Residual streams outside a whole forward: what a changed head adds, and the half of a layer that is local.

Legend: S streams, R rows, C hidden size, I MLP size, H query heads, D head dim, A positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

ROW_BYTES = 512 * 1024**2
"""Most bytes that the intermediate activations of one pass through an MLP take."""


def head_deltas(weight_CX: Tensor, change_AHD: Tensor) -> Tensor:
    """What a change of each head's output alone adds to the residual stream, [H, A, C].

    weight_CX is o_proj's weight, its columns head after head (X = H * D); the result has change_AHD's dtype.
    """
    weight_CHD = weight_CX.to(change_AHD.dtype).view(len(weight_CX), *change_AHD.shape[-2:])
    return torch.einsum("ahd,chd->hac", change_AHD, weight_CHD)


def feed_forward(layer: Any, middle: Tensor) -> Tensor:
    """The second half of a layer (norm, MLP, residual) on any positions [.., C], in chunks of ROW_BYTES.

    Runs in the dtype of middle: in bf16 a small patch would vanish beside the residual stream.
    """
    weights = {name: p.to(middle.dtype) for name, p in layer.mlp.named_parameters()}
    rows_RC = middle.reshape(-1, middle.shape[-1])
    out_RC = torch.empty_like(rows_RC)
    size = (3 * layer.mlp.up_proj.out_features + 3 * rows_RC.shape[1]) * middle.element_size()
    step = max(1, ROW_BYTES // size)
    for start in range(0, len(rows_RC), step):
        part_RC = rows_RC[start : start + step]
        normed_RC = layer.post_attention_layernorm(part_RC).to(part_RC.dtype)
        changed_RC = functional_call(layer.mlp, weights, (normed_RC,))
        torch.add(part_RC, changed_RC, out=out_RC[start : start + step])
    return out_RC.view(middle.shape)


@contextmanager
def tail_precision(dtype: torch.dtype) -> Iterator[None]:
    """fp32 matrix products may use TF32 where the model itself is bf16; an fp32 model gets them in full."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == torch.bfloat16 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
