"""Head maps: which operator each query head of each layer runs. Pure data, no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

SCHEMA = 1

Head = tuple[int, int]
"""A query head as (layer, head)."""


class Operator(StrEnum):
    """The operators a query head can run; the value is its letter in a head map."""

    FULL = "F"
    GDN = "G"
    NHA = "N"


@dataclass(frozen=True)
class ModelShape:
    """The attention geometry of a model, as far as a head map depends on it.

    Raises ValueError where a size is not positive or num_kv_heads does not divide num_heads.
    """

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    revision: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def total_heads(self) -> int:
        """Query heads of all layers together."""
        return self.num_layers * self.num_heads

    def heads(self) -> list[Head]:
        """All query heads, layer by layer."""
        return [(layer, head) for layer in range(self.num_layers) for head in range(self.num_heads)]

    def groups(self) -> list[tuple[Head, ...]]:
        """The query heads of each KV group, layer by layer."""
        size = self.group_size
        return [
            tuple((layer, kv_head * size + i) for i in range(size))
            for layer in range(self.num_layers)
            for kv_head in range(self.num_kv_heads)
        ]


@dataclass(frozen=True)
class HeadMap:
    """One operator letter a query head: layers[l][h] in "FGN".

    window[l] is the tokens that layer l's NHA heads see exactly and slots[l] the number of their slots;
    both are None in a layer without NHA heads.
    """

    model: ModelShape
    layers: tuple[str, ...]
    window: tuple[int | None, ...] = ()
    slots: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        empty = (None,) * self.model.num_layers
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "window", tuple(self.window) or empty)
        object.__setattr__(self, "slots", tuple(self.slots) or empty)
        self._check()

    def _check(self) -> None:
        letters = "".join(op.value for op in Operator)
        for name in ("layers", "window", "slots"):
            if len(getattr(self, name)) != self.model.num_layers:
                raise ValueError(
                    f"head map: {name} has {len(getattr(self, name))} entries, "
                    f"the model has {self.model.num_layers} layers"
                )
        for layer, row in enumerate(self.layers):
            if len(row) != self.model.num_heads or set(row) - set(letters):
                raise ValueError(
                    f"head map: layer {layer} is {row!r}; it needs {self.model.num_heads} letters of {letters}"
                )
            sizes = (self.window[layer], self.slots[layer])
            if Operator.NHA in row and any(size is None or size < 1 for size in sizes):
                raise ValueError(
                    f"head map: layer {layer} has NHA heads and needs a positive window and slots"
                )

    @classmethod
    def uniform(
        cls, model: ModelShape, op: Operator, *, window: int | None = None, slots: int | None = None
    ) -> HeadMap:
        """The map in which every head runs op."""
        return cls(
            model,
            (op.value * model.num_heads,) * model.num_layers,
            (window,) * model.num_layers,
            (slots,) * model.num_layers,
        )

    @classmethod
    def from_full_heads(
        cls, model: ModelShape, full: Collection[Head], rest: Operator = Operator.GDN
    ) -> HeadMap:
        """The map that keeps the heads in full as FA and gives the others to rest (no NHA)."""
        keep = set(full)
        unknown = keep - set(model.heads())
        if unknown:
            raise ValueError(f"head map: the model has no heads {sorted(unknown)[:4]}")
        return cls(
            model,
            tuple(
                "".join(
                    Operator.FULL if (layer, head) in keep else rest
                    for head in range(model.num_heads)
                )
                for layer in range(model.num_layers)
            ),
        )

    def heads(self, layer: int, op: Operator) -> tuple[int, ...]:
        """Indices of the query heads of a layer that run op, ascending."""
        return tuple(head for head, letter in enumerate(self.layers[layer]) if letter == op)

    def full_heads(self) -> frozenset[Head]:
        """All heads kept as full attention."""
        return frozenset(
            (layer, head)
            for layer in range(self.model.num_layers)
            for head in self.heads(layer, Operator.FULL)
        )

    def kv_heads(self, layer: int, op: Operator) -> tuple[int, ...]:
        """Indices of the KV heads of a layer that at least one query head running op reads."""
        return tuple(sorted({head // self.model.group_size for head in self.heads(layer, op)}))

    @property
    def fa_share(self) -> float:
        """Share of all query heads that run full attention."""
        return len(self.full_heads()) / self.model.total_heads

    def with_operator(self, heads: Iterable[Head], op: Operator) -> HeadMap:
        """A copy in which the given heads run op."""
        rows = [list(row) for row in self.layers]
        for layer, head in heads:
            rows[layer][head] = op.value
        return replace(self, layers=tuple("".join(row) for row in rows))

    @property
    def digest(self) -> str:
        """Twelve hex digits that two head maps share only if they are the same map."""
        text = json.dumps([self.layers, self.window, self.slots])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """The map as plain JSON data, with its schema number."""
        return {
            "schema": SCHEMA,
            "model": asdict(self.model),
            "layers": list(self.layers),
            "window": list(self.window),
            "slots": list(self.slots),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HeadMap:
        """Reads to_json's form. Raises ValueError on another schema or a malformed map."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"head map: schema {found!r} is not {SCHEMA}")
        try:
            model = ModelShape(**data["model"])
            return cls(model, tuple(data["layers"]), tuple(data["window"]), tuple(data["slots"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"head map: malformed ({error})") from error

    def save(self, path: Path) -> None:
        """Writes the map as a small JSON file."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> HeadMap:
        """Reads a file written by save. Raises ValueError where it is none."""
        return cls.from_json(json.loads(path.read_text()))
