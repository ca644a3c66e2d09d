"""Times the forward on a GPU against fla-core: python -m archsearch_kernels.gdn.bench --to FILE.json [--sweep].

Correctness comes first, against the fp32 reference, and no time is reported where it fails. Times are medians of Triton's
do_bench in ms. Two kinds of heads: `short` forgets half of its memory in 64 tokens, `long` in 65536 (then nothing of a
segment is forgotten before its end, and the second pass is whole). Times a kernel are of torch's profiler.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from archsearch_kernels.gdn import kernel, reference
from archsearch_kernels.timing import kernel_ms, median_ms, read_options

SHAPES = ((1, 32768), (8, 4096))
"""B and T; 16 query heads over 8 KV heads, 14 of the query heads run, D 128, bf16."""
NUM_HEADS, NUM_KV_HEADS, DIM = 16, 8, 128
HALF_LIVES = {"short": 64.0, "long": 65536.0}
CHECKED_TOKENS = 500
LARGEST_ERROR = 1e-2
BYTES_A_TOKEN_HEAD = 4 * 2 * DIM + 2 * 2 + 2 * 2
"""Least bytes to move: q, k, v, o, and what a and b bring."""
FLA_SECONDS = 60.0
"""fla-core compiles and tunes for each shape; after so many seconds the bench does without the rest."""

SWEEP: tuple[tuple[str, dict[str, int]], ...] = (
    ("transform", {"num_stages": 1}),
    ("transform", {"num_stages": 1, "maxnreg": 112}),
    ("transform", {"num_warps": 8, "num_stages": 1}),
    ("summarize", {"num_stages": 1}),
    ("attend", {"num_stages": 1}),
    ("attend", {"num_stages": 3}),
)


def draw(batch: int, tokens: int, half_life: float, num_heads: int) -> dict[str, Any]:
    """Arguments of gdn_forward, for the first num_heads query heads."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(heads: int, *dim: int) -> Tensor:
        shape = (batch, tokens, heads, *dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    rate = torch.full((NUM_HEADS,), 0.6931 / half_life, device="cuda")
    index = torch.arange(num_heads, device="cuda", dtype=torch.int32)
    return {
        "q_BTHD": randn(NUM_HEADS, DIM),
        "k_BTGD": randn(NUM_KV_HEADS, DIM),
        "v_BTGD": randn(NUM_KV_HEADS, DIM),
        "a_BTH": randn(NUM_HEADS),
        "b_BTH": randn(NUM_HEADS),
        "A_log_H": torch.zeros(NUM_HEADS, device="cuda"),
        "dt_bias_H": rate.expm1().log(),
        "q_index_n": index,
        "kv_index_n": index // (NUM_HEADS // NUM_KV_HEADS),
    }


def largest_error(half_life: float) -> float:
    """Norm of the difference over the norm, of outputs and last states, with and without cut sequences."""
    arguments = draw(2, CHECKED_TOKENS, half_life, 3)
    state = torch.randn(2, 3, DIM, DIM, device="cuda")
    options: dict[str, Any] = {"initial_state": state, "output_final_state": True}
    expected = reference.gdn_forward(**arguments, **options)
    errors = []
    for cut in (None, 2):
        found = kernel.gdn_forward(**arguments, **options, chunks_per_segment=cut)
        for one, other in zip(found, expected, strict=True):
            assert one is not None
            assert other is not None
            error = float((one.float() - other).norm() / other.norm())
            errors.append(error if error == error else float("inf"))  # noqa: PLR0124 - NaN
    return max(errors)


def fla_forward(arguments: dict[str, Any]) -> Callable[[], Any] | None:
    """fla-core on the same heads, gathered and activated beforehand; None where it is not installed."""
    try:
        fla = importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError:
        return None
    queries, keys = arguments["q_index_n"].long(), arguments["kv_index_n"].long()
    raw = arguments["a_BTH"].float() + arguments["dt_bias_H"]
    inputs = {
        "q": arguments["q_BTHD"][:, :, queries].contiguous(),
        "k": arguments["k_BTGD"][:, :, keys].contiguous(),
        "v": arguments["v_BTGD"][:, :, keys].contiguous(),
        "g": (-arguments["A_log_H"].exp() * F.softplus(raw))[:, :, queries].contiguous(),
        "beta": arguments["b_BTH"].float().sigmoid()[:, :, queries].contiguous(),
    }
    return lambda: fla.chunk_gated_delta_rule(
        **inputs, scale=DIM**-0.5, use_qk_l2norm_in_kernel=True, output_final_state=False
    )


def bench(batch: int, tokens: int, kind: str, deadline: float) -> dict[str, Any]:
    """A record: our time, bandwidth by the floor's bytes, time of each kernel, memory beside inputs, and fla's time."""
    arguments = draw(batch, tokens, HALF_LIVES[kind], 14)
    token_heads = batch * tokens * 14
    call = partial(kernel.gdn_forward, **arguments)
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated() - before
    ms = median_ms(call)
    record: dict[str, Any] = {
        "batch": batch,
        "tokens": tokens,
        "heads": 14,
        "kind": kind,
        "ms": ms,
        "kernel_ms": kernel_ms(call),
        "floor_bytes_per_s": token_heads * BYTES_A_TOKEN_HEAD / ms * 1e3,
        "extra_bytes_a_token_head": peak_bytes / token_heads,
    }
    # fla's time does not depend on the kind of heads.
    fla = fla_forward(arguments) if kind == "short" and time.monotonic() < deadline else None
    if fla is not None:
        ours, theirs = call()[0].float(), fla()[0].float()
        record["fla_difference"] = float((ours - theirs).norm() / theirs.norm())
        record["fla_ms"] = median_ms(fla)
        record["times_faster"] = record["fla_ms"] / ms
    return record


def sweep() -> list[dict[str, Any]]:
    """Time of each kernel under other ways to compile it, at both shapes."""
    records = []
    for name, options in SWEEP:
        usual, kernel.LAUNCH[name] = kernel.LAUNCH[name], options
        for batch, tokens in SHAPES:
            arguments = draw(batch, tokens, HALF_LIVES["long"], 14)
            call = partial(kernel.gdn_forward, **arguments)
            record: dict[str, Any] = {"sweep": name, **options, "batch": batch, "tokens": tokens}
            try:
                times = kernel_ms(call)
                record["kernel_ms"] = times.get(name)
            except Exception as error:  # a configuration may need more than the chip has
                record["failed"] = f"{type(error).__name__}: {error}"[:200]
            records.append(record)
            print(json.dumps(record), flush=True)
        kernel.LAUNCH[name] = usual
    return records


def first_calls() -> dict[str, float]:
    """Seconds of the first call in this process (compiled unless Triton's cache has it), and of another head map's first."""
    seconds = {}
    for name, heads in (("first_call_s", 14), ("other_head_map_s", 16), ("one_head_s", 1)):
        arguments = draw(1, 8192, HALF_LIVES["long"], heads)
        torch.cuda.synchronize()
        start = time.perf_counter()
        kernel.gdn_forward(**arguments, chunks_per_segment=16)
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
    return seconds


def main() -> None:
    """Writes the times, or none where a result is wrong."""
    options = read_options(__doc__)
    deadline = time.monotonic() + FLA_SECONDS
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **first_calls(),
        "errors": {kind: largest_error(half_life) for kind, half_life in HALF_LIVES.items()},
        "records": [],
    }
    print(json.dumps(result), flush=True)
    if max(result["errors"].values()) < LARGEST_ERROR:
        for batch, tokens in SHAPES:
            for kind in HALF_LIVES:
                result["records"].append(bench(batch, tokens, kind, deadline))
                print(json.dumps(result["records"][-1]), flush=True)
        if options.sweep:
            result["sweep"] = sweep()
    else:
        print(f"no times: an error is above {LARGEST_ERROR}")
    options.to.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
