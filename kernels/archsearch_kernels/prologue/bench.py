"""Times the prologue on a GPU against torch ops: python -m archsearch_kernels.prologue.bench --to FILE.json [--sweep].

Correctness comes first, against the reference in fp64, and no time is reported where it fails. Times are medians of Triton's
do_bench in ms; times a kernel are of torch's profiler. Heads 0 and 9 of q are full attention without RoPE, with log-scale;
the others are linear, with RoPE; the KV heads that full heads read are written both ways.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from archsearch_kernels.prologue import kernel, reference
from archsearch_kernels.prologue.heads import HeadPlan, Part, plan_heads
from archsearch_kernels.timing import kernel_ms, median_ms, read_options

SHAPES = ((1, 32768), (8, 4096))
"""B and T; D 128, bf16."""
NUM_HEADS, NUM_KV_HEADS, DIM = 16, 8, 128
FULL = (0, 9)
CHECKED_TOKENS = 500
LARGEST_ERROR = 1e-2
LEAVES = ("q_BTHD", "k_BTGD", "q_weight_D", "k_weight_D")

SWEEP: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("write_parts", 2048, {"num_warps": 4, "num_stages": 1}),
    ("write_parts", 4096, {"num_warps": 8, "num_stages": 1}),
    ("write_parts", 8192, {"num_warps": 8, "num_stages": 1}),
    ("gather_gradients", 1024, {"num_warps": 4, "num_stages": 1}),
    ("gather_gradients", 2048, {"num_warps": 4, "num_stages": 1}),
    ("gather_gradients", 2048, {"num_warps": 8, "num_stages": 1}),
    ("gather_gradients", 4096, {"num_warps": 8, "num_stages": 1, "maxnreg": 96}),
)
"""Kernel, numbers a tile, way to compile."""


def plan_of(full: tuple[int, ...]) -> HeadPlan:
    group = NUM_HEADS // NUM_KV_HEADS
    parts = (
        Part("q", full, log_scale=True),
        Part("k", tuple(sorted({head // group for head in full}))),
        Part("q", tuple(head for head in range(NUM_HEADS) if head not in full), rotary=True),
        Part("k", tuple(range(NUM_KV_HEADS)), rotary=True),
    )
    return plan_heads(parts, NUM_HEADS, NUM_KV_HEADS, "cuda")


def draw(batch: int, tokens: int) -> dict[str, Any]:
    """Tensor arguments of prologue; the first four want gradients."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    frequencies = 1e6 ** -torch.linspace(0, 1, DIM // 2, device="cuda")
    positions = torch.arange(tokens, device="cuda")
    angles = (positions[:, None] * frequencies).repeat(1, 2)
    arguments: dict[str, Any] = {
        "q_BTHD": randn(batch, tokens, NUM_HEADS, DIM),
        "k_BTGD": randn(batch, tokens, NUM_KV_HEADS, DIM),
        "q_weight_D": 1 + 0.1 * randn(DIM),
        "k_weight_D": 1 + 0.1 * randn(DIM),
        "cos_BTD": angles.cos().bfloat16().expand(batch, tokens, DIM).contiguous(),
        "sin_BTD": angles.sin().bfloat16().expand(batch, tokens, DIM).contiguous(),
        "factor_BT": reference.log_scale(positions, 4096),
    }
    for name in LEAVES:
        arguments[name].requires_grad_()
    return arguments


def compose(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    plan: HeadPlan,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    cos_BTD: Tensor,
    sin_BTD: Tensor,
    factor_BT: Tensor,
) -> tuple[Tensor, ...]:
    """The same by torch ops in bf16, as a model without kernels writes it: heads gathered, then normed and rotated."""
    cos, sin = cos_BTD.unsqueeze(2), sin_BTD.unsqueeze(2)
    outputs = []
    for part, index in zip(plan.parts, _indices(plan), strict=True):
        is_q = part.source == "q"
        x = (q_BTHD if is_q else k_BTGD).index_select(2, index)
        x = F.rms_norm(x, (DIM,), q_weight_D if is_q else k_weight_D, 1e-6)
        if part.rotary:
            first, second = x.chunk(2, dim=-1)
            x = x * cos + torch.cat((-second, first), dim=-1) * sin
        if part.log_scale:
            x = x * factor_BT[..., None, None].to(x.dtype)
        outputs.append(x)
    return tuple(outputs)


_made: dict[HeadPlan, list[Tensor]] = {}


def _indices(plan: HeadPlan) -> list[Tensor]:
    if plan not in _made:
        _made[plan] = [torch.tensor(part.heads, device="cuda") for part in plan.parts]
    return _made[plan]


