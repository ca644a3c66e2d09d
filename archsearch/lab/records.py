"""Figures of the lab book: runs/lab/<topic>.json, one record a figure."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "triton", "fla-core", "optuna", "ray")


def this_machine() -> str:
    """The accelerator's name, or the processor's architecture and cores."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"CPU {platform.machine()}, {os.cpu_count()} cores"


def installed_versions() -> dict[str, str]:
    """Python and those of PACKAGES that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the source tree, or "unknown" outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


class LabBook:
    """Collects figures of one topic and writes them with what produced them.

    machine and versions are of the run that the figures are read off, where that is not this process.
    """

    def __init__(
        self,
        seed: int,
        *,
        machine: str | None = None,
        versions: dict[str, str] | None = None,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._common = {
            "command": " ".join(["python", "-m", *_module(), *sys.argv[1:]]),
            "commit": commit(),
            "machine": machine or this_machine(),
            "versions": versions or installed_versions(),
            "seed": seed,
            "date": datetime.date.today().isoformat(),
        }

    def add(
        self, metric: str, value: float, unit: str, compared_to: str | None = None, **facts: Any
    ) -> None:
        """Adds one figure; facts are further plain fields."""
        row = {"metric": metric, "value": value, "unit": unit, "compared_to": compared_to}
        self.rows.append(row | facts | self._common)

    def write(self, path: Path) -> None:
        """Writes the figures as a JSON list."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.rows, indent=1) + "\n")


def _module() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [spec.name] if spec is not None else [Path(sys.argv[0]).name]
