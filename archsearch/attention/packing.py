"""Documents that are packed into rows and do not see each other.

Shapes: B rows, T tokens, N documents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """bounds_N: where documents begin in all rows laid end to end, and the end, int32 [N + 1]; positions_BT: places in them."""

    bounds_N: Tensor
    positions_BT: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, rows: int, tokens: int) -> Documents:
        """From bounds [N + 1] as kernels for sequences of several lengths take them; every row begins a document.

        Raises ValueError where they are no bounds; their values, which would have to be waited for, are not looked at.
        """
        if cu_seqlens.dim() != 1 or len(cu_seqlens) <= rows:
            raise ValueError(
                f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it needs [documents + 1], with a "
                f"document at least in each of the {rows} rows"
            )
        places = torch.arange(rows * tokens, dtype=torch.int32, device=cu_seqlens.device)
        bounds_N = cu_seqlens.int()
        number = torch.searchsorted(bounds_N, places, right=True) - 1
        return cls(bounds_N, (places - bounds_N[number]).view(rows, tokens).long())

    def pairs(self) -> Tensor:
        """Which key each query may see: itself and what is before it in its document, bool [B, 1, T, T]."""
        places_T = torch.arange(self.positions_BT.shape[1], device=self.positions_BT.device)
        first_BT = places_T - self.positions_BT
        same_BTT = first_BT[:, :, None] == first_BT[:, None]
        return (same_BTT & (places_T[:, None] >= places_T))[:, None]
