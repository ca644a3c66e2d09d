"""Text from files and data sets: what is read, and what malformed input says."""

from __future__ import annotations
import __future__

import inspect
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from archsearch.config import TextConfig
from archsearch.data.documents import open_corpus
from archsearch.errors import ConfigError, EnvironmentFault


def _read(path: Path, column: str = "text") -> list[str]:
    return list(open_corpus(TextConfig(source="file", path=str(path), column=column), path).texts)


def test_plain_text_is_one_document_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    text = "Ein Satz. Größe!\n\nNoch einer.\n" * 5000
    path.write_text(text, encoding="utf-8")
    blocks = _read(path)
    assert "".join(blocks) == text
    assert len(blocks) > 1
    assert not open_corpus(TextConfig(source="file", path="a.txt"), path).separate


def test_jsonl_gives_a_column_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "body": "1"}\n\n{"text": "two", "body": "2"}\n')
    assert _read(path) == ["one", "two"]
    assert _read(path, "body") == ["1", "2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl:2: not JSON"),
        ('{"body": "x"}', r"a\.jsonl:2: no column 'text'"),
        ("[1]", r"a\.jsonl:2: no column 'text'"),
        ('{"text": 3}', r"a\.jsonl:2: column 'text' holds a int"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        _read(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_text_that_is_not_utf8_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b'{"text": "\xff\xfe"}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        _read(path)


@pytest.mark.parametrize("name", ["a.csv", "a"])
def test_unknown_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: \.txt, \.jsonl, \.parquet, \.npy"):
        _read(tmp_path / name)


def test_parquet_gives_its_column(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["one", None, "two"], "number": [1, 2, 3]}), path)
    assert _read(path) == ["one", "two"]
    with pytest.raises(ConfigError, match="no column 'body'; it has text, number"):
        _read(path, "body")
    with pytest.raises(ConfigError, match="holds a int"):
        _read(path, "number")
    path.write_bytes(b"PAR?")
    with pytest.raises(ConfigError, match="not a Parquet file"):
        _read(path)


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / "a.parquet" if package == "pyarrow" else None
    corpus = open_corpus(TextConfig(source="datasets", name="a/b"), path)
    with pytest.raises(EnvironmentFault, match=rf"pip install {package}"):
        list(corpus.texts)


class _Datasets(ModuleType):
    """Stands in for the datasets package: two rows, or an error as without a network."""

    def __init__(self, reachable: bool = True) -> None:
        super().__init__("datasets")
        self.reachable = reachable
        self.calls: list[dict[str, Any]] = []

    def load_dataset(self, name: str, config: str | None, **options: Any) -> Iterator[Any]:
        self.calls.append({"name": name, "config": config, **options})
        if not self.reachable:
            raise ConnectionError("no route to host")
        return iter([{"text": "one"}, {"text": "two"}])


def test_datasets_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _Datasets()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    corpus = open_corpus(TextConfig(source="datasets", name="a/b:c", split="test"), None)
    assert list(corpus.texts) == ["one", "two"]
    assert corpus.separate
    expected = {"name": "a/b", "config": "c", "split": "test", "streaming": True}
    assert fake.calls == [expected], json.dumps(fake.calls)


def test_datasets_errors_are_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", _Datasets())
    with pytest.raises(ConfigError, match="no column 'body'; it has text"):
        list(open_corpus(TextConfig(source="datasets", name="a/b", column="body"), None).texts)
    monkeypatch.setitem(sys.modules, "datasets", _Datasets(reachable=False))
    with pytest.raises(EnvironmentFault, match=r"a/b: cannot be read .*no route"):
        list(open_corpus(TextConfig(source="datasets", name="a/b"), None).texts)


def test_docstrings_are_long_texts_of_the_standard_library() -> None:
    corpus = open_corpus(TextConfig(source="docstrings"), None)
    texts = list(islice(corpus.texts, 40))
    assert corpus.separate
    assert corpus.name == f"docstrings of Python {sys.version_info.major}.{sys.version_info.minor}"
    assert all(len(text) >= 200 for text in texts)
    assert texts == list(islice(open_corpus(TextConfig(source="docstrings"), None).texts, 40))
    assert texts[0] == inspect.getdoc(__future__)


def test_docstrings_pass_over_files_that_are_no_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "One word after another." * 20
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_text(f"{text!r}")
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "good.py").write_text(f"def f():\n    {text!r}\n    '\\d'\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    found = list(open_corpus(TextConfig(source="docstrings"), None).texts)
    assert found == [text]
