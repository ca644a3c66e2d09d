"""Where each query head's output comes from and what becomes of it before o_proj, as a table on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """One query head.

    in_full: whether the full-attention branch computed it, and not the linear one. place: which head of that branch it is.
    norm: whether its output is normed. row: its row of gamma and bias, None where they leave it alone. gate: its head of the
    gate's projection, None where no gate does.
    """

    in_full: bool
    place: int
    norm: bool = True
    row: int | None = None
    gate: int | None = None


@dataclass(frozen=True, eq=False)
class FusionPlan:
    """table [H, 8], int32: 1 for the full branch, place, norm, row or -1, gate or -1, three unused."""

    heads: tuple[Head, ...]
    table: Tensor
    num_full: int
    num_linear: int
    rows: tuple[int, ...]
    gates: tuple[int, ...]

    @cached_property
    def least_rows(self) -> int:
        """Rows that gamma and bias must have."""
        return max(self.rows, default=-1) + 1

    @cached_property
    def least_gates(self) -> int:
        """Heads that the gate must have."""
        return max(self.gates, default=-1) + 1


def plan_fusion(heads: Sequence[Head], device: torch.device | str) -> FusionPlan:
    """The table of heads[h] for each query head h in o_proj's order, built once for equal arguments.

    Raises ValueError unless the places of each branch are 0 to n - 1, once each, and no row or gate serves two heads.
    """
    for head in heads:
        if not isinstance(head, Head):
            raise ValueError(f"heads {heads}: a sequence of Head is possible")
        numbers = (head.place, *(x for x in (head.row, head.gate) if x is not None))
        if not all(isinstance(x, int) for x in numbers):
            raise ValueError(f"{head}: place, row and gate are whole numbers")
    return _plan_fusion(tuple(heads), torch.device(device))


@lru_cache(maxsize=4096)
def _plan_fusion(heads: tuple[Head, ...], device: torch.device) -> FusionPlan:
    counts = {}
    for in_full, name in ((True, "full"), (False, "linear")):
        places = sorted(head.place for head in heads if head.in_full == in_full)
        if places != list(range(len(places))):
            raise ValueError(f"places of the {name} branch are {places}: each must come once")
        counts[name] = len(places)
    used = {
        "row": tuple(head.row for head in heads if head.row is not None),
        "gate": tuple(head.gate for head in heads if head.gate is not None),
    }
    for name, numbers in used.items():
        if len(set(numbers)) < len(numbers) or min(numbers, default=0) < 0:
            raise ValueError(f"each {name} serves one head; got {list(numbers)}")
    rows = [
        [int(h.in_full), h.place, int(h.norm), *(-1 if x is None else x for x in (h.row, h.gate))]
        for h in heads
    ]
    # Made under inference_mode, the table could not serve a later backward pass.
    with torch.inference_mode(False):
        table = torch.tensor([[*row, 0, 0, 0] for row in rows], dtype=torch.int32, device=device)
    return FusionPlan(
        heads, table, counts["full"], counts["linear"], rows=used["row"], gates=used["gate"]
    )
