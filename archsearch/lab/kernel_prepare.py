"""Has fla-core's kernels compiled, every variant that its tuning will try, by many processes at once.

    python -m archsearch.lab.kernel_prepare --share K --of N --to FILE

is one of these processes: it goes through everything that the figures ask of fla-core, compiles each Nth variant into Triton's
cache and launches none of them. Tuning itself stays whole and happens where times are taken, with nothing beside it.
Compiled one after another, the 122 variants of one number of heads take more than a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from archsearch_kernels.mixed import composition
from archsearch_kernels.mixed.bench import FULL, SHAPES, draw_layer, gradients, plan_of
from archsearch_kernels.timing import require_gpu

from .kernel_layer import RATIOS
from .kernel_rivals import RIVALS, draw_core

MOST_PROCESSES = 12
"""Each holds a CUDA context and the tensors of one layer, some 6 GiB."""


class Share:
    """This process's part of all variants, each counted once however often it is met."""

    def __init__(self, number: int, count: int) -> None:
        self._number, self._count = number, count
        self._met: set[tuple[object, ...]] = set()
        self.compiled = 0
        self.impossible = 0

    def facts(self) -> dict[str, int]:
        """Variants of all processes, those compiled here, and those that do not compile."""
        return {
            "variants": len(self._met),
            "compiled": self.compiled,
            "impossible": self.impossible,
        }

    def run(self, tuner: Any, *args: Any, **options: Any) -> None:
        """In place of Autotuner.run: compiles the variants that are this process's."""
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        known = _specialized(tuner, {**tuner.nargs, **options})
        for config in tuner.prune_configs(options):
            name = (tuner.base_fn.__name__, known, str(config))
            if name in self._met:
                continue
            self._met.add(name)
            if len(self._met) % self._count == self._number:
                self._compile(tuner, config, args, options)

    def _compile(self, tuner: Any, config: Any, args: Any, options: dict[str, Any]) -> None:
        from triton.compiler.errors import CompileTimeAssertionFailure
        from triton.runtime.errors import OutOfResources, PTXASError

        self.compiled += 1
        try:
            tuner.fn.run(*args, **{**options, "warmup": True, **config.all_kwargs()})
        except (CompileTimeAssertionFailure, OutOfResources, PTXASError):
            self.impossible += 1  # tuning passes over it too


def _specialized(tuner: Any, named: dict[str, Any]) -> tuple[object, ...]:
    """What of the arguments decides the compilation, nearly: types of tensors, other values but run-time ones."""
    kernel = tuner.fn
    while not hasattr(kernel, "do_not_specialize"):
        kernel = kernel.fn
    return tuple(
        (name, str(getattr(x, "dtype", x)))
        for name, x in named.items()
        if name in tuner.arg_names and name not in kernel.do_not_specialize
    )


def everything() -> list[Callable[[], object]]:
    """All that the figures ask of fla-core, each at the shapes it is timed at, which decide some variants."""
    calls: list[Callable[[], object]] = []
    for batch, tokens in SHAPES:
        calls.append(partial(_core, batch, tokens))
        calls += [partial(_layer, ratio, batch, tokens) for ratio in RATIOS]
    return calls


def _core(batch: int, tokens: int) -> None:
    RIVALS["fla"](draw_core(batch, tokens)).both()


def _layer(ratio: str, batch: int, tokens: int) -> None:
    arguments = draw_layer(batch, tokens, plan_of(FULL[ratio]))
    gradients(partial(composition.mixed_heads, **arguments), arguments)


def compile_share(number: int, count: int) -> Share:
    """Compiles every count-th variant. Results of the calls are garbage: no tuned kernel runs."""
    from triton.runtime.autotuner import Autotuner

    share = Share(number, count)
    run = Autotuner.run

    def compile_only(tuner: Any, *args: Any, **options: Any) -> None:
        share.run(tuner, *args, **options)

    Autotuner.run = compile_only
    try:
        for call in everything():
            call()
    finally:
        Autotuner.run = run
    return share


def prepare(scratch: Path, seconds: float) -> dict[str, Any]:
    """Runs the processes, for so many seconds at most; what they did, and which did not finish."""
    count = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    began, module = time.monotonic(), "archsearch.lab.kernel_prepare"
    # Each compiles on a core of its own.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    files = [scratch / f"share{number}.json" for number in range(count)]
    processes = []
    try:
        for number, file in enumerate(files):
            command = [sys.executable, "-m", module, "--share", str(number), "--of", str(count)]
            processes.append(subprocess.Popen([*command, "--to", str(file)], env=environment))
        ends = [_end_of(process, began + seconds - time.monotonic()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    return {
        "processes": count,
        "seconds": round(time.monotonic() - began, 1),
        "variants": max((facts["variants"] for facts in found), default=0),
        "compiled": sum(facts["compiled"] for facts in found),
        "unfinished": {f"share {number}": end for number, end in enumerate(ends) if end},
    }


def _end_of(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Empty where it ended well in time."""
    try:
        code = process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return "out of time"
    return f"ended with {code}" if code else ""


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=int, required=True, metavar="K", help="from 0 to N - 1")
    parser.add_argument("--of", type=int, required=True, metavar="N", help="processes in all")
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="what was compiled, as JSON"
    )
    options = parser.parse_args()
    require_gpu(parser)
    share = compile_share(options.share, options.of)
    options.to.write_text(json.dumps(share.facts()) + "\n")


if __name__ == "__main__":
    main()
