"""Text from files (.txt, .jsonl, .parquet), from the `datasets` package and from Python's own docstrings, read lazily."""

from __future__ import annotations

import ast
import importlib
import json
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import TextConfig
from ..errors import ArchsearchError, ConfigError, EnvironmentFault

_BLOCK_CHARS = 1 << 16
_DOCSTRING_CHARS = 200
"""Docstrings shorter than that are labels rather than text."""
_UNMARKED = (".txt", ".npy")
"""Files that do not say where documents begin."""


@dataclass(frozen=True)
class Corpus:
    """Texts in their order, and what to call their source in messages."""

    name: str
    texts: Iterable[str]
    separate: bool
    """Whether each text is a document of its own, not the continuation of the one before."""


def open_corpus(text: TextConfig, path: Path | None) -> Corpus:
    """The corpus in the file at path or, without one, under text's datasets name or in the docstrings.

    Raises ConfigError for a kind of file that is not read. While it is iterated it raises ConfigError
    where a text is malformed or misses its column, EnvironmentFault where a package is missing or the
    data set cannot be reached.
    """
    if text.source == "docstrings":
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Corpus(f"docstrings of Python {version}", _docstrings(), separate=True)
    if path is None:
        return Corpus(f"data set {text.name}", _dataset_texts(text), separate=True)
    reader = _READERS.get(path.suffix)
    if reader is None:
        allowed = ", ".join([*_READERS, ".npy"])
        raise ConfigError(f"text path {path}: ends in {path.suffix!r}; allowed: {allowed}")
    return Corpus(f"text path {path}", reader(path, text.column), path.suffix not in _UNMARKED)


def marks_documents(text: TextConfig) -> bool:
    """Whether the text is made of documents whose starts are known; plain text, arrays and drawn text are not."""
    if text.source == "file":
        return Path(str(text.path)).suffix not in _UNMARKED
    return text.source != "teacher"


def _plain_texts(path: Path, _column: str) -> Iterator[str]:
    """The file in blocks of whole lines, since it may be larger than what is needed of it."""
    try:
        with path.open(encoding="utf-8") as file:
            while lines := file.readlines(_BLOCK_CHARS):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise ConfigError(f"text path {path}: not UTF-8 text ({error})") from error


def _jsonl_texts(path: Path, column: str) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _column_of(line, column, f"text path {path}:{number}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"text path {path}: not UTF-8 text ({error})") from error


def _column_of(line: str, column: str, where: str) -> str:
    try:
        value = json.loads(line)[column]
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error.msg})") from error
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{where}: no column {column!r}") from error
    return _checked(value, column, where)


def _parquet_texts(path: Path, column: str) -> Iterator[str]:
    where = f"text path {path}"
    parquet = _package("pyarrow.parquet", where)
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's own kinds, which have no name here without the package
        raise ConfigError(f"{where}: not a Parquet file ({error})") from error
    with file:
        names = list(file.schema_arrow.names)
        if column not in names:
            raise ConfigError(f"{where}: no column {column!r}; it has {', '.join(names)}")
        for batch in file.iter_batches(columns=[column]):
            for value in batch.column(0).to_pylist():
                if value is not None:
                    yield _checked(value, column, where)


def _dataset_texts(text: TextConfig) -> Iterator[str]:
    where = f"data set {text.name}"
    datasets = _package("datasets", where)
    name, _, config = str(text.name).partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=text.split, streaming=True)
        for row in rows:
            if text.column not in row:
                raise ConfigError(f"{where}: no column {text.column!r}; it has {', '.join(row)}")
            yield _checked(row[text.column], text.column, where)
    except ArchsearchError:
        raise
    except Exception as error:  # a missing name or split, no network: datasets has many kinds
        raise EnvironmentFault(f"{where}: cannot be read ({error})") from error


def _docstrings() -> Iterator[str]:
    """The longer docstrings of the standard library's modules, by path: text that no model has drawn.

    Nothing is imported. Another Python version may have others.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        if inner.parts[0] in ("site-packages", "dist-packages", "test") or "tests" in inner.parts:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Escapes that a later Python refuses.
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue  # A file for tests of what cannot be parsed.
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED):
                found = ast.get_docstring(node) or ""
                if len(found) >= _DOCSTRING_CHARS:
                    yield found


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

_READERS: dict[str, Callable[[Path, str], Iterable[str]]] = {
    ".txt": _plain_texts,
    ".jsonl": _jsonl_texts,
    ".parquet": _parquet_texts,
}


def _checked(value: object, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: column {column!r} holds a {type(value).__name__}, not text")
    return value


def _package(module: str, where: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise EnvironmentFault(
            f"{where}: needs the Python package {package} (pip install {package})"
        ) from error
