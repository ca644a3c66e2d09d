"""A study of proxies from its plan to its report: training what is missing, each map written down as it is finished."""

from __future__ import annotations

import shutil
import time
from math import inf

from .console import Printer
from .execution.choice import open_executor
from .fidelity.analysis import analyse, targets_of
from .fidelity.driver import Driver, tasks_of
from .fidelity.records import FIDELITY_FILE, Study, write_study
from .fidelity.worker import LongWorker
from .fidelity_changes import write_changes
from .fidelity_plan import FOLDER, FidelityPlan, training_config
from .models.kernels import kernel_faults
from .report.fidelity_tables import fidelity_tables
from .report.files import write_report
from .report.markdown import markdown_table
from .rundir import RunDir
from .search.trial import TEACHER_LOGITS
from .stages import RunContext
from .texts import write_heldout, write_training

TEXT = "text"


def run_fidelity(
    run_dir: RunDir,
    plan: FidelityPlan,
    printer: Printer,
    *,
    seconds: float = inf,
    keep_logits: bool = False,
) -> Study:
    """Trains what is missing, writes fidelity.json and the report, and prints what was found.

    With seconds, no map is begun that would not end within them. What failed is among the study's failures.
    What maps share of the teacher's answers is deleted at the end, however that comes, unless keep_logits leaves it to
    the next call.
    """
    deadline = time.monotonic() + seconds
    with run_dir, kernel_faults():
        run_dir.record_provenance(plan.config.seed)
        # Before the study: where that is, its changes are known.
        write_changes(run_dir, plan.config)
        write_study(run_dir, plan.study)
        if plan.makes_text:
            _make_text(run_dir, plan, printer)
        try:
            study = _train(run_dir, plan, printer, deadline) if plan.missing else plan.study
        finally:
            if not keep_logits:
                shutil.rmtree(run_dir / TEACHER_LOGITS, ignore_errors=True)
        study = analyse(study, targets_of(plan.config.search.objectives, study, plan.targets))
        write_study(run_dir, study)
        write_report(run_dir)
    for table in fidelity_tables(study):
        printer.line(markdown_table(table) + "\n")
    printer.line(str(run_dir / FIDELITY_FILE))
    return study


def _train(run_dir: RunDir, plan: FidelityPlan, printer: Printer, deadline: float) -> Study:
    with printer.stage(FOLDER) as progress:
        executor = open_executor(plan.config.execution, LongWorker, plan.payload(run_dir))
        driver = Driver(
            plan.study,
            executor,
            run_dir / FOLDER,
            save=lambda study: write_study(run_dir, study),
            say=progress.line,
            seconds=plan.map_seconds,
            progress=progress,
            deadline=deadline,
        )
        try:
            study = driver.train(tasks_of(plan.study.subjects, plan.repeats))
        finally:
            executor.shutdown()
        left = f"; {driver.left} are left for the same command" if driver.left else ""
        progress.summary = f"{len(study.runs)} maps trained, {len(study.failures)} failed{left}"
    return study


def _make_text(run_dir: RunDir, plan: FidelityPlan, printer: Printer) -> None:
    """Writes training text for as many tokens into the study's folder, once."""
    place, tokens = RunDir(run_dir / FOLDER), plan.study.settings.tokens
    if (place.stage(TEXT) or {}).get("tokens") == tokens:
        return
    config = training_config(plan.config, tokens)
    with printer.stage(TEXT) as progress:
        context = RunContext(config, run_dir)
        teacher = context.teacher()
        heldout = write_heldout(config, run_dir, teacher, context.seed, progress)
        said = write_training(config, place, teacher, heldout, context.seed, progress)
        progress.summary = said
        place.mark_done(TEXT, tokens=tokens)
