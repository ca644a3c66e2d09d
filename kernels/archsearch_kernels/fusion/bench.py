"""Times the fusion on a GPU against torch ops: python -m archsearch_kernels.fusion.bench --to FILE.json [--sweep].

Correctness comes first, against the reference in fp64, and no time is reported where it fails. Heads 0 and 9 are full
attention and pass as they are; the others are linear, with norm, gamma, bias and gate. prologue/bench.py says how times are taken.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from archsearch_kernels.fusion import kernel, reference
from archsearch_kernels.fusion.heads import FusionPlan, Head, plan_fusion
from archsearch_kernels.prologue.bench import errors_of, measure, passes_of, sweep
from archsearch_kernels.timing import read_options

SHAPES = ((1, 32768), (8, 4096))
"""B and T; D 128, bf16."""
NUM_HEADS, DIM = 16, 128
FULL = (0, 9)
CHECKED_TOKENS = 500
LARGEST_ERROR = 1e-2

SWEEP: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("fuse", 2048, {"num_warps": 4, "num_stages": 1}),
    ("fuse", 4096, {"num_warps": 8, "num_stages": 1}),
    ("fuse", 8192, {"num_warps": 8, "num_stages": 1}),
    ("part_gradients", 1024, {"num_warps": 4, "num_stages": 1}),
    ("part_gradients", 2048, {"num_warps": 8, "num_stages": 1}),
    ("part_gradients", 2048, {"num_warps": 4, "num_stages": 1, "maxnreg": 96}),
    ("part_gradients", 4096, {"num_warps": 8, "num_stages": 1}),
)
"""Kernel, numbers a tile, way to compile."""


def plan_of(full: tuple[int, ...]) -> FusionPlan:
    linear = [head for head in range(NUM_HEADS) if head not in full]
    heads = []
    for head in range(NUM_HEADS):
        if head in full:
            heads.append(Head(True, full.index(head), norm=False))
        else:
            place = linear.index(head)
            heads.append(Head(False, place, row=place, gate=place))
    return plan_fusion(heads, "cuda")


def draw(batch: int, tokens: int, num_full: int) -> dict[str, Any]:
    """Tensor arguments of fusion, the full branch with heads before tokens, as attention leaves it."""
    generator = torch.Generator("cuda").manual_seed(0)
    num_linear = NUM_HEADS - num_full

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    arguments = {
        "full_BTFD": randn(batch, num_full, tokens, DIM).transpose(1, 2),
        "linear_BTnD": randn(batch, tokens, num_linear, DIM),
        "gamma_RD": 1 + 0.1 * randn(num_linear, DIM),
        "bias_RD": randn(num_linear, DIM),
        "gate_BTED": randn(batch, tokens, num_linear, DIM),
    }
    return {name: x.requires_grad_() for name, x in arguments.items()}


def compose(
    full_BTFD: Tensor,
    linear_BTnD: Tensor,
    order: Tensor,
    gamma_RD: Tensor,
    bias_RD: Tensor,
    gate_BTED: Tensor,
) -> Tensor:
    """The same by torch ops in bf16, as a model without kernels writes it: order [H] in the branches put together."""
    x = F.rms_norm(linear_BTnD, (DIM,), None, 1e-6) * gamma_RD + bias_RD
    x = x * (2 * torch.sigmoid(gate_BTED))
    return torch.cat((full_BTFD, x), dim=2).index_select(2, order).flatten(2)


def num_bytes(plan: FusionPlan, batch: int, tokens: int) -> dict[str, int]:
    """Least bytes to move: each head and gate once."""
    heads, gates, head = len(plan.heads), len(plan.gates), 2 * DIM
    return {
        "forward": batch * tokens * (2 * heads + gates) * head,
        "backward": batch * tokens * (3 * heads + 2 * gates) * head,
    }


def first_call_s() -> dict[str, float]:
    """Seconds of the first call, forward and backward, and of the first with another head map."""
    seconds = {}
    for name, full in (("first_call_s", FULL), ("other_head_map_s", (1, 2, 3, 12, 15))):
        ours, arguments = (
            partial(kernel.fusion, plan=plan_of(full)),
            draw(2, CHECKED_TOKENS, len(full)),
        )
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _, call in passes_of(ours, arguments):
            call()
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
    return seconds


def main() -> None:
    """Writes the times, or none where a result is wrong."""
    options = read_options(__doc__)
    plan = plan_of(FULL)
    places = [h.place if h.in_full else plan.num_full + h.place for h in plan.heads]
    order = torch.tensor(places, device="cuda")
    ours, theirs = partial(kernel.fusion, plan=plan), partial(compose, order=order)
    checked = draw(2, CHECKED_TOKENS, len(FULL))
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **first_call_s(),
        "errors": errors_of(ours, partial(reference.fusion, plan=plan), checked),
        "records": [],
    }
    print(json.dumps(result), flush=True)
    if max(result["errors"]) < LARGEST_ERROR:
        for batch, tokens in SHAPES:
            arguments = draw(batch, tokens, len(FULL))
            record = measure(ours, theirs, arguments, num_bytes(plan, batch, tokens))
            result["records"].append({"batch": batch, "tokens": tokens, **record})
            print(json.dumps(result["records"][-1]), flush=True)
        if options.sweep:
            calls = dict(passes_of(ours, draw(*SHAPES[0], len(FULL))))
            by_kernel = {"fuse": calls["forward"], "part_gradients": calls["backward"]}
            result["sweep"] = sweep(kernel, SWEEP, by_kernel)
    else:
        print(f"no times: an error is above {LARGEST_ERROR}")
    options.to.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
