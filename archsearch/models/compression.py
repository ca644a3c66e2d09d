"""Small storage for stacks of matrices: low-rank factors and rows, as 8- or 4-bit integers with scales.

Shapes: L layers, O rows (outputs), I columns (inputs), R rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LEFT, RIGHT, ROWS, SCALE = ":left", ":right", ":rows", ":scale"
"""What is appended to a parameter's name for the tensors that store it."""

BITS = (8, 4)


def factorise(
    delta_LOI: Tensor, rank: int, *, input_gram_LII: Tensor | None = None, bits: int = 8
) -> dict[str, Tensor]:
    """Rank-R factors of each layer's matrix, quantised: {":left": .., ":right": .., and their scales}.

    The left factor holds the top R left singular vectors of delta @ chol(input_gram), so that the error is least
    on inputs with that second moment (on white inputs where none is given). The right factor is the least-squares
    fit to the left one as quantised. Raises ValueError for bits other than 8 or 4.
    """
    delta_LOI = delta_LOI.float()
    weighted = delta_LOI if input_gram_LII is None else delta_LOI @ input_gram_LII.to(delta_LOI)
    _, vectors_LOO = torch.linalg.eigh(weighted @ delta_LOI.mT)
    left_LRO = vectors_LOO[..., -rank:].mT.contiguous()
    packed = {LEFT + key: value for key, value in quantise(left_LRO, bits).items()}
    left_LOR = dequantise(packed[LEFT], packed[LEFT + SCALE], left_LRO.shape[-1]).mT
    right_LRI = torch.linalg.lstsq(left_LOR, delta_LOI).solution
    return packed | {RIGHT + key: value for key, value in quantise(right_LRI, bits).items()}


def multiply(stored: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    """The stack [L, O, I] that factorise stored under name."""
    left_LRO = dequantise(stored[name + LEFT], stored[name + LEFT + SCALE], shape[-2])
    right_LRI = dequantise(stored[name + RIGHT], stored[name + RIGHT + SCALE], shape[-1])
    return left_LRO.mT @ right_LRI


def quantise(rows: Tensor, bits: int = 8) -> dict[str, Tensor]:
    """{"": integers, ":scale": fp32} with one scale a row (last dimension), symmetric about zero.

    Four-bit integers lie two to a byte; an odd row is padded by one.
    """
    if bits not in BITS:
        raise ValueError(f"bits {bits}; allowed: {BITS}")
    limit = 2 ** (bits - 1) - 1
    scale = rows.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / limit
    levels = (rows / scale).round().clamp(-limit, limit).to(torch.int8)
    if bits == 4:
        levels = torch.nn.functional.pad(levels, (0, levels.shape[-1] % 2)) + 8
        levels = (levels[..., ::2] + 16 * levels[..., 1::2].to(torch.int16)).to(torch.uint8)
    return {"": levels, SCALE: scale}


def dequantise(levels: Tensor, scale: Tensor, length: int) -> Tensor:
    """The fp32 rows that quantise stored; length is that of a row. uint8 marks four-bit integers."""
    if levels.dtype == torch.uint8:
        levels = torch.stack((levels % 16, levels // 16), dim=-1).flatten(-2)[..., :length]
        levels = levels.to(torch.int8) - 8
    return levels.float() * scale
