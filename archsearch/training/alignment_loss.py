"""What twins lose against their heads, and its gradients, taken layer by layer in one pass of the teacher.

Shapes: L layers, B sequences, T tokens, M = B * T, C hidden size, H query heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..attention.rotary import PositionEmbeddings
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from .head_errors import HeadErrors
from .loop import full_precision, mixed_precision
from .taps import visit_layers
from .twin_error import as_o_proj_sees, output_roots


class AlignmentLoss:
    """The LossStep of alignment: mean over heads of squared error over variance, as o_proj sees both.

    Every head counts the same, whatever its size. errors, where given, is told of each head's error and says which
    layers are still trained: the others cost nothing, and count with their last error.
    """

    def __init__(
        self,
        teacher: Teacher,
        supernet: Supernet,
        variance_LH: Tensor,
        errors: HeadErrors | None = None,
    ) -> None:
        self._teacher = teacher
        self._bank = BankLoss(supernet, output_roots(teacher.model), variance_LH, errors)
        self._errors = errors

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Adds the gradients of a batch; returns the mean over layers."""
        active = None if self._errors is None else self._errors.active
        (total,) = add_gradients(
            self._teacher, [self._bank], on_device(ids_BT, self._teacher.device), active
        )
        if self._errors is not None:
            self._errors.end_step()
            total = total + self._errors.resting_sum
        return total / self._teacher.shape.num_layers


class BankLoss:
    """What one supernet's twins lose in a visit to a layer; adds their gradients on the spot."""

    def __init__(
        self,
        supernet: Supernet,
        roots_LHDD: Tensor,
        variance_LH: Tensor,
        errors: HeadErrors | None = None,
    ) -> None:
        self._twins = supernet.twins
        self._roots = roots_LHDD
        self._variance_LH = variance_LH
        self._errors = errors
        self.total = torch.zeros((), device=roots_LHDD.device)
        """Sum over the layers visited since it was last set to zero."""

    def visit(
        self, layer: int, x_BTC: Tensor, position_embeddings: PositionEmbeddings, o_BTHD: Tensor
    ) -> None:
        """A Visit."""
        with torch.enable_grad():
            twin_BTHD = self._twins[layer](x_BTC, position_embeddings)
            with full_precision(x_BTC.device):
                error_HMD = as_o_proj_sees(twin_BTHD.float() - o_BTHD.float(), self._roots[layer])
                squared_H = error_HMD.square().sum(-1).mean(-1)
                relative_H = squared_H / self._variance_LH[layer]
                loss = relative_H.mean()
                loss.backward()
        self.total = self.total + loss.detach()
        if self._errors is not None:
            self._errors.add(layer, relative_H.detach())


def add_gradients(
    teacher: Teacher,
    banks: Sequence[BankLoss],
    ids_BT: Tensor,
    layers: Collection[int] | None = None,
) -> list[Tensor]:
    """One pass of the teacher, which all banks share; returns each one's sum over layers. ids are on the device."""

    def visit(
        layer: int, x_BTC: Tensor, position_embeddings: PositionEmbeddings, o_BTHD: Tensor
    ) -> None:
        for bank in banks:
            bank.visit(layer, x_BTC, position_embeddings, o_BTHD)

    for bank in banks:
        bank.total = torch.zeros((), device=teacher.device)
    with torch.no_grad(), mixed_precision(teacher.device, teacher.model.dtype):
        visit_layers(teacher.model, ids_BT, visit, layers)
    return [bank.total for bank in banks]


def on_device(ids_BT: Tensor, device: torch.device) -> Tensor:
    """ids on the CPU moved to device, on a GPU without waiting for it."""
    if device.type == "cuda":
        ids_BT = ids_BT.pin_memory()
    return ids_BT.to(device, non_blocking=True)
