"""A run from its config to its report: the stages in order, each done once and kept in the run directory."""

from __future__ import annotations

import gc
import hashlib
import math
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from .config import RunConfig
from .console import Printer, StageProgress
from .data.corpora import load_tokens, training_batches
from .data.niah import Probe, make_probes, retrieval_rows
from .errors import RunFault
from .memory import MemoryWatch
from .models.supernet import Supernet
from .models.teacher import Teacher, inspect_teacher, load_teacher, pick_device, resolve_path
from .plan import STAGES, TRAIN, Plan, make_plan, train_tokens
from .preflight import check_config, check_machine, check_memory
from .report.files import write_report
from .report.records import bytes_text
from .rundir import RunDir
from .scoring.composite import HeadScores, composite
from .scoring.patching import receiver_effects
from .scoring.replacement import replacement_kl
from .search.driver import SearchOutcome, run_search
from .training.align import align

SCHEMA = 1


@dataclass
class RunContext:
    """What the stages of one run share."""

    config: RunConfig
    run_dir: RunDir
    loaded: Teacher | None = None
    supernet: Supernet | None = None
    outcome: SearchOutcome | None = None

    def teacher(self) -> Teacher:
        """The teacher, loaded at its first use."""
        if self.loaded is None:
            self.loaded = load_teacher(self.config.teacher)
        return self.loaded

    def twins(self) -> Supernet:
        """The run's supernet, loaded at its first use."""
        if self.supernet is None:
            self.supernet = Supernet.load(self.run_dir / "supernet.safetensors", self.teacher())
        return self.supernet

    def release(self) -> None:
        """Lets go of teacher and supernet: during the search the workers hold their own."""
        self.loaded = self.supernet = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def seed(self, purpose: str) -> int:
        """A seed of its own for each purpose, from the config's."""
        digest = hashlib.sha256(f"{self.config.seed}/{purpose}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


Stage = Callable[[RunContext, StageProgress], str]
"""Does a stage's work and returns what its closing line says."""


def plan_run(config: RunConfig, run_dir: RunDir) -> Plan:
    """Checks config, model and machine, and estimates the run. Nothing is written.

    Raises ConfigError or EnvironmentFault for whatever would stop the run later.
    """
    check_machine(config)
    info = inspect_teacher(config.teacher)
    check_config(config, info)
    finished = [name for name in STAGES if _is_finished(run_dir, config, name)]
    plan = make_plan(config, info, finished)
    check_memory(plan, pick_device(config.teacher.device))
    run_dir.require_disk(plan.disk_bytes)
    return plan


def run_stages(
    config: RunConfig, run_dir: RunDir, printer: Printer, *, last: str = STAGES[-1]
) -> None:
    """Runs the stages up to `last`; finished ones are kept. The run directory is locked meanwhile.

    Raises RunFault at the end where trials failed.
    """
    with run_dir, MemoryWatch() as memory:
        run_dir.freeze_config(config)
        run_dir.record_provenance(config.seed)
        for warning in run_dir.warnings():
            printer.line(f"warning: {warning}")
        context = RunContext(config, run_dir)
        for name in _due(run_dir, config, STAGES[: STAGES.index(last) + 1], printer):
            with printer.stage(name) as progress:
                progress.summary = summary = STAGE_WORK[name](context, progress)
            _record(run_dir, config, name, progress.seconds, memory.take_peak(), summary)
    if context.outcome is not None and context.outcome.failed:
        raise RunFault(
            f"{context.outcome.failed} trials failed; the report names them and their causes"
        )


def _due(run_dir: RunDir, config: RunConfig, names: Collection[str], printer: Printer) -> list[str]:
    """The stages to run, in order. The teacher is loaded again only where a later stage needs it."""
    due = [n for n in names if not _is_finished(run_dir, config, n) or n == "report"]
    if "teacher" not in due and {"data", "supernet", "scores"} & set(due):
        due.insert(0, "teacher")
    for name in names:
        details = run_dir.stage(name)
        if name not in due and details is not None:
            printer.line(f"{name:<9} kept: {details.get('summary', '')}")
    return due


def _is_finished(run_dir: RunDir, config: RunConfig, name: str) -> bool:
    details = run_dir.stage(name)
    if details is None:
        return False
    # A finished search goes on where it is asked for more trials.
    return name != "search" or details.get("trials") == config.search.trials


def _record(
    run_dir: RunDir, config: RunConfig, name: str, seconds: float, peak_bytes: int, summary: str
) -> None:
    details: dict[str, Any] = {
        "seconds": round(seconds, 2),
        "peak_bytes": peak_bytes,
        "summary": summary,
    }
    if name == "search":
        details["trials"] = config.search.trials
    run_dir.mark_done(name, **details)
    found = {stage: run_dir.stage(stage) for stage in STAGES}
    rows = [{"stage": stage, **row} for stage, row in found.items() if row is not None]
    run_dir.write_json("stages.json", {"schema": SCHEMA, "stages": rows})


def _load_teacher(context: RunContext, progress: StageProgress) -> str:
    teacher = context.teacher()
    shape = teacher.shape
    facts = {"model": asdict(shape), "fingerprint": teacher.fingerprint}
    context.run_dir.write_json("teacher.json", {"schema": SCHEMA, **facts})
    return (
        f"{shape.family}, {shape.num_layers} layers x {shape.num_heads} heads, "
        f"{shape.num_kv_heads} KV heads, on {teacher.device}"
    )


def _make_data(context: RunContext, progress: StageProgress) -> str:
    """Writes heldout.npy, and train.npy and retrieval.npy where the run trains anything."""
    data, teacher = context.config.data, context.teacher()
    heldout = load_tokens(
        data.heldout,
        teacher.tokenizer,
        teacher,
        sequences=data.heldout_sequences,
        length=data.sequence_length,
        seed=context.seed("heldout"),
        progress=progress,
    )
    _write_array(context.run_dir, "heldout.npy", heldout)
    rows = math.ceil(train_tokens(context.config) / data.sequence_length)
    if not rows:
        return f"{heldout.size:,} held-out tokens"
    prompts = round(rows * data.niah_share)
    same_corpus = data.train.source != "teacher" and data.train == data.heldout
    text = load_tokens(
        data.train,
        teacher.tokenizer,
        teacher,
        sequences=max(1, rows - prompts),
        length=data.sequence_length,
        seed=context.seed("train"),
        skip=data.heldout_sequences if same_corpus else 0,
        progress=progress,
    )
    _write_array(context.run_dir, "train.npy", text)
    if prompts:
        retrieval = retrieval_rows(
            teacher.tokenizer,
            prompts,
            data.sequence_length,
            keys=context.config.probes.multi_keys,
            digits=context.config.probes.digits,
            seed=context.seed("retrieval"),
            progress=progress,
        )
        _write_array(context.run_dir, "retrieval.npy", retrieval)
    return f"{heldout.size:,} held-out and {text.size:,} training tokens, {prompts:,} prompts"


def _write_array(run_dir: RunDir, name: str, array: np.ndarray[Any, Any]) -> None:
    with run_dir.replacing(name) as path, path.open("wb") as file:
        np.save(file, array)


def _token_tensor(rows: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(rows.astype(np.int64))


def _make_supernet(context: RunContext, progress: StageProgress) -> str:
    """Writes supernet.safetensors: trained here, or a copy of the config's."""
    config, teacher, run_dir = context.config, context.teacher(), context.run_dir
    target = run_dir / "supernet.safetensors"
    if config.supernet.source != TRAIN:
        source = resolve_path(config.supernet.source)
        context.supernet = Supernet.load(source, teacher)
        with run_dir.replacing(target.name) as path:
            shutil.copyfile(source, path)
        tokens = context.supernet.meta.get("tokens")
        trained = f", trained on {tokens:,} tokens" if tokens else ""
        return f"{bytes_text(target.stat().st_size)} from {config.supernet.source}{trained}"
    checkpoint = run_dir / "align.checkpoint.safetensors"
    supernet = Supernet.migrated(teacher, config.supernet.gdn)
    context.supernet = align(
        teacher,
        supernet,
        _batches(context),
        config.supernet,
        checkpoint=checkpoint,
        heldout_NT=_token_tensor(np.load(run_dir / "heldout.npy")),
        seed=context.seed("align"),
        progress=progress,
    )
    context.supernet.save(target, teacher, rank=config.supernet.rank)
    checkpoint.unlink(missing_ok=True)
    error = context.supernet.meta["metrics"]["error_median"]
    return (
        f"{config.supernet.tokens:,} tokens, median error of a twin {error:.3f}, "
        f"{bytes_text(target.stat().st_size)}"
    )


def _batches(context: RunContext) -> Callable[[int], Any]:
    """Training batches from a step on, the same at every call."""
    config, run_dir = context.config, context.run_dir
    text = np.load(run_dir / "train.npy", mmap_mode="r")
    has_prompts = (run_dir / "retrieval.npy").exists()
    prompts = np.load(run_dir / "retrieval.npy", mmap_mode="r") if has_prompts else None
    sequences = max(1, config.supernet.batch_tokens // config.data.sequence_length)
    share = config.data.niah_share if has_prompts else 0.0
    seed = context.seed("batches")
    return lambda step: training_batches(
        text,
        prompts,
        niah_share=share,
        batch_sequences=sequences,
        seed=seed,
        start_step=step,
    )


def _score(context: RunContext, progress: StageProgress) -> str:
    """Writes scores.json (causal) and replacement_kl.json."""
    scoring, teacher = context.config.scoring, context.teacher()
    effects = {
        f"niah_{kind}": receiver_effects(
            teacher, _score_probes(context, kind), decay=scoring.decay, progress=progress
        )
        for kind in ("single", "multi")
    }
    causal = composite(effects, threshold=scoring.threshold)
    causal.save(context.run_dir / "scores.json")
    rows = np.load(context.run_dir / "heldout.npy")
    rows = rows[: scoring.replacement_sequences, : scoring.replacement_length]
    tokens = _token_tensor(rows).to(teacher.device)
    damage = replacement_kl(teacher, context.twins(), tokens, progress)
    HeadScores.plain("replacement_kl", damage).save(context.run_dir / "replacement_kl.json")
    usable = sum(int(e.isfinite().flatten(1).all(1).sum()) for e in effects.values())
    return f"{usable} of {2 * scoring.pairs} pairs usable, scores.json"


def _score_probes(context: RunContext, kind: str) -> list[Probe]:
    config = context.config
    return make_probes(
        context.teacher().tokenizer,
        kind,
        config.scoring.pairs,
        config.scoring.context,
        keys=config.probes.multi_keys,
        digits=config.probes.digits,
        seed=context.seed("scoring"),
    )


def _search(context: RunContext, progress: StageProgress) -> str:
    run_dir = context.run_dir
    context.release()
    tables = {
        "causal": HeadScores.load(run_dir / "scores.json").composite,
        "replacement_kl": HeadScores.load(run_dir / "replacement_kl.json").composite,
    }
    shape = inspect_teacher(context.config.teacher).shape
    context.outcome = run_search(
        context.config, run_dir, shape, tables, progress, say=progress.line
    )
    return context.outcome.summary


def _report(context: RunContext, progress: StageProgress) -> str:
    return str(write_report(context.run_dir))


STAGE_WORK: dict[str, Stage] = {
    "teacher": _load_teacher,
    "data": _make_data,
    "supernet": _make_supernet,
    "scores": _score,
    "search": _search,
    "report": _report,
}
