"""The file of kernel figures: rows by section, written whenever a section ends, those of sections not run kept."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from .records import LabBook


class Figures:
    """Rows of one run, printed as they come; each says its section and what Triton and cuDNN it was made with.

    replaced: the sections whose rows in an earlier file are thrown away. commit: where the source tree cannot tell.
    """

    def __init__(self, path: Path, replaced: Collection[str], commit: str | None = None) -> None:
        self.section = ""
        self._path = path
        self._commit = commit
        self._book = LabBook(0)
        self._kept: list[dict[str, Any]] = []
        if path.exists():
            rows = json.loads(path.read_text())
            self._kept = [row for row in rows if row.get("section") not in replaced]
        self._facts = {"triton": _triton(), "cudnn": torch.backends.cudnn.version()}

    def beside(self, name: str) -> Path:
        """A file next to that of the figures."""
        return self._path.with_name(f"{self._path.stem}.{name}")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of this run."""
        return self._book.rows

    def find(self, metric: str, batch: int, tokens: int) -> list[dict[str, Any]]:
        """Rows of that metric and shape, of this run or kept from an earlier one."""
        wanted = (metric, batch, tokens)
        return [
            row
            for row in [*self._kept, *self.rows]
            if (row["metric"], row.get("batch"), row.get("tokens")) == wanted
        ]

    def ratio(self, slower: str, faster: str, batch: int, tokens: int, goal: str | None) -> None:
        """How many times faster `faster` is, for each of its rows and the last of `slower`'s.

        By replays of CUDA graphs where both have that time, else by eager calls, whose ratio is recorded either way.
        """
        others = self.find(slower, batch, tokens)
        for row in self.find(faster, batch, tokens) if others else []:
            facts = {key: row[key] for key in ("half_life_tokens",) if key in row}
            eager = others[-1]["value"] / row["value"]
            both = "graph_ms" in row and "graph_ms" in others[-1]
            times = others[-1]["graph_ms"] / row["graph_ms"] if both else eager
            facts |= {"by": "graph replays" if both else "eager calls", "eager_times": eager}
            metric = f"{slower} over {faster}"
            self.add(metric, times, "times", goal, batch=batch, tokens=tokens, **facts)

    def add(
        self, metric: str, value: float, unit: str, compared_to: str | None = None, **facts: Any
    ) -> None:
        """Adds and prints a figure of the section that is under way."""
        self._book.add(
            metric, value, unit, compared_to, section=self.section, **facts, **self._facts
        )
        if self._commit is not None:
            self.rows[-1]["commit"] = self._commit
        told = ", ".join(f"{name} {x}" for name, x in facts.items() if not isinstance(x, dict))
        print(f"[{self.section}] {metric}: {value:.4g} {unit} ({told})", flush=True)
        for name, table in facts.items():
            if isinstance(table, dict):
                print(f"    {name}: {json.dumps(table)}", flush=True)

    def remark(self, text: str) -> None:
        """A row without a figure: why something is missing."""
        self.add("remark", 0.0, "", text=text)

    def write(self) -> None:
        """Writes the file, whole."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps([*self._kept, *self.rows], indent=1) + "\n")


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
