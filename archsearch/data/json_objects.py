"""Files of a JSON object a line, plain or packed by gzip, whose every fault is one clear line for the user."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError

WORDS: dict[type, str] = {str: "a string that is not blank", int: "an integer"}


class Field(NamedTuple):
    """What a field may hold: a string that is not blank, an integer, or with None anything."""

    kind: type[str] | type[int] | None = str
    required: bool = False


def read_objects(path: Path, fields: Mapping[str, Field]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of all lines that are not blank, each after `FILE:LINE`; fields that are null are left out.

    Raises ConfigError: `FILE:LINE: ...` for a line that is no object of these fields, `FILE: ...` for a file that cannot
    be read.
    """
    for where, line in _lines(path):
        try:
            data: Any = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON ({error}); allowed: an object a line") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{where}: a {type(data).__name__}; allowed: an object a line")
        yield where, _checked(data, fields, where)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error})") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read ({reason})") from error


def _checked(data: dict[str, Any], fields: Mapping[str, Field], where: str) -> dict[str, Any]:
    allowed = f"allowed: {', '.join(fields)}"
    found = {name: value for name, value in data.items() if value is not None}
    for name in data:
        if name not in fields:
            raise ConfigError(f"{where}: field {name} is unknown; {allowed}")
    for name, field in fields.items():
        if field.required and name not in found:
            raise ConfigError(f"{where}: field {name} is missing; {allowed}")
    for name, value in found.items():
        kind = fields[name].kind
        is_blank = isinstance(value, str) and not value.strip()
        # JSON's true is an int to Python.
        if kind is not None and (type(value) is not kind or is_blank):
            raise ConfigError(f"{where}: field {name} is {value!r:.60}; allowed: {WORDS[kind]}")
    return found
