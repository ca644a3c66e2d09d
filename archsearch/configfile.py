"""Reads a config file: strict YAML, `--set` overrides, and every fault as one line that names file, line and field.

The YAML that is read is the 1.2 core schema: `1e-4` is a float, `off` a string, and duplicate keys are
errors. Validation is pydantic's strict mode, so no value changes its kind on the way.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .config import SCHEMA, RunConfig
from .errors import ConfigError
from .strictyaml import KeyPath, YamlReader, dotted

OVERRIDE = "--set "


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads, overrides and validates a config file.

    overrides are `a.b=value` strings, value in YAML; a number in the path indexes a list.
    Raises ConfigError with one line, `file:line: field: problem; allowed ...`.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read the config: {reason}") from error
    origins: dict[KeyPath, str] = {}
    data = YamlReader(str(path), origins).parse(text)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}:1: a config is a mapping of sections, this is {_kind(data)}")
    written = deepcopy(data)
    for override in overrides:
        _apply(data, override, origins)
    _check_schema(data, origins, str(path))
    return _validate(data, origins, str(path), written)


def blamed(path: Path | str, overrides: Sequence[str], message: str) -> str:
    """Where the values come from that a message `field: problem` is about: a `--set`, or else the file, with the line of
    the field where it is written there.

    Without one of the field itself, it is one whose dotted path the message names.
    """
    for start in (r"\A", r"(?<![\w.])"):
        for override in reversed(overrides):
            field = dotted(_steps(override.partition("=")[0]))
            end = r"(?![\w])" if "." in field else ":"
            if re.search(start + re.escape(field) + end, message):
                return f"{OVERRIDE}{override}"
    return _written(Path(path), message.partition(":")[0])


def _written(path: Path, field: str) -> str:
    """The line of a field in the file; the file alone where the field is not in it, or the file is gone."""
    origins: dict[KeyPath, str] = {}
    with contextlib.suppress(OSError, UnicodeDecodeError, ConfigError):
        YamlReader(str(path), origins).parse(path.read_text(encoding="utf-8"))
    places = {dotted(key): where for key, where in origins.items() if key}
    return places.get(field, str(path))


def _check_schema(data: Mapping[str, Any], origins: Mapping[KeyPath, str], source: str) -> None:
    """Refuses configs of another version before anything else in them is judged."""
    if "schema" not in data:
        raise ConfigError(f"{source}:1: schema: missing; write `schema: {SCHEMA}`")
    if data["schema"] != SCHEMA or type(data["schema"]) is not int:
        raise ConfigError(
            f"{origins[('schema',)]}: schema: {data['schema']!r} is another version of the config "
            f"format; this archsearch reads {SCHEMA}"
        )


def _parse(data: Mapping[str, Any]) -> RunConfig:
    # Through JSON, where strict mode still takes an array for a tuple.
    return RunConfig.model_validate_json(json.dumps(data), strict=True)


def _validate(
    data: Mapping[str, Any],
    origins: Mapping[KeyPath, str],
    source: str,
    written: Mapping[str, Any],
) -> RunConfig:
    """The config in data; written is what the file alone says."""
    try:
        return _parse(data)
    except ValidationError as error:
        details = _told(error)
        located = [(_place(d, origins, source, written), d) for d in details]
        where, detail = min(located, key=lambda pair: _line(pair[0]))
        raise ConfigError(f"{where}: {_told_of(detail, len(details))}") from error


def first_problem(error: ValidationError) -> str:
    """`field: problem` of a config that no file and no `--set` is to blame for, on one line."""
    details = _told(error)
    return _told_of(details[0], len(details))


def _told(error: ValidationError) -> list[ErrorDetails]:
    """The problems of an error that do not follow from another one of it."""
    details = error.errors(include_url=False)
    # A list counts as too short once its entries are wrong: name the entry, not the list.
    locs = [tuple(d["loc"]) for d in details]
    details = [
        d
        for d, loc in zip(details, locs, strict=True)
        if not (d["type"] == "too_short" and any(_inside(other, loc) for other in locs))
    ]
    # A misspelt key is also a missing one: name what was written, not what it should have been.
    misspelt = {tuple(d["loc"])[:-1] for d in details if d["type"] == "extra_forbidden"}
    return [d for d in details if not (d["type"] == "missing" and tuple(d["loc"])[:-1] in misspelt)]


def _told_of(detail: ErrorDetails, count: int) -> str:
    """A problem with its field, and how many more there are."""
    more = f" (and {count - 1} more problem{'s' if count > 2 else ''})" if count > 1 else ""
    return f"{dotted(tuple(detail['loc']))}: {_problem(detail)}{more}"


def _inside(path: KeyPath, section: KeyPath) -> bool:
    return len(path) > len(section) and path[: len(section)] == section


def _line(where: str) -> int:
    number = where.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _place(
    detail: ErrorDetails, origins: Mapping[KeyPath, str], source: str, written: Mapping[str, Any]
) -> str:
    """Where a fault was written. That of a section as a whole comes from a `--set` if the file alone has it not."""
    loc = tuple(detail["loc"])
    overrides = [
        where
        for path, where in origins.items()
        if _inside(path, loc) and where.startswith(OVERRIDE)
    ]
    if detail["type"] == "value_error" and overrides and not _has_fault(written, detail):
        return overrides[-1]
    return _origin(loc, origins, source)


def _has_fault(data: Mapping[str, Any], detail: ErrorDetails) -> bool:
    try:
        _parse(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        return (detail["loc"], detail["msg"]) in [(d["loc"], d["msg"]) for d in found]
    return False


def _origin(loc: KeyPath, origins: Mapping[KeyPath, str], source: str) -> str:
    """Where the value at loc, or else the nearest section around it, was written."""
    for length in range(len(loc), 0, -1):
        if loc[:length] in origins:
            return origins[loc[:length]]
    return f"{source}:1"


def _problem(detail: ErrorDetails) -> str:
    """One clause on what is wrong and what would be right."""
    kind, value = detail["type"], detail["input"]
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key; {_suggestion(tuple(detail['loc']))}"
    if kind == "missing":
        return "missing; it has no default"
    if kind == "literal_error":
        return f"{value!r} is not allowed; allowed: {context['expected']}"
    if kind == "value_error":
        return str(context["error"])
    if kind.endswith("_type"):
        wanted = {
            "int_type": "a whole number",
            "float_type": "a number",
            "bool_type": "true or false",
            "string_type": "a text",
            "model_type": "a mapping of keys",
            "tuple_type": "a list",
        }.get(kind, detail["msg"])
        if kind == "int_type" and isinstance(value, float) and value.is_integer():
            wanted += f", write {int(value)}"
        return f"{_kind(value)} {value!r} is the wrong type; allowed: {wanted}"
    is_number = kind.startswith(("greater_than", "less_than"))
    allowed = _range(tuple(detail["loc"])) if is_number else _length(kind, context)
    return f"{value!r} is not allowed; allowed: {allowed or detail['msg']}"


def _range(path: KeyPath) -> str:
    """The numbers that the field at path may hold."""
    names = [step for step in path if isinstance(step, str)]
    model = _model(tuple(names[:-1]))
    assert model is not None, path
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    field, bounds = fields[names[-1]], dict[str, float]()
    for item in (*field.metadata, *_metadata(field.annotation)):
        bounds |= {n: getattr(item, n) for n in ("ge", "gt", "le", "lt") if hasattr(item, n)}
    if bounds.keys() == {"ge", "le"}:
        return f"{bounds['ge']:g} to {bounds['le']:g}"
    words = {"ge": "at least {:g}", "gt": "more than {:g}", "le": "at most {:g}"}
    if len(bounds) == 1:
        words |= {"ge": "{:g} or more", "le": "{:g} or less"}
    return " and ".join(words.get(n, "less than {:g}").format(b) for n, b in bounds.items())


def _metadata(annotation: Any) -> Iterator[Any]:
    """What Annotated says anywhere within an annotation."""
    for item in getattr(annotation, "__metadata__", ()):
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)
    for argument in get_args(annotation):
        yield from _metadata(argument)


def _length(kind: str, context: Mapping[str, Any]) -> str:
    """What a pydantic bound of a length or a pattern allows, or "" where the kind of error is none."""
    bounds = {
        "too_short": "at least {min_length} of them",
        "too_long": "at most {max_length} of them",
        "string_pattern_mismatch": "a text like {pattern}",
    }
    return bounds.get(kind, "").format(**context)


def _kind(value: object) -> str:
    names = {dict: "mapping", list: "list", str: "text", bool: "boolean", type(None): "empty value"}
    return names.get(type(value), type(value).__name__)


def _suggestion(path: KeyPath) -> str:
    """Names the right key nearest to the unknown one, in its section or anywhere."""
    section, key = _fields(path[:-1]), str(path[-1])
    near = difflib.get_close_matches(key, section, n=1, cutoff=0.6)
    if near:
        return f"did you mean {dotted((*path[:-1], near[0]))}?"
    elsewhere = [known for known in _all_paths(RunConfig) if known[-1] == key]
    if elsewhere:
        return f"did you mean {dotted(elsewhere[0])}?"
    if not section:
        return f"{dotted(path[:-1])} takes a value and has no keys"
    return f"allowed: {', '.join(sorted(section))}"


def _fields(path: KeyPath) -> dict[str, Any]:
    """Key -> annotation of the section at path; empty where path leads to no section."""
    model = _model(path)
    return _keys(model) if model else {}


def _model(path: KeyPath) -> type[BaseModel] | None:
    """The section class at path, None where path leads to no section."""
    model: type[BaseModel] | None = RunConfig
    for step in path:
        if isinstance(step, int):
            continue
        model = _section(_keys(model).get(step)) if model else None
    return model


def _keys(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section class in an annotation, looking into tuples and unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section(argument) for argument in get_args(annotation))
    return next((model for model in found if model), None)


def _all_paths(model: type[BaseModel], prefix: KeyPath = ()) -> list[KeyPath]:
    paths: list[KeyPath] = []
    for key, annotation in _keys(model).items():
        paths.append((*prefix, key))
        section = _section(annotation)
        if section:
            paths += _all_paths(section, (*prefix, key))
    return paths


def _apply(data: dict[str, Any], override: str, origins: dict[KeyPath, str]) -> None:
    """Puts one `a.b=value` into data. Raises ConfigError where the path does not exist."""
    name, equals, text = override.partition("=")
    where = f"{OVERRIDE}{override}"
    if not equals or not name.strip():
        raise ConfigError(f"{where}: write it as path.to.key=value")
    steps = _steps(name)
    target: Any = data
    for depth, step in enumerate(steps):
        path = steps[: depth + 1]
        if isinstance(target, list):
            if not isinstance(step, int) or step >= len(target):
                raise ConfigError(f"{where}: {dotted(path)}: the list has {len(target)} entries")
        elif not isinstance(target, dict) or step not in _fields(path[:-1]):
            raise ConfigError(f"{where}: {dotted(path)}: unknown key; {_suggestion(path)}")
        if depth < len(steps) - 1:
            if isinstance(target, dict) and target.get(str(step)) is None:
                target[str(step)] = {}
            target = target[step]
    for known in [path for path in origins if path[: len(steps)] == steps]:
        del origins[known]
    target[steps[-1]] = YamlReader(where, origins, numbered=False).parse(text, steps)
    origins[steps] = where


def _steps(name: str) -> KeyPath:
    """The key path of `a.b.0`."""
    return tuple(int(s) if s.isascii() and s.isdigit() else s for s in name.strip().split("."))
