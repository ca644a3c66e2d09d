"""What twins lose against their heads, and its gradients, taken layer by layer in one pass of the teacher.

Shapes: L layers, n of them visited, B sequences, T tokens, M = B * T, C hidden size, H query heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention.rotary import PositionEmbeddings
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from .head_errors import HeadErrors
from .loop import full_precision, mixed_precision
from .replay import Replay
from .taps import visit_layers
from .twin_error import as_o_proj_sees, output_roots


class AlignmentLoss:
    """The LossStep of alignment: mean over heads of squared error over variance, as o_proj sees both.

    Every head counts the same, whatever its size. errors, where given, is told of each head's error and says which
    layers are still trained: the others cost nothing, and count with their last error. replay records a step once, where
    that is asked for.
    """

    def __init__(
        self,
        teacher: Teacher,
        supernet: Supernet,
        variance_LH: Tensor,
        errors: HeadErrors | None = None,
        replay: Replay | None = None,
    ) -> None:
        self._teacher = teacher
        self._bank = BankLoss(supernet, output_roots(teacher.model), variance_LH)
        self._errors, self._replay = errors, replay

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Adds the gradients of a batch of ids on the CPU; returns the mean over layers."""
        num_layers = self._teacher.shape.num_layers
        layers = tuple(range(num_layers) if self._errors is None else self._errors.active)
        relative_1nH = add_gradients(self._teacher, [self._bank], ids_BT, layers, self._replay)
        total = relative_1nH.mean(-1).sum()
        if self._errors is not None:
            self._errors.add(layers, relative_1nH[0])
            total = total + self._errors.resting_sum
        return total / num_layers


class BankLoss:
    """What one supernet's twins lose in a visit to a layer; adds their gradients on the spot."""

    def __init__(self, supernet: Supernet, roots_LHDD: Tensor, variance_LH: Tensor) -> None:
        self._twins = supernet.twins
        self._roots = roots_LHDD
        self._variance_LH = variance_LH

    def visit(self, layer: int, x_BTC: Tensor, rope: PositionEmbeddings, o_BTHD: Tensor) -> Tensor:
        """Error over variance of each head, [H]."""
        with torch.enable_grad():
            twin_BTHD = self._twins[layer](x_BTC, rope)
            with full_precision(x_BTC.device):
                error_HMD = as_o_proj_sees(twin_BTHD.float() - o_BTHD.float(), self._roots[layer])
                squared_H = error_HMD.square().sum(-1).mean(-1)
                relative_H = squared_H / self._variance_LH[layer]
                relative_H.mean().backward()
        return relative_H.detach()


def add_gradients(
    teacher: Teacher,
    banks: Sequence[BankLoss],
    ids_BT: Tensor,
    layers: Sequence[int],
    replay: Replay | None = None,
) -> Tensor:
    """One pass of the teacher over ids on the CPU, which all banks share; errors over variance [banks, n, H]."""
    device = teacher.device
    if not layers:
        return torch.zeros(len(banks), 0, teacher.shape.num_heads, device=device)

    def work(ids_BT: Tensor) -> Tensor:
        found: list[Tensor] = []

        def visit(layer: int, x_BTC: Tensor, rope: PositionEmbeddings, o_BTHD: Tensor) -> None:
            found.extend(bank.visit(layer, x_BTC, rope, o_BTHD) for bank in banks)

        with torch.no_grad(), mixed_precision(device, teacher.model.dtype):
            visit_layers(teacher.model, ids_BT, visit, layers)
        return torch.stack(found).view(len(layers), len(banks), -1).transpose(0, 1)

    if device.type == "cuda":
        ids_BT = ids_BT.pin_memory()
    ids_BT = ids_BT.to(device, non_blocking=True)
    return work(ids_BT) if replay is None else replay(work, ids_BT, layers)
