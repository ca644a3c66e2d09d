"""Fixtures of the kernels' tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors hold NaN, so that what a kernel leaves out or reads too early shows."""

    def poison(create: Any) -> Any:
        def created(*args: Any, **options: Any) -> Tensor:
            x: Tensor = create(*args, **options)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return created

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poison(Tensor.new_empty))
