"""Finding a teacher's files: packages, folders, hub ids, and what each failure says."""

import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from archsearch.config import TeacherConfig
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.models import sources
from archsearch.models.sources import Source, locate, reading, resolve_path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package with a data file, whose import would fail."""
    root = tmp_path / "site" / "carrier_of_data"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (root / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(root.parent))
    return root


def test_resolve_path_in_a_package(package: Path) -> None:
    assert resolve_path("package:carrier_of_data/model.gguf") == package / "model.gguf"
    assert "carrier_of_data" not in sys.modules
    assert resolve_path("package:archsearch/config.py").name == "config.py"


@pytest.mark.parametrize(
    ("source", "fault", "message"),
    [
        ("package:no_such_thing/a.gguf", EnvironmentFault, "no_such_thing is not .*no-such-thing"),
        ("package:archsearch/none.gguf", ConfigError, "no such file"),
        ("./nowhere", ConfigError, "no such file"),
    ],
)
def test_resolve_path_of_what_is_not_there(
    source: str, fault: type[Exception], message: str
) -> None:
    with pytest.raises(fault, match=message):
        resolve_path(source)


@pytest.mark.parametrize("source", ["package:archsearch", "package:", "package:archsearch/../x"])
def test_resolve_path_refuses_malformed_packages(source: str) -> None:
    with pytest.raises(ConfigError, match="malformed; allowed: package:NAME/PATH"):
        resolve_path(source)


def test_locate(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = locate(TeacherConfig(source="package:carrier_of_data/model.gguf"))
    assert (found.name, found.gguf_file) == (str(package), "model.gguf")
    assert found.gguf_path == package / "model.gguf"
    assert locate(TeacherConfig(source=str(tmp_path))).local_files_only
    monkeypatch.setattr(sources, "_hub_resolves", lambda: True)
    hub = locate(TeacherConfig(source="Qwen/Qwen3-1.7B", revision="main"))
    assert hub == Source("Qwen/Qwen3-1.7B", revision="main")
    assert hub.arguments() == {
        "local_files_only": False,
        "trust_remote_code": False,
        "revision": "main",
    }


def test_locate_warns_of_an_ignored_revision(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="revision is ignored"):
        locate(TeacherConfig(source=str(tmp_path), revision="main"))


def test_locate_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no hub id, folder"):
        locate(TeacherConfig(source="three/part/name"))
    file = tmp_path / "weights.bin"
    file.touch()
    with pytest.raises(ConfigError, match=r"allowed: a folder or a .gguf file"):
        locate(TeacherConfig(source=str(file)))
    with pytest.raises(ConfigError, match="no such file"):
        locate(TeacherConfig(source="missing.gguf"))


def test_locate_without_network_asks_the_local_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(sources.socket, "getaddrinfo", fail)
    monkeypatch.setattr(sources, "getproxies", dict)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert locate(TeacherConfig(source="org/model")).local_files_only


def test_reading_explains_the_root_cause() -> None:
    source = Source("org/model")
    with (
        pytest.raises(EnvironmentFault, match=r"config of org/model: .* hub cannot be reached"),
        reading(source, "config"),
    ):
        raise OSError("We couldn't connect\nSecond line") from LocalEntryNotFoundError("inside")
    with pytest.raises(EnvironmentFault, match=r"KeyError: 'x'$"), reading(source, "weights"):
        raise KeyError("x")
    with pytest.raises(ConfigError, match="as it is"), reading(source, "weights"):
        raise ConfigError("as it is")
