"""What a command ran on."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .passwords import hide_passwords

_PACKAGES = ("archsearch", "torch", "transformers", "optuna", "ray", "numpy", "safetensors")


def describe_call(seed: int) -> dict[str, Any]:
    """This call's time, command line, git commit, versions, host and seed, as JSON-able data."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": [hide_passwords(word) for word in sys.argv],
        "seed": seed,
        "git_commit": _git_commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "host": socket.gethostname(),
        "platform": platform.platform(),
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _git_commit() -> str | None:
    """The commit of the checkout that this code runs from, with + where it has local changes."""
    folder = Path(__file__).parent
    if not (folder.parent / ".git").exists() or shutil.which("git") is None:
        return None
    commands = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    outputs = [
        subprocess.run(["git", "-C", str(folder), *c], capture_output=True, text=True, check=False)
        for c in commands
    ]
    if any(output.returncode for output in outputs):
        return None
    return outputs[0].stdout.strip() + ("+" if outputs[1].stdout.strip() else "")
