"""The rest of a student's training, from its head map to a folder for transformers: each stage once, kept in the folder."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from .attention.modeling_hydrahead import HydraHeadForCausalLM
from .attention.positions import set_rope_share
from .console import Printer, StageProgress
from .data.corpora import Packed
from .errors import EnvironmentFault
from .export import export, prepare_directory
from .models.full_heads import rope_fader, rope_share
from .models.kernels import kernel_faults
from .report.markdown import markdown_table
from .report.records import quantity
from .report.tables import Table
from .rundir import RunDir
from .search.space import analytic_costs
from .search.trial import STARTS_FILE, TRAIN_FILE, TrialWorker
from .stages import RunContext
from .texts import write_heldout, write_training
from .train_plan import TRAINING_FILE, TrainPlan, check_place, check_rows
from .train_settings import batch_tokens, with_tokens
from .training.distill import Distillation
from .training.kept import Keeper, distill_kept
from .training.long_rows import long_batches
from .training.longcontext import tune_long_context
from .training.loop import NonFiniteLoss

SCHEMA = 1
WORK = "work"
"""Folder of what a training needs until it is done: checkpoints, long prompts, its lock."""
BEFORE, DISTILLED, TUNED = "before", "after distillation", "after long-context tuning"
CHECKPOINTS = {DISTILLED: "distil.safetensors", TUNED: "long.safetensors"}
TEXT = "text"


def run_training(
    run_dir: RunDir, plan: TrainPlan, printer: Printer, *, checkpoint_minutes: float = 2.0
) -> None:
    """Does what is left of a plan, and prints what came of it.

    Raises ConfigError where the folder holds something else, EnvironmentFault where another process trains there, memory
    or disk is too small, or a file is damaged, NonFiniteLoss.
    """
    folder = RunDir(plan.directory)
    check_place(plan)
    record = Record.open(folder, plan)
    if not record.is_done:
        folder.require_disk(plan.disk_bytes)
        with RunDir(folder / WORK) as work, kernel_faults(), _memory_faults():
            Training(run_dir, work, plan, record, printer, 60 * checkpoint_minutes).run()
    # Also what a call left that was killed right at its end.
    shutil.rmtree(folder / WORK, ignore_errors=True)
    printer.line(markdown_table(record.table()) + "\n")
    printer.line(str(folder.path))


@dataclass
class Record:
    """training.json: the settings of a training, and what its student was measured at so far."""

    folder: RunDir
    plan: TrainPlan
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_done: bool = False

    @classmethod
    def open(cls, folder: RunDir, plan: TrainPlan) -> Record:
        """Reads the folder's, or begins one."""
        record = cls(folder, plan)
        if (folder / TRAINING_FILE).exists():
            found = folder.read_json(TRAINING_FILE)
            record.stages = {row["stage"]: row for row in found["stages"]}
            record.is_done = found["done"]
        else:
            if not folder.path.is_dir():
                prepare_directory(folder.path)
            try:
                record.write()
            except OSError as error:
                raise EnvironmentFault(
                    f"{folder.path}: cannot be written to ({error.strerror})"
                ) from error
        return record

    def add(self, stage: str, metrics: dict[str, float], training: Distillation | None) -> None:
        """Writes down what a stage led to. Raises NonFiniteLoss where a metric is not finite."""
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteLoss(f"{stage}: {', '.join(sorted(bad))} is not finite")
        facts = {} if training is None else {"training": asdict(training)}
        self.stages[stage] = {"stage": stage, "metrics": metrics, **facts}
        self.write()

    def write(self) -> None:
        """Replaces the file."""
        plan = self.plan
        self.folder.write_json(
            TRAINING_FILE,
            {
                "schema": SCHEMA,
                "student": {
                    name: getattr(plan.chosen, name) for name in ("candidate", "source", "metrics")
                },
                "head_map": plan.head_map.to_json(),
                "costs": analytic_costs(plan.head_map, plan.config.cost),
                "settings": plan.settings,
                "stages": [*self.stages.values()],
                "done": self.is_done,
            },
        )

    def table(self) -> Table:
        """A row a metric, a column a stage."""
        stages = list(self.stages.values())
        names = list(dict.fromkeys(name for row in stages for name in row["metrics"]))
        rows = [(name, *(quantity(name, row["metrics"][name]) for row in stages)) for name in names]
        trained = [
            f"{row['training']['tokens']:,} tokens, {row['training']['seconds']:.0f} s"
            if "training" in row
            else ""
            for row in stages
        ]
        columns = ("metric", *(row["stage"] for row in stages))
        title = f"{self.plan.name[0].upper()}{self.plan.name[1:]}"
        return Table(title, columns, (*rows, ("trained on", *trained)))


