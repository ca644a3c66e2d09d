"""Candidates of a run as models: cutting and exporting them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from .attention.modeling_hydrahead import HydraHeadForCausalLM
from .attention.positions import set_rope_share
from .chosen import Choice, Chosen, find
from .config import RunConfig
from .export import check_directory, export, prepare_directory
from .models.cut import cut
from .models.full_heads import rope_share
from .models.supernet import Supernet
from .models.teacher import Teacher, inspect_teacher, load_teacher
from .report.records import quantity
from .rundir import RunDir
from .search.records import TrialSpec, trained_path
from .search.trained import load_trained
from .search.trial import SUPERNET_FILE, read_branch
from .stages import check_supernet


def export_candidate(run_dir: RunDir, directory: Path, choice: Choice) -> str:
    """Exports a candidate of a run with the weights that were measured, or the map of a file with the supernet's.

    Returns a line that says what was written. Raises ConfigError where there is no such candidate, no front yet or the
    directory is not empty, EnvironmentFault where the run has lost the weights that were measured.
    """
    choice.check("export")
    check_directory(directory)
    run_dir.require_search(SUPERNET_FILE if choice.file else "pareto.json")
    config = run_dir.load_config()
    check_supernet(run_dir, config)
    chosen = find(run_dir, choice, inspect_teacher(config.teacher).shape)
    prepare_directory(directory)
    teacher = load_teacher(config.teacher)
    supernet_file = run_dir / SUPERNET_FILE
    model, tokens = _student(run_dir, config, teacher, chosen)
    provenance = _provenance(config, teacher, chosen, supernet_file)
    provenance["distillation_tokens"] = tokens
    export(model, teacher.tokenizer, chosen.head_map, directory, provenance)
    metrics = ", ".join(f"{name} {quantity(name, value)}" for name, value in chosen.metrics.items())
    if chosen.candidate is None:
        return f"{directory}: {chosen.name}, supernet weights alone, not measured"
    return f"{directory}: {chosen.name} ({chosen.source}), after {tokens:,} tokens: {metrics}"


def _student(
    run_dir: RunDir, config: RunConfig, teacher: Teacher, chosen: Chosen
) -> tuple[HydraHeadForCausalLM, int]:
    """The model as it was measured, and the tokens that it was trained on."""
    head_map = chosen.head_map
    supernet = Supernet.load(run_dir / SUPERNET_FILE, teacher)
    # As in a trial, an all-FA map is the teacher and never distilled.
    if chosen.candidate is None or not chosen.proxy_tokens or head_map.fa_share == 1:
        return cut(teacher, supernet, head_map, copy=True), 0
    full = read_branch(teacher, config, run_dir.path)
    model = cut(teacher, supernet, head_map, copy=True, full=full)
    spec = TrialSpec(chosen.candidate, head_map.to_json(), chosen.proxy_tokens)
    tokens = load_trained(model, trained_path(run_dir.path, spec))
    set_rope_share(model, rope_share(config.student.full, tokens))
    return model, tokens


def _provenance(
    config: RunConfig,
    teacher: Teacher,
    chosen: Chosen,
    supernet_file: Path,
) -> dict[str, Any]:
    return {
        "run": config.name,
        "seed": config.seed,
        "teacher": config.teacher.source,
        "teacher_fingerprint": teacher.fingerprint,
        "supernet_sha256": hashlib.sha256(supernet_file.read_bytes()).hexdigest(),
        "candidate": chosen.candidate,
        "source": chosen.source,
        "metrics": chosen.metrics,
    }
