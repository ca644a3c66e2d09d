"""Candidates of a run as models: choosing one of the front, cutting it, exporting it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from .attention.positions import set_rope_share
from .config import RunConfig
from .errors import ConfigError
from .export import check_directory, export, prepare_directory
from .headmap import HeadMap
from .models.cut import cut
from .models.full_heads import rope_share
from .models.supernet import Supernet
from .models.teacher import Teacher, load_teacher
from .report.records import COST_METRICS, quantity
from .rundir import RunDir
from .search.records import TrialSpec, trained_path
from .search.trained import load_trained
from .search.trial import SUPERNET_FILE, read_branch
from .stages import check_supernet


def export_candidate(
    run_dir: RunDir, directory: Path, *, candidate: int | None = None, fa_share: float | None = None
) -> str:
    """Exports a point of the run's front, by number, by FA share, or (neither given) its knee.

    Returns a line that says what was written. Raises ConfigError where there is no such point, no front yet or the
    directory is not empty, EnvironmentFault where the run has lost the weights that were measured.
    """
    check_choice(candidate=candidate, fa_share=fa_share)
    check_directory(directory)
    run_dir.require_search("pareto.json")
    config = run_dir.load_config()
    check_supernet(run_dir, config)
    pareto = run_dir.read_json("pareto.json")
    point = choose(run_dir, pareto, candidate=candidate, fa_share=fa_share)
    prepare_directory(directory)
    head_map = HeadMap.from_json(point["head_map"])
    teacher = load_teacher(config.teacher)
    supernet_file = run_dir / SUPERNET_FILE
    spec = TrialSpec(point["candidate"], point["head_map"], int(pareto["proxy_tokens"]))
    # As in a trial, an all-FA map is the teacher and never distilled.
    distilled = spec.proxy_tokens > 0 and head_map.fa_share < 1
    full = read_branch(teacher, config, run_dir.path) if distilled else None
    supernet = Supernet.load(supernet_file, teacher)
    model, tokens = cut(teacher, supernet, head_map, copy=True, full=full), 0
    if distilled:
        tokens = load_trained(model, trained_path(run_dir.path, spec))
        set_rope_share(model, rope_share(config.student.full, tokens))
    provenance = _provenance(config, teacher, point, supernet_file)
    provenance["distillation_tokens"] = tokens
    export(model, teacher.tokenizer, head_map, directory, provenance)
    metrics = ", ".join(
        f"{name} {quantity(name, value)}" for name, value in point["metrics"].items()
    )
    return f"{directory}: candidate {point['candidate']} ({point['source']}), {metrics}"


def check_choice(*, candidate: int | None = None, fa_share: float | None = None) -> None:
    """Raises ConfigError for a number or share that no front could have."""
    if fa_share is not None and not 0 <= fa_share <= 1:
        raise ConfigError(f"--fa-share {fa_share:g}: not allowed; allowed: 0 to 1")
    if candidate is not None and candidate < 0:
        raise ConfigError(f"--candidate {candidate}: not allowed; allowed: a number of the report")


def choose(
    run_dir: RunDir,
    pareto: dict[str, Any],
    *,
    candidate: int | None = None,
    fa_share: float | None = None,
) -> dict[str, Any]:
    """The point of pareto.json that is asked for; with neither number nor share, the knee.

    A seed's own front counts too where its number is given. Raises ConfigError where there is none.
    """
    points: list[dict[str, Any]] = pareto["points"]
    if not points:
        raise ConfigError(f"{run_dir.path}: the front is empty")
    if fa_share is not None:
        return _at_share(points, pareto["objectives"], fa_share)
    number = pareto["knee"] if candidate is None else candidate
    seeds: list[dict[str, Any]] = pareto["seeds"]["points"]
    for point in [*points, *seeds]:
        if point["candidate"] == number:
            return point
    allowed = ", ".join(str(point["candidate"]) for point in points)
    raise ConfigError(
        f"--candidate {number}: not on the front of {run_dir.path}; allowed: {allowed}"
    )


def _at_share(
    points: list[dict[str, Any]], objectives: list[dict[str, str]], fa_share: float
) -> dict[str, Any]:
    """The best point within the share, by the first objective that is no cost."""
    within = [p for p in points if HeadMap.from_json(p["head_map"]).fa_share <= fa_share + 1e-9]
    if not within:
        least = min(HeadMap.from_json(p["head_map"]).fa_share for p in points)
        raise ConfigError(
            f"--fa-share {fa_share:g}: the front has no map of so few FA heads; "
            f"its smallest share is {least:.4g}"
        )
    qualities = [o for o in objectives if o["metric"] not in COST_METRICS] or objectives
    sign = 1 if qualities[0]["direction"] == "minimize" else -1
    return min(within, key=lambda p: sign * p["metrics"][qualities[0]["metric"]])


def _provenance(
    config: RunConfig,
    teacher: Teacher,
    point: dict[str, Any],
    supernet_file: Path,
) -> dict[str, Any]:
    return {
        "run": config.name,
        "seed": config.seed,
        "teacher": config.teacher.source,
        "teacher_fingerprint": teacher.fingerprint,
        "supernet_sha256": hashlib.sha256(supernet_file.read_bytes()).hexdigest(),
        "candidate": point["candidate"],
        "source": point["source"],
        "metrics": point["metrics"],
    }
