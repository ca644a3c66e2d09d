"""Figures of the lab book: runs/lab/<topic>.json, one record a figure.

    python -m archsearch.lab.records --join PART.json PART.json --to FILE.json

joins the figures of several processes, which each took some of the cases.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, EnvironmentFault
from .entry import run_script, script_parser

COMMIT_VARIABLE = "ARCHSEARCH_COMMIT"
"""Names the commit of a source tree that is no checkout."""
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
    """The commit of the source tree; outside a checkout what COMMIT_VARIABLE says, or "unknown"."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or os.environ.get(COMMIT_VARIABLE, "unknown")


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

    @contextmanager
    def kept(self, path: Path) -> Iterator[None]:
        """Writes the figures that there are, if any, however the block ends."""
        try:
            yield
        finally:
            if self.rows:
                self.write(path)

    def write(self, path: Path) -> None:
        """Writes the figures as a JSON list."""
        write_records(self.rows, path)


def write_records(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes records as a JSON list. Raises EnvironmentFault where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")
    except OSError as error:
        raise EnvironmentFault(f"{path}: cannot be written ({error.strerror})") from error


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as the lab book has it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def join(parts: list[Path]) -> list[dict[str, Any]]:
    """The records of files one after the other. Raises ConfigError where one is no list of records."""
    rows: list[dict[str, Any]] = []
    for part in parts:
        try:
            found = json.loads(part.read_text())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{part}: cannot be read ({reason})") from error
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise ConfigError(f"{part}: no list of records")
        rows += found
    return rows


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__, figures=False)
    parser.add_argument("--join", type=Path, nargs="+", required=True, help="files of figures")
    parser.add_argument("--to", type=Path, required=True, help="where they go together")
    args = parser.parse_args()
    write_records(join(args.join), args.to)


def _module() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [spec.name] if spec is not None else [Path(sys.argv[0]).name]


if __name__ == "__main__":
    run_script(main)
