"""The gated delta rule by whoever computes it, alike in all but the code, and what each costs a fresh process.

    python -m archsearch.lab.kernel_rivals ours|fla|flashqla --to FILE [--times]

runs in an empty process: seconds from its start to the first result with gradients, to that of a second head map with another
number of heads, to that of another batch shape, and with --times medians. FILE is written after each step, so that a
process that is stopped still tells how far it came.

Shapes: B batch, T tokens, H query heads, G KV heads, n heads that run, D head_dim.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn import functional as F

from archsearch_kernels.timing import require_gpu

from .kernel_timing import median_ms

NUM_HEADS, NUM_KV_HEADS, DIM = 16, 8, 128
SHAPES = ((1, 32768), (8, 4096))
"""B and T."""
HALF_LIVES = {"short": 64.0, "long": 65536.0}
"""Tokens in which a head forgets half; with `long` nothing is forgotten before a segment ends."""
TUNING_MS = (5, 25)
"""Warm-up and repeats when fla-core tunes: its kernels are compiled by then, and it has some 150 variants."""


@dataclass(frozen=True)
class Case:
    """A forward pass and the leaves of its gradients, as autograd wants them."""

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]

    def both(self) -> tuple[Tensor, ...]:
        """The gradients, forward pass included."""
        out = self.forward()
        return torch.autograd.grad(out, self.leaves, torch.ones_like(out))

    def backward(self) -> Callable[[], tuple[Tensor, ...]]:
        """The backward pass alone, to be repeated."""
        out = self.forward()
        generator = torch.Generator(out.device).manual_seed(3)
        d_out = torch.randn(out.shape, generator=generator, device=out.device, dtype=out.dtype)
        return lambda: torch.autograd.grad(out, self.leaves, d_out, retain_graph=True)

    def passes(self) -> dict[str, Callable[[], Callable[[], object]]]:
        """What makes each pass, to be repeated, on the stream that is current then."""
        return {"forward": lambda: self.forward, "backward": self.backward}


def draw_core(
    batch: int,
    tokens: int,
    half_life: float = 64.0,
    heads: int = 14,
    *,
    dim: int = DIM,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> dict[str, Any]:
    """Arguments of gated_delta_net, the first `heads` of 16 query heads over 8 KV heads, random."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        x = torch.randn(batch, tokens, *shape, generator=generator, device=device, dtype=dtype)
        return x.requires_grad_()

    rate = torch.full((NUM_HEADS,), 0.6931 / half_life, device=device)
    index = torch.arange(heads, device=device, dtype=torch.int32)
    return {
        "q_BTHD": randn(NUM_HEADS, dim),
        "k_BTGD": randn(NUM_KV_HEADS, dim),
        "v_BTGD": randn(NUM_KV_HEADS, dim),
        "a_BTH": randn(NUM_HEADS),
        "b_BTH": randn(NUM_HEADS),
        "A_log_H": torch.zeros(NUM_HEADS, device=device, requires_grad=True),
        "dt_bias_H": rate.expm1().log().requires_grad_(),
        "q_index_n": index,
        "kv_index_n": index // (NUM_HEADS // NUM_KV_HEADS),
    }


def ours(arguments: dict[str, Any]) -> Case:
    """Our kernels: heads by index, norms and gates in the time."""
    from archsearch_kernels.gdn.operator import gated_delta_net

    leaves = tuple(x for x in arguments.values() if x.requires_grad)
    return Case(lambda: gated_delta_net(**arguments)[0], leaves)


def fla(arguments: dict[str, Any]) -> Case:
    """fla-core: heads gathered, gates activated and cast beforehand; L2 norms in its kernels."""
    os.environ["FLA_FLASH_QLA"] = "0"
    return _published(arguments, norms_inside=True)


def flashqla(arguments: dict[str, Any]) -> Case:
    """FlashQLA by way of fla-core: q and k of unit length beforehand too. Raises ImportError where it is not there."""
    for module in ("tilelang", "flash_qla"):
        importlib.import_module(module)
    os.environ["FLA_FLASH_QLA"] = "1"
    return _published(arguments, norms_inside=False)


