"""What a study of proxies trains otherwise than its run's config says: written down, so that no two ways come into one study. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .changes import differences
from .config import RunConfig
from .configfile import load_config
from .errors import ConfigError
from .fidelity.records import FIDELITY_FILE
from .rundir import RESUMABLE, RunDir

CHANGES_FILE = "fidelity/changes.json"
SETTABLE = ("distill", "student", "execution", "kernels", "teacher.device")
"""Sections and fields that may be changed: text, prompts and search are the run's."""


def changed_config(run_dir: RunDir, overrides: Sequence[str]) -> RunConfig:
    """The run's config with `a.b=value` overrides.

    Raises ConfigError where they name another section, or where the study that is there was trained with others; fields
    that no result depends on may always differ.
    """
    own = run_dir.load_config()
    for override in overrides:
        name = override.partition("=")[0].strip()
        if name != "teacher.device" and name.partition(".")[0] not in SETTABLE:
            raise ConfigError(f"--set {override}: not allowed here; allowed: {', '.join(SETTABLE)}")
    config = load_config(run_dir / "config.json", overrides) if overrides else own
    if (run_dir / FIDELITY_FILE).exists():
        kept = run_dir.read_json(CHANGES_FILE) if (run_dir / CHANGES_FILE).exists() else {}
        if kept != _changes(own, config):
            given = " ".join(f"--set {name}={value}" for name, value in kept.items())
            raise ConfigError(
                f"{run_dir / FIDELITY_FILE}: its maps are trained with {given or 'no --set'}; allowed: the same, or to move "
                "that file away"
            )
    return config


def write_changes(run_dir: RunDir, config: RunConfig) -> None:
    """Writes down what a study's config changes, if anything."""
    changes = _changes(run_dir.load_config(), config)
    if changes or (run_dir / CHANGES_FILE).exists():
        run_dir.write_json(CHANGES_FILE, changes)


def _changes(own: RunConfig, config: RunConfig) -> dict[str, Any]:
    old, new = (c.model_dump(mode="json", by_alias=True) for c in (own, config))
    found = differences(old, new)
    return {name: now for name, (_, now) in found.items() if not name.startswith(RESUMABLE)}
