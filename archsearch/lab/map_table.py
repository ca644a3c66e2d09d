"""The file of measured head maps: an .npz without pickle, written in one step, that parts can be joined from.

| array | shape and type | is |
|---|---|---|
| `maps` | [N, ceil(L * H / 8)] uint8 | full-attention heads, np.packbits over layers and heads |
| `indices` | [N] int32 | places in the list of maps |
| `families` | [N] uint8 | places in facts["families"] |
| `values` | [N, K] float32 | the figures |
| `columns` | [K] text | what they are |
| `facts` | text | JSON: what was measured, with what, and who did it |
| others | any | what a file has besides (search_evaluator) |

Shapes: N maps, L layers, H query heads, K figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ..changes import differences
from ..errors import ConfigError
from ..rundir import replacing

MADE_BY = "made_by"
"""The fact that parts need not share: machines, versions and times, one of each process."""


ARRAYS = ("maps", "indices", "families", "values", "columns", "facts")


@dataclass(frozen=True)
class MapTable:
    """Measured head maps; full_NLH says which heads are full attention, values are [N, K] in order of columns."""

    full_NLH: NDArray[np.bool_]
    indices_N: NDArray[np.int32]
    families_N: NDArray[np.uint8]
    values_NK: NDArray[np.float32]
    columns: tuple[str, ...]
    facts: dict[str, Any]
    extra: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Further arrays of the file, by name."""

    def save(self, path: Path) -> None:
        """Writes the file in one step."""
        arrays: dict[str, NDArray[Any]] = {
            "maps": np.packbits(self.full_NLH.reshape(len(self.full_NLH), -1), axis=1),
            "indices": self.indices_N.astype(np.int32),
            "families": self.families_N.astype(np.uint8),
            "values": self.values_NK.astype(np.float32),
            "columns": np.array(self.columns),
            "facts": np.array(json.dumps(self.facts, sort_keys=True)),
        }
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays, **self.extra)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> MapTable:
        """Reads a file written by save. Raises ConfigError where it is missing or damaged."""
        try:
            # Opened here: numpy leaves a damaged file open.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                facts = json.loads(str(stored["facts"]))
                layers, heads = facts["model"]["num_layers"], facts["model"]["num_heads"]
                bits = np.unpackbits(stored["maps"], axis=1, count=layers * heads)
                return cls(
                    bits.astype(np.bool_).reshape(-1, layers, heads),
                    stored["indices"],
                    stored["families"],
                    stored["values"],
                    tuple(str(name) for name in stored["columns"]),
                    facts,
                    {name: stored[name] for name in stored.files if name not in ARRAYS},
                )
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise ConfigError(f"{path}: no table of head maps, or damaged ({error!r})") from error

    def check_same(self, other: MapTable, path: Path) -> None:
        """Raises ConfigError where the other, read from path, has other figures, or figures of other things."""
        first, second = (_shared_facts(table) for table in (self, other))
        if found := differences(first, second):
            field, (was, now) = next(iter(found.items()))
            raise ConfigError(
                f"{path}: measured otherwise ({field}: {was!r} -> {now!r}); allowed: parts of one list on the same "
                "model, text and prompts"
            )


def join(paths: Sequence[Path]) -> MapTable:
    """All maps of the files, by their place in the list; a map measured twice counts as the first file has it.

    Raises ConfigError where files disagree in facts, or in the map at a place.
    """
    tables = [MapTable.load(path) for path in paths]
    rows: dict[int, tuple[int, int]] = {}
    for number, (path, table) in enumerate(zip(paths, tables, strict=True)):
        tables[0].check_same(table, path)
        for row, index in enumerate(table.indices_N.tolist()):
            place, first = rows.setdefault(index, (number, row))
            if not np.array_equal(tables[place].full_NLH[first], table.full_NLH[row]):
                raise ConfigError(f"{path}: map {index} is not the one that {paths[place]} has")
    order = [rows[index] for index in sorted(rows)]
    made_by = [made for table in tables for made in table.facts[MADE_BY]]

    def gathered(name: str) -> NDArray[Any]:
        arrays = [getattr(table, name) for table in tables]
        if not order:
            return arrays[0][:0]  # type: ignore[no-any-return]
        return np.stack([arrays[place][row] for place, row in order])

    return MapTable(
        gathered("full_NLH"),
        np.array(sorted(rows), dtype=np.int32),
        gathered("families_N"),
        gathered("values_NK"),
        tables[0].columns,
        tables[0].facts | {MADE_BY: made_by},
    )


def _shared_facts(table: MapTable) -> dict[str, Any]:
    facts = {name: value for name, value in table.facts.items() if name != MADE_BY}
    return facts | {"columns": list(table.columns)}


def digest_of(data: Any) -> str:
    """Sixteen hex digits of bytes, or of an array's."""
    return hashlib.sha256(data).hexdigest()[:16]
