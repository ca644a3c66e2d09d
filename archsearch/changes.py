"""What differs between two configs, and how a message says it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMED_CHANGES, SHOWN_CHARS = 3, 60
"""Fields that a refusal names before it counts the rest, and characters that it shows of a value."""


def differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted path -> (old, new) of every leaf that differs; a missing value reads as None."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: dict[str, tuple[Any, Any]] = {}
        for key in [*old, *(key for key in new if key not in old)]:
            path = f"{prefix}.{key}" if prefix else str(key)
            found |= differences(old.get(key), new.get(key), path)
        return found
    return {} if old == new else {prefix: (old, new)}


def describe_changes(found: Mapping[str, tuple[Any, Any]]) -> str:
    """The first of the differences, `FIELD: OLD -> NEW`, and how many more there are, as one line that can be read."""
    each = [change for path, pair in found.items() for change in _within_lists(path, *pair)]
    said = [f"{path}: {_contrast(old, new)}" for path, old, new in each[:NAMED_CHANGES]]
    more = len(each) - len(said)
    return "; ".join(said) + (f"; and {more} more" if more else "")


def _within_lists(path: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """What differs between lists of equally many sections, or the two values."""
    lists = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    if not lists or not all(isinstance(item, Mapping) for item in (*old, *new)):
        return [(path, old, new)]
    pairs = enumerate(zip(old, new, strict=True))
    items = (differences(*pair, f"{path}[{index}]") for index, pair in pairs)
    return [(key, was, now) for found in items for key, (was, now) in found.items()]


def _contrast(old: Any, new: Any) -> str:
    """Two values as Python writes them; of long ones what lies around the first place where they differ."""
    texts, start = (repr(old), repr(new)), 0
    if max(map(len, texts)) > SHOWN_CHARS:
        pairs = enumerate(zip(*texts, strict=False))
        first = next((place for place, (a, b) in pairs if a != b), min(map(len, texts)))
        start = max(0, first - SHOWN_CHARS // 3)
    end = start + SHOWN_CHARS
    return " -> ".join(
        "..." * bool(start) + text[start:end] + "..." * (len(text) > end) for text in texts
    )
