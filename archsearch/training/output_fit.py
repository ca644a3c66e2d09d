"""gamma and bias of a twin, in closed form from moments of its output n and its head's output o.

What is made small is |R (gamma * n + bias - o)|^2, the error as o_proj sees it (twin_error has R), G = R^T R.

Shapes: B sequences, T tokens, M = B * T, H query heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ScaleName

RIDGE = 1e-4
"""Added to the diagonal of the least-squares problem, as a share of its mean."""


@dataclass(frozen=True)
class Moments:
    """Second moments over tokens, fp64 [H, D, D], and G; about the means where there is a bias to take those up."""

    nn_HDD: Tensor
    no_HDD: Tensor
    oo_HDD: Tensor
    gram_HDD: Tensor


class OutputFit:
    """Collects moments of n and o over tokens, and solves for gamma and bias."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: list[Tensor] = []

    def add(self, n_BTHD: Tensor, o_BTHD: Tensor) -> None:
        """Counts some tokens in."""
        n_HMD, o_HMD = (values.float().flatten(0, 1).transpose(0, 1) for values in (n_BTHD, o_BTHD))
        moments = (n_HMD.sum(1), o_HMD.sum(1), n_HMD.mT @ n_HMD, n_HMD.mT @ o_HMD, o_HMD.mT @ o_HMD)
        parts = [moment.double() for moment in moments]
        if self._sums:
            parts = [a + b for a, b in zip(self._sums, parts, strict=True)]
        self._sums = parts
        self._count += n_HMD.shape[1]

    def solve(
        self, root_HDD: Tensor, *, with_bias: bool, scale: ScaleName = "least_squares"
    ) -> tuple[Tensor, Tensor]:
        """gamma by one of SCALES and the bias that is best with it, [H, D] each; zero without with_bias."""
        mean_n, mean_o, *second = (value / self._count for value in self._sums)
        if with_bias:
            pairs = ((mean_n, mean_n), (mean_n, mean_o), (mean_o, mean_o))
            second = [
                moment - a.unsqueeze(2) * b.unsqueeze(1)
                for moment, (a, b) in zip(second, pairs, strict=True)
            ]
        root_HDD = root_HDD.double()
        nn_HDD, no_HDD, oo_HDD = second
        gamma_HD = SCALES[scale](Moments(nn_HDD, no_HDD, oo_HDD, root_HDD.mT @ root_HDD))
        bias_HD = mean_o - gamma_HD * mean_n if with_bias else torch.zeros_like(gamma_HD)
        return gamma_HD, bias_HD


def least_squares(moments: Moments) -> Tensor:
    """The best number a channel: (G * E[n n^T]) gamma = (G * E[n o^T]) 1."""
    left_HDD = moments.gram_HDD * moments.nn_HDD
    diagonal_HD = left_HDD.diagonal(dim1=-2, dim2=-1)
    ridge_H = RIDGE * diagonal_HD.mean(-1).clamp(min=1e-30)
    unit_DD = torch.eye(left_HDD.shape[-1], dtype=left_HDD.dtype, device=left_HDD.device)
    right_HD = (moments.gram_HDD * moments.no_HDD).sum(-1)
    gamma_HD: Tensor = torch.linalg.solve(left_HDD + ridge_H[:, None, None] * unit_DD, right_HD)
    return gamma_HD


def least_squares_by_head(moments: Moments) -> Tensor:
    """The best number a head (Taylor-Calibrate's output scale)."""
    own_H = _seen(moments, moments.nn_HDD).clamp(min=1e-30)
    return _of_heads(moments, _seen(moments, moments.no_HDD) / own_H)


def rms_ratio(moments: Moments) -> Tensor:
    """The head's RMS over the twin's, as o_proj sees both: one number a head that gives the twin its head's size."""
    own_H = _seen(moments, moments.nn_HDD).clamp(min=1e-30)
    ratio_H = _seen(moments, moments.oo_HDD).clamp(min=0) / own_H
    return _of_heads(moments, ratio_H.sqrt())


def ones(moments: Moments) -> Tensor:
    """No scale."""
    return torch.ones_like(moments.nn_HDD[..., 0])


def _seen(moments: Moments, second_HDD: Tensor) -> Tensor:
    """The trace of G times a moment, [H]: what a mean of products is after o_proj."""
    return (moments.gram_HDD * second_HDD).sum((1, 2))


def _of_heads(moments: Moments, value_H: Tensor) -> Tensor:
    return value_H.unsqueeze(1).expand(moments.nn_HDD.shape[:2])


SCALES: dict[ScaleName, Callable[[Moments], Tensor]] = {
    "least_squares": least_squares,
    "least_squares_by_head": least_squares_by_head,
    "rms": rms_ratio,
    "one": ones,
}
"""gamma [H, D] of each name that supernet.init.scale may have."""
