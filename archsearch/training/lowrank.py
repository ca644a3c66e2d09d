"""Keeps the twins' large matrices at low rank while they train: W = W_teacher + left @ right.

A trained supernet that is cut to a low rank loses quality; training the factors themselves afterwards wins most of
it back, and the result is stored by Supernet.save without further loss but quantisation.

Shapes: O rows (outputs), I columns (inputs), R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..models.supernet import Supernet

MATRICES = ("q_proj", "k_proj", "v_proj", "gate_proj")
"""The twins' Linear modules that are large enough to be worth factors."""


class LowRankDelta(nn.Module):
    """A parametrisation: the frozen matrix plus the product of two trained factors [O, R] and [R, I]."""

    def __init__(self, delta_OI: Tensor, rank: int) -> None:
        super().__init__()
        left_OK, values_K, right_KI = torch.linalg.svd(delta_OI.float(), full_matrices=False)
        root_R = values_K[:rank].sqrt()
        self.left = nn.Parameter(left_OK[:, :rank] * root_R)
        self.right = nn.Parameter(root_R[:, None] * right_KI[:rank])

    def forward(self, base_OI: Tensor) -> Tensor:
        """The matrix [O, I] in effect."""
        return base_OI + (self.left @ self.right).to(base_OI.dtype)


def restrict(supernet: Supernet, base: Supernet, rank: int) -> list[list[nn.Parameter]]:
    """Gives every large matrix of supernet the form base + factors of its present difference, at most rank.

    base are the migrated twins of the same teacher. Returns the parameters to train, a list a layer: the factors
    and whatever is not among MATRICES. Undo with bake.
    """
    groups = []
    for twin, origin in zip(supernet.twins, base.twins, strict=True):
        twin.requires_grad_(True)
        for name in MATRICES:
            linear = getattr(twin, name)
            if linear is None:
                continue
            start_OI = getattr(origin, name).weight.detach()
            delta_OI = linear.weight.detach() - start_OI
            linear.weight.data.copy_(start_OI)
            linear.weight.requires_grad_(False)
            parametrize.register_parametrization(linear, "weight", LowRankDelta(delta_OI, rank))
        groups.append([p for p in twin.parameters() if p.requires_grad])
    return groups


def bake(supernet: Supernet) -> None:
    """Puts the matrices in effect in the place of restrict's parametrisations; gradients off."""
    for twin in supernet.twins:
        for name in MATRICES:
            linear = getattr(twin, name)
            if linear is not None and parametrize.is_parametrized(linear, "weight"):
                parametrize.remove_parametrizations(linear, "weight")
    supernet.requires_grad_(False)