def _published(arguments: dict[str, Any], *, norms_inside: bool) -> Case:
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    queries, keys = arguments["q_index_n"].long(), arguments["kv_index_n"].long()
    with torch.no_grad():
        q = arguments["q_BTHD"][:, :, queries]
        k, v = (arguments[name][:, :, keys] for name in ("k_BTGD", "v_BTGD"))
        if not norms_inside:
            q, k = (F.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
        raw = arguments["a_BTH"].float() + arguments["dt_bias_H"]
        g = (-arguments["A_log_H"].exp() * F.softplus(raw))[:, :, queries]
        beta = arguments["b_BTH"].float().sigmoid()[:, :, queries]
    leaves = tuple(x.contiguous().requires_grad_() for x in (q, k, v, g, beta))
    inputs = dict(zip(("q", "k", "v", "g", "beta"), leaves, strict=True))
    options = {"scale": q.shape[-1] ** -0.5, "use_qk_l2norm_in_kernel": norms_inside}
    return Case(lambda: rule(**inputs, **options)[0], leaves)


RIVALS: dict[str, Callable[[dict[str, Any]], Case]] = {
    "ours": ours,
    "fla": fla,
    "flashqla": flashqla,
}


def forget_tuning() -> int:
    """Has every autotuned kernel tune anew at its next call; the number of them.

    fla-core's choice does not depend on B and T, so that it tunes for each shape only if told.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def tune(call: Callable[[], Any], quantiles: Any) -> Any:
        warmup, rep = TUNING_MS
        return do_bench(call, warmup=warmup, rep=rep, quantiles=quantiles)

    # By type alone: isinstance would wake lazily imported modules.
    tuned: list[Any] = [x for x in gc.get_objects() if issubclass(type(x), Autotuner)]
    for kernel in tuned:
        kernel.cache.clear()
        kernel._do_bench = tune
    return len(tuned)


class Journal:
    """Facts of a process, written at each new one. What was measured between two steps does not count as their time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started = psutil.Process().create_time()
        self.facts: dict[str, Any] = {}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time that does not count."""
        before = time.time()
        yield
        self._started += time.time() - before

    def note(self, name: str, value: Any = None) -> None:
        """Writes a fact; without a value, the seconds since the process began."""
        self.facts[name] = round(time.time() - self._started, 3) if value is None else value
        # Whenever this process is killed, the file is whole.
        fresh = self._path.with_name(f"{self._path.name}.new")
        fresh.write_text(json.dumps(self.facts) + "\n")
        fresh.replace(self._path)


def fresh_process(name: str, journal: Journal, *, times: bool) -> None:
    """What the head of this file says."""
    torch.ones(1, device="cuda").sum().item()
    journal.note("device_ready_s")
    for fact, shape, heads in (
        ("first_map_s", SHAPES[0], 14),
        ("second_map_s", SHAPES[0], 12),
        ("second_shape_s", SHAPES[1], 14),
    ):
        case = RIVALS[name](draw_core(*shape, heads=heads))
        case.both()
        torch.cuda.synchronize()
        journal.note(fact)
        if times and heads == 14:
            label = f"B{shape[0]} T{shape[1]}"
            with journal.aside():
                journal.note(f"forward_ms {label}", median_ms(case.forward))
                journal.note(f"backward_ms {label}", median_ms(case.backward()))
    journal.note("finished", True)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=RIVALS, help="who computes")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="the journal")
    parser.add_argument("--times", action="store_true", help="also medians of both passes")
    options = parser.parse_args()
    require_gpu(parser)
    journal = Journal(options.to)
    try:
        fresh_process(options.name, journal, times=options.times)
    except Exception as error:  # a rival that is not there or breaks is a finding
        journal.note("failed", f"{type(error).__name__}: {error}"[:400])
        sys.exit(1)


if __name__ == "__main__":
    main()
