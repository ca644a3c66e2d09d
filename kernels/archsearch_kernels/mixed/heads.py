"""Which operator each query head of a layer runs, and every table that the layer's kernels read for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from archsearch_kernels.fusion.heads import FusionPlan, Head, plan_fusion
from archsearch_kernels.prologue.heads import HeadPlan, Part, plan_heads


@dataclass(frozen=True)
class Switches:
    """What a model wants of its two branches: rotation of q and k, and queries times the logarithm of their position."""

    full_rotary: bool = True
    full_log_scale: bool = False
    linear_rotary: bool = True


BOTH_ROTATED = Switches()


@dataclass(frozen=True, eq=False)
class MixedPlan:
    """The heads of one layer, full attention (`full`, ascending) and Gated DeltaNet (`linear`), with tables on a device.

    full_kv: KV heads that full attention reads, each once where all have equally many readers, else once a query head.
    kv_runs: full_kv cut into even steps, as slices of places and of KV heads. linear_kv: the KV head of each linear head.
    """

    full: tuple[int, ...]
    linear: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    switches: Switches
    full_kv: tuple[int, ...]
    kv_runs: tuple[tuple[slice, slice], ...]
    linear_kv: tuple[int, ...]
    prologue: HeadPlan
    """Writes q and k of full attention, then of the linear heads, which read k of all KV heads by index."""
    prologue_full: HeadPlan | None
    prologue_linear: HeadPlan | None
    fusion: FusionPlan
    q_index: Tensor
    kv_index: Tensor
    full_kv_index: Tensor

    @property
    def device(self) -> torch.device:
        return self.q_index.device


def plan_mixed(
    full: Sequence[int],
    linear: Sequence[int],
    num_kv_heads: int,
    device: torch.device | str,
    switches: Switches = BOTH_ROTATED,
) -> MixedPlan:
    """The plan of a head map, built once for equal arguments.

    Raises ValueError unless full and linear together hold each of the query heads once, a multiple of num_kv_heads.
    """
    place = torch.device(device)
    if not all(isinstance(x, int) for x in (*full, *linear, num_kv_heads)):
        raise ValueError(
            f"heads {full} and {linear}, {num_kv_heads} KV heads: whole numbers are possible"
        )
    return _plan_mixed(tuple(sorted(full)), tuple(linear), num_kv_heads, place, switches)


@lru_cache(maxsize=1024)
def _plan_mixed(
    full: tuple[int, ...],
    linear: tuple[int, ...],
    num_kv_heads: int,
    device: torch.device,
    switches: Switches,
) -> MixedPlan:
    num_heads = len(full) + len(linear)
    if not num_heads or sorted((*full, *linear)) != list(range(num_heads)):
        raise ValueError(f"heads {full} and {linear}: each of 0 to n - 1 must come once")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    group = num_heads // num_kv_heads
    full_kv = _keys_of_full(full, group)
    parts_full = (
        Part("q", full, switches.full_rotary, switches.full_log_scale),
        Part("k", full_kv, switches.full_rotary),
    )
    parts_linear = (
        Part("q", linear, switches.linear_rotary),
        Part("k", tuple(range(num_kv_heads)), switches.linear_rotary),
    )
    plans = [
        plan_heads(parts, num_heads, num_kv_heads, device) if heads else None
        for heads, parts in ((full, parts_full), (linear, parts_linear))
    ]
    both = (*(parts_full if full else ()), *(parts_linear if linear else ()))
    linear_kv = tuple(head // group for head in linear)

    def table(numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    # Made under inference_mode, the tables could not serve a later backward pass.
    with torch.inference_mode(False):
        return MixedPlan(
            full=full,
            linear=linear,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            switches=switches,
            full_kv=full_kv,
            kv_runs=_even_steps(full_kv),
            linear_kv=linear_kv,
            prologue=plan_heads(both, num_heads, num_kv_heads, device),
            prologue_full=plans[0],
            prologue_linear=plans[1],
            fusion=plan_fusion(_fused_heads(full, linear), device),
            q_index=table(range(len(linear)), torch.int32),
            kv_index=table(linear_kv, torch.int32),
            full_kv_index=table(full_kv, torch.long),
        )


def _keys_of_full(full: tuple[int, ...], group: int) -> tuple[int, ...]:
    readers = [head // group for head in full]
    distinct = sorted(set(readers))
    # Grouped attention kernels need equally many readers of each KV head.
    even = len({readers.count(head) for head in distinct}) < 2
    return tuple(distinct if even else readers)


def _even_steps(heads: tuple[int, ...]) -> tuple[tuple[slice, slice], ...]:
    """heads cut into runs of one positive step: the places of each run and its heads, as slices."""
    runs: list[tuple[slice, slice]] = []
    first = 0
    while first < len(heads):
        last, step = first, 1
        if first + 1 < len(heads) and heads[first + 1] > heads[first]:
            last, step = first + 1, heads[first + 1] - heads[first]
            while last + 1 < len(heads) and heads[last + 1] - heads[last] == step:
                last += 1
        runs.append((slice(first, last + 1), slice(heads[first], heads[last] + 1, step)))
        first = last + 1
    return tuple(runs)


def _fused_heads(full: tuple[int, ...], linear: tuple[int, ...]) -> list[Head]:
    """Full attention passes as it is; linear heads have norm, gamma, bias and gate, rows in their own order."""
    heads = [Head(in_full=True, place=place, norm=False) for place in range(len(full))]
    heads += [Head(in_full=False, place=i, row=i, gate=i) for i in range(len(linear))]
    order = (*full, *linear)
    return [heads[order.index(head)] for head in range(len(order))]
