"""Workers that the executor tests run, importable by name in another process."""

from __future__ import annotations

import os
import signal
from typing import Any

from archsearch.errors import ConfigError, EnvironmentFault


class Calculator:
    """Adds the payload's offset to a number; some words make it fail in known ways."""

    def __init__(self, payload: dict[str, Any]) -> None:
        if payload.get("broken"):
            raise EnvironmentFault("no such model")
        self.offset = payload["offset"]
        self.calls = 0

    def __call__(self, spec: Any) -> Any:
        self.calls += 1
        match spec:
            case "raise":
                raise ValueError("a bad\nspec")
            case "memory":
                raise MemoryError
            case "gone":
                raise FileNotFoundError(2, "No such file or directory", "train.npy")
            case "config":
                raise ConfigError("harness.tasks: no such task")
            case "device":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "calls":
                return {"calls": self.calls, "threads": os.environ.get("OMP_NUM_THREADS")}
        return spec + self.offset
