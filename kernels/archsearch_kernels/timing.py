"""Times of calls on a GPU, and the command line of what takes them, for the benches."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

NO_GPU = 3
"""Exit status where the machine lacks what times are taken on."""


def read_options(description: str | None) -> argparse.Namespace:
    """The options of a bench that writes a file: to, sweep. Ends the process with one line where there is no GPU."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="where the times go, as JSON"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="also times each kernel under other ways to compile it"
    )
    options = parser.parse_args()
    require_gpu(parser)
    return options


def require_gpu(parser: argparse.ArgumentParser) -> None:
    """Ends the process with one line where there is no GPU."""
    if not torch.cuda.is_available():
        parser.exit(NO_GPU, f"{parser.prog}: needs a CUDA device\n")


def median_ms(call: Callable[[], object], warmup_ms: int = 10, repeat_ms: int = 60) -> float:
    """Median time of a call with a cold L2, by GPU events."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=warmup_ms, rep=repeat_ms, return_mode="median"))


def kernel_ms(call: Callable[[], object], repeats: int = 10) -> dict[str, float]:
    """Mean time of each GPU kernel of a call, by its name in torch's profiler."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    events = profiler.key_averages()
    return {event.key: event.device_time_total / repeats / 1e3 for event in events}
