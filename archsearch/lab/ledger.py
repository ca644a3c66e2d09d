"""Results of long comparisons as they come: JSON lines that several processes add to, and that a later call goes on from.

A row has a key that says all that its values depend on; one of a key is enough, and a second one is never asked for.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError

KEY, VALUES, FAILED = "key", "values", "failed"
"""Fields of a row: what it is about, its figures, or why there are none and never will be."""


class Ledger:
    """The rows of a JSON-lines file, by their key. Several processes may add to one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> dict[str, dict[str, Any]]:
        """All rows by key, in the order in which they were added; the first of a key counts.

        A last line that was cut off is left out. Raises ConfigError for any other line that is no row.
        """
        found: dict[str, dict[str, Any]] = {}
        for row in self._read():
            found.setdefault(row[KEY], row)
        return found

    def add(self, key: str, **fields: Any) -> None:
        """Adds a row, whole and on disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            line = json.dumps({KEY: key, **fields}, allow_nan=False).encode() + b"\n"
            # After a line that was cut off, which then stays on its own.
            file.write(line if self._ends_whole(file) else b"\n" + line)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def _ends_whole(file: Any) -> bool:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return bool(file.read(1) == b"\n")

    def _read(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row[KEY], str):
                    raise TypeError(f"{KEY} is no text")
            except (ValueError, KeyError, TypeError) as error:
                # What a kill left: an end without its closing brace.
                if not line.rstrip().endswith(b"}"):
                    continue
                raise ConfigError(f"{self.path}:{number}: no row ({error!r})") from error
            yield row
