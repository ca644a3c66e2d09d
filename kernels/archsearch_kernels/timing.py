"""Times of calls on a GPU, for the benches."""

from __future__ import annotations

from collections.abc import Callable

import torch


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
