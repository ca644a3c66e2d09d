"""Results that the graph does not keep but makes again when the backward pass asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Place(NamedTuple):
    """A view of one of the results."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Remade:
    """Under hooks(), operators that save `made`, or views of them, save where to find them in what make() returns."""

    def __init__(self, made: Sequence[Tensor], make: Callable[[], Sequence[Tensor]]) -> None:
        self._numbers = {x.untyped_storage().data_ptr(): i for i, x in enumerate(made)}
        self._make = make
        self._saved = 0
        self._again: Sequence[Tensor] | None = None
        self._handed_out = 0

    def hooks(self) -> saved_tensors_hooks:
        """The context in which the operators run forward; `made` must live as long."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Any:
        # The storages' addresses are unique while the results live, and no longer.
        number = self._numbers.get(x.untyped_storage().data_ptr()) if x.numel() else None
        if number is None:
            return x.detach()
        self._saved += 1
        return _Place(number, x.size(), x.stride(), int(x.storage_offset()))

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Place):
            found: Tensor = packed
            return found
        if self._again is None:
            with torch.no_grad():
                self._again = self._make()
        view = self._again[packed.number].as_strided(packed.size, packed.stride, packed.offset)
        self._handed_out += 1
        if self._handed_out == self._saved:
            self._again, self._handed_out = None, 0
        return view