@dataclass
class Training:
    """One call: what is left to do of a training. work is the folder of what it needs on the way."""

    run_dir: RunDir
    work: RunDir
    plan: TrainPlan
    record: Record
    printer: Printer
    save_seconds: float

    def run(self) -> None:
        """Trains, measures and exports."""
        plan, config = self.plan, self.plan.config
        if plan.makes_text:
            self._make_text()
            check_rows(config, self.work)
        with self.printer.stage("teacher") as progress:
            self.worker = TrialWorker(self._payload())
            student = self.worker.cut(plan.head_map, trains=True)
            student.requires_grad_(False).train(False)
            progress.summary = f"{plan.name}, on {self.worker.teacher.device}"
        self._measure(BEFORE, student)
        if plan.tokens:
            self._train(DISTILLED, "distil", student, self._distil)
        set_rope_share(student, rope_share(config.student.full, plan.tokens))
        if config.long_context.tokens:
            self._train(TUNED, "long", student, self._tune)
        with self.printer.stage("export") as progress:
            self._export(student)
            progress.summary = str(plan.directory)

    def _payload(self) -> dict[str, Any]:
        place = self.work if self.plan.makes_text else self.run_dir
        return {
            "config": self.plan.config.model_dump(mode="json", by_alias=True),
            "run_dir": str(self.run_dir.path),
            "train_dir": str(place.path),
        }

    def _make_text(self) -> None:
        """Training text of a run that has trained nothing, as much as the tokens of this training take."""
        config = self.plan.config
        if self.work.stage(TEXT) is not None:
            return
        config = with_tokens(config, max(self.plan.tokens, config.long_context.tokens))
        with self.printer.stage(TEXT) as progress:
            context = RunContext(config, self.run_dir)
            teacher = context.teacher()
            heldout = write_heldout(config, self.run_dir, teacher, context.seed, progress)
            progress.summary = write_training(
                config, self.work, teacher, heldout, context.seed, progress
            )
            self.work.mark_done(TEXT)

    def _train(
        self,
        stage: str,
        name: str,
        student: HydraHeadForCausalLM,
        train: Callable[[HydraHeadForCausalLM, Keeper, StageProgress], Distillation],
    ) -> None:
        """Trains a stage to its end, from its checkpoint if there is one, and measures what came of it."""
        path = self.work / CHECKPOINTS[stage]
        with self.printer.stage(name) as progress:
            if path.exists():
                progress.line(f"  {name}: goes on from its checkpoint")
            done = train(student, Keeper(path, self._identity(), self.save_seconds), progress)
            self.worker.free_memory()
            progress.summary = (
                f"{done.tokens:,} tokens, loss {done.first_loss:.4f} -> {done.last_loss:.4f}, "
                f"{done.tokens / max(done.seconds, 1e-9):,.0f} tokens/s"
            )
        self._measure(stage, student, done)

    def _identity(self) -> dict[str, Any]:
        teacher = self.worker.teacher
        return {**self.plan.settings, "fingerprint": teacher.fingerprint}

    def _distil(
        self, student: HydraHeadForCausalLM, keeper: Keeper, progress: StageProgress
    ) -> Distillation:
        worker, config = self.worker, self.plan.config
        size = batch_tokens(config.distill.batch_tokens, config.data.sequence_length)
        progress.count("tokens", size)
        return distill_kept(
            student,
            worker.teacher,
            worker.batches,
            keeper,
            tokens=self.plan.tokens,
            config=config.distill,
            before_step=rope_fader(student, config.student.full, size),
            progress=progress,
        )

    def _tune(
        self, student: HydraHeadForCausalLM, keeper: Keeper, progress: StageProgress
    ) -> Distillation:
        config, teacher = self.plan.config, self.worker.teacher
        long = config.long_context
        place = self.work if self.plan.makes_text else self.run_dir
        rows, marks = place / TRAIN_FILE, place / STARTS_FILE
        text = Packed(
            np.load(rows, mmap_mode="r"), np.load(marks, mmap_mode="r") if marks.exists() else None
        )
        progress.begin("prompts")
        batches = long_batches(config, teacher.tokenizer, text, self.work.path, progress=progress)
        progress.begin("tuning")
        progress.count("tokens", batch_tokens(long.batch_tokens, long.sequence_length))
        return tune_long_context(student, teacher, batches, long, keeper=keeper, progress=progress)

    def _measure(
        self, stage: str, student: HydraHeadForCausalLM, training: Distillation | None = None
    ) -> None:
        if stage in self.record.stages:
            return
        with self.printer.stage("measure") as progress:
            metrics = self.worker.measure(student)
            self.record.add(stage, metrics, training)
            progress.summary = f"{stage}: kl {metrics['kl']:.4f}"

    def _export(self, student: HydraHeadForCausalLM) -> None:
        """Writes the folder for transformers beside, and then moves it here file by file."""
        beside = self.work / "export"
        shutil.rmtree(beside, ignore_errors=True)
        export(
            student, self.worker.teacher.tokenizer, self.plan.head_map, beside, self._provenance()
        )
        for path in sorted(beside.iterdir()):
            os.replace(path, self.plan.directory / path.name)
        self.record.is_done = True
        self.record.write()

    def _provenance(self) -> dict[str, Any]:
        plan, config, teacher = self.plan, self.plan.config, self.worker.teacher
        last = list(self.record.stages.values())[-1]
        return {
            "run": config.name,
            "seed": config.seed,
            "teacher": config.teacher.source,
            "teacher_fingerprint": teacher.fingerprint,
            "supernet_sha256": plan.settings["supernet_sha256"],
            "candidate": plan.chosen.candidate,
            "source": plan.chosen.source,
            "distillation_tokens": plan.tokens,
            "long_context_tokens": config.long_context.tokens,
            "metrics": last["metrics"],
        }


@contextmanager
def _memory_faults() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error).partition("\n")[0]
        raise EnvironmentFault(
            f"the GPU's memory is too small ({said}); lower distill.batch_tokens or long_context.batch_tokens, or set "
            "distill.checkpointing=true"
        ) from error