def errors_of(
    ours: Callable[..., Any], expected: Callable[..., Any], arguments: dict[str, Any]
) -> list[float]:
    """Norm of the difference over the norm, of outputs and gradients; `expected` runs on the inputs in fp64."""
    wide = {
        name: x.detach().double().requires_grad_(x.requires_grad) for name, x in arguments.items()
    }
    results = []
    for call, given in ((ours, arguments), (expected, wide)):
        outputs = call(**given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        leaves = [x for x in given.values() if x.requires_grad]
        generator = torch.Generator("cuda").manual_seed(1)
        factors = [
            torch.randn(x.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            for x in outputs
        ]
        factors = [factor.to(x.dtype) for factor, x in zip(factors, outputs, strict=True)]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, factors)])
    errors = [
        float((one.double() - other).norm().detach() / other.norm().detach())
        for one, other in zip(*results, strict=True)
    ]
    return [error if error == error else float("inf") for error in errors]  # noqa: PLR0124 - NaN


def passes_of(
    call: Callable[..., Any], arguments: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The forward pass, with its graph, and the backward pass of a call."""
    yield "forward", partial(call, **arguments)
    outputs = call(**arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [torch.randn_like(x) for x in outputs]
    leaves = [x for x in arguments.values() if x.requires_grad]
    yield "backward", partial(torch.autograd.grad, outputs, leaves, gradients, retain_graph=True)


def measure(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    arguments: dict[str, Any],
    num_bytes: dict[str, int],
) -> dict[str, Any]:
    """Times of both passes of both, and our bandwidth by the least bytes to move."""
    record: dict[str, Any] = {}
    for (name, ours_pass), (_, theirs_pass) in zip(
        passes_of(ours, arguments), passes_of(theirs, arguments), strict=True
    ):
        ms, torch_ms, kernels = median_ms(ours_pass), median_ms(theirs_pass), kernel_ms(ours_pass)
        record[name] = {
            "ms": ms,
            "bytes_per_s": num_bytes[name] / ms * 1e3,
            "kernel_ms": kernels,
            "kernel_bytes_per_s": num_bytes[name] / max(kernels.values()) * 1e3,
            "torch_ms": torch_ms,
            "times_faster": torch_ms / ms,
        }
    return record


def sweep(
    module: Any, runs: tuple[tuple[str, int, dict[str, int]], ...], calls: dict[str, Any]
) -> list[dict[str, Any]]:
    """Time of each kernel of module (a kernel.py) under other tiles and ways to compile it; calls by kernel."""
    records = []
    for name, numbers, options in runs:
        usual = module.LAUNCH[name], module.NUMBERS_A_TILE[name]
        module.LAUNCH[name], module.NUMBERS_A_TILE[name] = options, numbers
        record: dict[str, Any] = {"sweep": name, "numbers": numbers, **options}
        try:
            record["kernel_ms"] = kernel_ms(calls[name]).get(name)
        except Exception as error:  # a configuration may need more than the chip has
            record["failed"] = f"{type(error).__name__}: {error}"[:200]
        module.LAUNCH[name], module.NUMBERS_A_TILE[name] = usual
        records.append(record)
        print(json.dumps(record), flush=True)
    return records


def num_bytes(plan: HeadPlan, batch: int, tokens: int) -> dict[str, int]:
    """Least bytes to move: each head once, half of each table, the factor."""
    read, written = NUM_HEADS + NUM_KV_HEADS, plan.sources.numel()
    head, tables = 2 * DIM, 2 * DIM + 4
    return {
        "forward": batch * tokens * ((read + written) * head + tables),
        "backward": batch * tokens * ((2 * read + written) * head + tables),
    }


def first_call_s() -> dict[str, float]:
    """Seconds of the first call, forward and backward, and of the first with another head map."""
    seconds = {}
    for name, full in (("first_call_s", FULL), ("other_head_map_s", (1, 2, 3, 12, 15))):
        ours, arguments = partial(kernel.prologue, plan=plan_of(full)), draw(2, CHECKED_TOKENS)
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
    ours, theirs = partial(kernel.prologue, plan=plan), partial(compose, plan=plan)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **first_call_s(),
        "errors": errors_of(ours, partial(reference.prologue, plan=plan), draw(2, CHECKED_TOKENS)),
        "records": [],
    }
    print(json.dumps(result), flush=True)
    if max(result["errors"]) < LARGEST_ERROR:
        for batch, tokens in SHAPES:
            arguments = draw(batch, tokens)
            record = measure(ours, theirs, arguments, num_bytes(plan, batch, tokens))
            result["records"].append({"batch": batch, "tokens": tokens, **record})
            print(json.dumps(result["records"][-1]), flush=True)
        if options.sweep:
            calls = dict(passes_of(ours, draw(*SHAPES[0])))
            by_kernel = {
                "write_parts": calls["forward"],
                "gather_gradients": calls["backward"],
            }
            result["sweep"] = sweep(kernel, SWEEP, by_kernel)
    else:
        print(f"no times: an error is above {LARGEST_ERROR}")
    options.to.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
