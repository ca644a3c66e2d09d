"""Strict YAML: the 1.2 core schema as plain data, and where each value was written.

`1e-4` is a float, `off` a string; duplicate keys, tags and anchors that contain themselves are errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from .errors import ConfigError

KeyPath = tuple[str | int, ...]


class _CoreLoader(yaml.SafeLoader):
    """Composes YAML 1.2 core scalars; PyYAML's own rules are those of YAML 1.1."""

    yaml_implicit_resolvers = {}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )

_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: (
        int(text, 0) if text[:2] in ("0x", "0o") else int(text.replace("_", ""), 10)
    ),
    "float": lambda text: float(
        text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan").lower()
    ),
    "str": str,
}


class YamlReader:
    """Turns composed YAML nodes into plain data and remembers where each value was written."""

    def __init__(self, source: str, origins: dict[KeyPath, str], *, numbered: bool = True) -> None:
        self.source = source
        self.origins = origins
        self.numbered = numbered
        self._open: set[int] = set()

    def parse(self, text: str, path: KeyPath = ()) -> Any:
        """Plain data of the one document in text. Raises ConfigError on anything but core YAML."""
        try:
            loader = _CoreLoader(text)
            node = loader.get_single_node()
            loader.dispose()
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line if error.problem_mark else 0
            raise ConfigError(f"{self._at(line)}: not YAML: {error.problem}") from error
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{self._at(0)}: not YAML: {reason}") from error
        except RecursionError as error:
            raise ConfigError(f"{self._at(0)}: not a config: nested too deeply") from error
        return None if node is None else self._build(node, path)

    def _at(self, line: int) -> str:
        return f"{self.source}:{line + 1}" if self.numbered else self.source

    def _build(self, node: yaml.Node, path: KeyPath) -> Any:
        where = self._at(node.start_mark.line)
        self.origins.setdefault(path, where)
        if id(node) in self._open:
            raise ConfigError(f"{where}: {dotted(path)}: the anchor contains itself")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                _check_tag(node, "map", where, path)
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                _check_tag(node, "seq", where, path)
                return [self._build(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._scalar(node, path, where)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            where = self._at(key_node.start_mark.line)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{where}: {dotted(path)}: a key must be a plain word")
            key = str(key_node.value)
            if key in data:
                first = self.origins[(*path, key)].rpartition(":")[2]
                raise ConfigError(
                    f"{where}: {dotted((*path, key))}: duplicate key, first on line {first}"
                )
            self.origins[(*path, key)] = where
            data[key] = self._build(value_node, (*path, key))
        return data

    def _scalar(self, node: yaml.Node, path: KeyPath, where: str) -> Any:
        kind = node.tag.rpartition(":")[2]
        _check_tag(node, kind if kind in _SCALARS else "str", where, path)
        try:
            value = _SCALARS[kind](node.value)
        except ValueError as error:
            raise ConfigError(
                f"{where}: {dotted(path)}: {node.value[:60]!r} is no {kind}"
            ) from error
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}: {dotted(path)}: {node.value} is not allowed; be finite")
        return value


def _check_tag(node: yaml.Node, kind: str, where: str, path: KeyPath) -> None:
    if node.tag != f"tag:yaml.org,2002:{kind}":
        raise ConfigError(
            f"{where}: {dotted(path)}: tag {node.tag} is not allowed; only plain values are"
        )


def dotted(path: KeyPath) -> str:
    """A key path as people write it: search.objectives[0].metric."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or "config"
