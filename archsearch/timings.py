"""stages.json: seconds and peak memory by stage and seconds by scoring method, added up over the calls of a run. No torch."""

from __future__ import annotations

import math
from typing import Any

from .errors import ConfigError
from .rundir import RunDir

SCHEMA = 1
TIMINGS_FILE = "stages.json"

Row = dict[str, Any]


def read_timings(run_dir: RunDir) -> tuple[list[Row], list[Row]]:
    """The rows of stages, each with `stage`, and those of methods, each with `method`; none where there is no file.

    Raises ConfigError where the file is damaged.
    """
    if not (run_dir / TIMINGS_FILE).exists():
        return [], []
    data = run_dir.read_json(TIMINGS_FILE)
    try:
        stages, methods = data["stages"], data.get("methods", [])
        _check(stages, "stage")
        _check(methods, "method")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{run_dir / TIMINGS_FILE}: damaged ({error!r})") from error
    return stages, methods


def _check(rows: list[Row], name: str) -> None:
    """Raises KeyError, TypeError or ValueError unless each row has a name and finite numbers."""
    if not isinstance(rows, list):
        raise TypeError(f"not a list of {name}s: {rows!r}")
    for row in rows:
        if not isinstance(row[name], str):
            raise TypeError(f"{name}: {row[name]!r}")
        if not math.isfinite(row["seconds"]) or not math.isfinite(row.get("peak_bytes", 0)):
            raise ValueError(f"{name} {row[name]}: not finite")


def record_stage(run_dir: RunDir, name: str, seconds: float, peak_bytes: int, summary: str) -> Row:
    """Adds a call's seconds to a stage, finished or stopped, and returns its row."""
    stages, methods = _kept(run_dir)
    old = stages.get(name, {})
    stages[name] = {
        "stage": name,
        "seconds": round(old.get("seconds", 0) + seconds, 2),
        "peak_bytes": max(old.get("peak_bytes", 0), peak_bytes),
        "summary": summary,
    }
    _write(run_dir, stages, methods)
    return stages[name]


def record_method(run_dir: RunDir, method: str, seconds: float) -> None:
    """Adds a call's seconds to a scoring method, finished or stopped."""
    stages, methods = _kept(run_dir)
    total = methods.get(method, {}).get("seconds", 0) + seconds
    methods[method] = {"method": method, "seconds": round(total, 2)}
    _write(run_dir, stages, methods)


def _kept(run_dir: RunDir) -> tuple[dict[str, Row], dict[str, Row]]:
    """The rows by name. A damaged file starts anew, since no work should fail for its seconds."""
    try:
        stages, methods = read_timings(run_dir)
    except ConfigError:
        return {}, {}
    return {row["stage"]: row for row in stages}, {row["method"]: row for row in methods}


def _write(run_dir: RunDir, stages: dict[str, Row], methods: dict[str, Row]) -> None:
    data = {"stages": list(stages.values()), "methods": list(methods.values())}
    run_dir.write_json(TIMINGS_FILE, {"schema": SCHEMA, **data})
