"""A table of fake backends, in this process or in a child of doctor's that runs this file.

They serve the prologue, whose case is cheap.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from archsearch.attention.backends import Backend, Operator, Situation
from archsearch.attention.dispatch import OPERATORS
from archsearch.kernel_proofs import serve

COMMAND = (sys.executable, "-P", __file__)
LEFT_BEHIND = "LEFT_BEHIND_FILE"
"""Names the environment variable of a file that gets the id of a process that a hanging backend has started."""
VARIABLE = "FAKE_BACKEND"

run_right = OPERATORS["prologue"].backend("torch").run


def never(situation: Situation) -> str | None:
    return None


def cannot(situation: Situation) -> str | None:
    return "needs another machine"


def no_full_precision(situation: Situation) -> str | None:
    return None if situation.dtype == torch.bfloat16 else "takes bf16 only"


def hang(anything: Any) -> Any:
    if place := os.environ.get(LEFT_BEHIND):
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(place).write_text(str(started.pid))
    time.sleep(600)


def fail(call: Any) -> Any:
    raise RuntimeError("no such kernel\nand more")


def die(call: Any) -> Any:
    os.write(2, b"LLVM ERROR: out of registers\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def scaled(factor: float) -> Callable[[Any], Any]:
    def run(call: Any) -> Any:
        os.write(1, b"compiling\n")  # as libraries do
        q, k = run_right(call)
        return q * factor, k

    return run


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("absent", fail, cannot),
        Backend("off", scaled(1.01), never),
        Backend("nan", scaled(float("nan")), never),
        Backend("fails", fail, never),
        Backend("dies", die, never),
        Backend("hangs", hang, never),
        Backend("blocks", fail, hang),
        Backend("half", scaled(1.0), no_full_precision),
        Backend("right", scaled(1.0), never),
        Backend("spare", scaled(1.0), never),
    )
}
TABLE = "FAKE_TABLE"
"""Names the environment variable that holds the names of the table's backends, in order."""


def operator() -> Operator:
    """Served by the backends that the environment names."""
    backends = tuple(BACKENDS[name] for name in os.environ[TABLE].split())
    return Operator("prologue", "fake", VARIABLE, backends)


if __name__ == "__main__":
    OPERATORS.clear()
    OPERATORS["prologue"] = operator()
    serve()
