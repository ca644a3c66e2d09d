"""How far a twin is from its head: squared error as o_proj sees it, over the head's own variance.

An error e of head h reaches the residual stream as W_o[h] e, so it is measured as |W_o[h] e|^2 = |R e|^2 with
W_o[h] = Q R. Over the variance, 1 is what the best constant vector achieves, and 0 is a perfect twin.

Shapes: L layers, B sequences, T tokens, C hidden size, H query heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..attention.rotary import PositionEmbeddings
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from .loop import full_precision, mixed_precision
from .taps import visit_layers

SMALLEST_SHARE = 1e-4
"""A head's variance counts as at least this share of its layer's mean: some heads are nearly constant."""


def output_roots(model: HydraHeadForCausalLM) -> Tensor:
    """R of W_o[h] = Q R for every head: [L, H, D, D] in fp32 on the model's device."""
    dim = model.config.head_dim
    roots = []
    for layer in model.model.layers:
        weight_CHD = layer.self_attn.o_proj.weight.detach().float().unflatten(1, (-1, dim))
        gram_HDD = torch.einsum("chd,che->hde", weight_CHD, weight_CHD)
        # The symmetric root has the same |R e| and, unlike QR, takes C < D too.
        values_HD, vectors_HDD = torch.linalg.eigh(gram_HDD)
        roots.append((vectors_HDD * values_HD.clamp(min=0).sqrt().unsqueeze(1)).mT)
    return torch.stack(roots)


def as_o_proj_sees(values_BTHD: Tensor, root_HDD: Tensor) -> Tensor:
    """R times each head's vectors, as [H, B * T, D]; its squared norms are those after o_proj."""
    values_HMD = values_BTHD.float().flatten(0, 1).transpose(0, 1)
    return values_HMD @ root_HDD.mT


@dataclass(frozen=True)
class TwinErrors:
    """Errors and variances of all heads, [L, H] in fp32 on the teacher's device, as o_proj sees them."""

    squared_LH: Tensor
    """Mean over tokens of |R (twin - head)|^2."""
    variance_LH: Tensor
    """Mean over tokens of |R (head - its mean)|^2, floored by SMALLEST_SHARE."""

    @property
    def relative_LH(self) -> Tensor:
        """Squared error over variance: what reports call the error of a twin."""
        return self.squared_LH / self.variance_LH


def measure_twins(
    teacher: Teacher, supernet: Supernet, tokens_NT: Tensor, *, batch_tokens: int = 8192
) -> TwinErrors:
    """Errors of every twin on tokens, with the teacher's own hidden states as its input.

    Raises ValueError where tokens are not [N, T] or empty.
    """
    return measure_banks(teacher, [supernet], tokens_NT, batch_tokens=batch_tokens)[0]


def measure_banks(
    teacher: Teacher,
    supernets: Sequence[Supernet],
    tokens_NT: Tensor,
    *,
    layers: Collection[int] | None = None,
    batch_tokens: int = 8192,
) -> list[TwinErrors]:
    """measure_twins of several supernets in one pass of the teacher; errors of layers left out are zero.

    Raises ValueError where tokens are not [N, T] or empty.
    """
    if tokens_NT.ndim != 2 or tokens_NT.numel() == 0:
        raise ValueError(f"tokens have shape {tuple(tokens_NT.shape)}, not [N, T]")
    sums = _Sums(teacher, supernets)
    rows = max(1, batch_tokens // tokens_NT.shape[1])
    with torch.no_grad(), mixed_precision(teacher.device, teacher.model.dtype):
        for ids_BT in tokens_NT.long().split(rows):
            visit_layers(teacher.model, ids_BT.to(teacher.device), sums.add, layers)
    return sums.errors(tokens_NT.numel())


class _Sums:
    """Sums over tokens of squared errors, squared heads and heads; fp64, since the variance cancels."""

    def __init__(self, teacher: Teacher, supernets: Sequence[Supernet]) -> None:
        self._banks = [supernet.twins for supernet in supernets]
        self._roots = output_roots(teacher.model)
        shape = self._roots.shape[:3]
        device = teacher.device
        self._square_LH = torch.zeros(shape[:2], dtype=torch.float64, device=device)
        self._errors = [torch.zeros_like(self._square_LH) for _ in supernets]
        self._sum_LHD = torch.zeros(shape, dtype=torch.float64, device=device)

    def add(self, layer: int, x_BTC: Tensor, rope: PositionEmbeddings, o_BTHD: Tensor) -> None:
        outputs = [twins[layer](x_BTC, rope) for twins in self._banks]
        root_HDD = self._roots[layer]
        with full_precision(x_BTC.device):
            head_HMD = as_o_proj_sees(o_BTHD, root_HDD)
            self._square_LH[layer] += head_HMD.square().sum((1, 2), dtype=torch.float64)
            self._sum_LHD[layer] += head_HMD.sum(1, dtype=torch.float64)
            for error_LH, twin_BTHD in zip(self._errors, outputs, strict=True):
                error_HMD = as_o_proj_sees(twin_BTHD.float() - o_BTHD.float(), root_HDD)
                error_LH[layer] += error_HMD.square().sum((1, 2), dtype=torch.float64)

    def errors(self, tokens: int) -> list[TwinErrors]:
        mean_LHD = self._sum_LHD / tokens
        variance_LH = self._square_LH / tokens - mean_LHD.square().sum(-1)
        floor_L1 = SMALLEST_SHARE * variance_LH.mean(1, keepdim=True)
        variance_LH = torch.maximum(variance_LH, floor_L1).clamp(
            min=torch.finfo(torch.float32).tiny
        )
        return [
            TwinErrors((error_LH / tokens).float(), variance_LH.float())
            for error_LH in self._errors
        ]
