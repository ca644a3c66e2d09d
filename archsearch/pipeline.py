"""A run from its config to its report: the stages in order, each done once and kept in the run directory."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .config import RetentionConfig, RunConfig, ScoreMethod
from .console import Printer
from .errors import RunFault
from .footprint import TRAIN
from .ignored import ignored_options
from .inputs import scored_inputs
from .memory import MemoryWatch
from .models.kernels import kernel_faults, use_kernels
from .models.teacher import TeacherInfo, inspect_teacher
from .plan import STAGES, Done, Plan, make_plan
from .preflight import check_config, check_machine, check_memory
from .reuse import plan_reuse, take
from .rundir import RunDir, score_file
from .scoring.methods import METHODS
from .search.driver import scored_methods
from .search.seeds import ScoreTables, read_scores, top_heads
from .search.stopping import changed_limits, limits_of
from .search.study import check_studies, claim_first_study
from .search_plan import SearchDone, search_done
from .stages import (
    STAGE_WORK,
    RunContext,
    aligned_share,
    check_supernet,
    lost_outputs,
    lost_scores,
    lost_supernet,
    pairs_line,
    score_heads,
)
from .texts import check_texts
from .timings import record_stage

_log = logging.getLogger(__name__)

BEST_HEADS = 5
"""Heads that are named of each method."""


def plan_run(
    config: RunConfig, run_dir: RunDir, *, last: str = STAGES[-1], reuse: RunDir | None = None
) -> Plan:
    """Checks config, model and machine for a run up to the stage `last`, and estimates it. Nothing is written.

    reuse: a run whose text, twins and scores are taken where they fit. Raises ConfigError or EnvironmentFault for whatever would stop the run later.
    """
    check_machine(config, searches=_searches(last))
    info = inspect_teacher(config.teacher)
    check_config(config, info)
    run_dir.require_writable()
    run_dir.check_frozen(config, scored_inputs(config))
    if _searches(last):
        check_studies(config, run_dir)
    finished = [name for name in STAGES if _is_finished(run_dir, config, name)]
    due = [name for name in STAGES[: STAGES.index(last) + 1] if name not in finished]
    check_texts(config, run_dir, due)
    taken = None if reuse is None else plan_reuse(config, run_dir, reuse)
    finished += taken.whole if taken else []
    done = _done(config, run_dir, info, last)
    if "scores" in finished:
        done = replace(done, scored=())
    elif taken is not None:
        done = replace(done, scored=[*done.scored, *taken.scored])
    plan = make_plan(config, info, finished, last=last, done=done)
    if taken is not None:
        plan = replace(plan, reused=tuple(taken.lines()))
    check_memory(plan)
    run_dir.require_disk(plan.needs.disk)
    return plan


def _done(config: RunConfig, run_dir: RunDir, info: TeacherInfo, last: str) -> Done:
    """What there is of stages that are not finished."""
    methods = scored_methods(config)
    lost = lost_scores(run_dir, methods)
    return Done(
        aligned_share(run_dir, config),
        [method for method in methods if method not in lost],
        search_done(config, run_dir, info.shape) if last == STAGES[-1] else SearchDone(),
    )


def _searches(last: str) -> bool:
    """Whether a run up to this stage has a search."""
    return STAGES.index(last) >= STAGES.index("search")


def warning_lines(
    config: RunConfig, run_dir: RunDir | None = None, methods: Collection[ScoreMethod] | None = None
) -> list[str]:
    """What a run prints before it begins: options without effect on its scores (all of a run's where methods are None),
    and what is unwise about its place."""
    unwise = run_dir.warnings() if run_dir is not None else []
    return [f"warning: {said}" for said in (*unwise, *ignored_options(config, methods))]


def run_stages(
    config: RunConfig,
    run_dir: RunDir,
    printer: Printer,
    *,
    last: str = STAGES[-1],
    reuse: RunDir | None = None,
) -> None:
    """Runs the stages up to `last`; finished ones are kept, and what fits of the run reuse is taken. The run directory is
    locked meanwhile.

    Raises RunFault at the end where trials failed.
    """
    with _opened(config, run_dir, printer, scored_methods(config)) as (context, memory):
        names = STAGES[: STAGES.index(last) + 1]
        if _searches(last) and not _is_finished(run_dir, config, "search"):
            claim_first_study(config, run_dir)
        if reuse is not None:
            # Only then is it known whose weights these are.
            _run(context, memory, names[:1], printer)
            take(plan_reuse(config, run_dir, reuse), run_dir, printer.line)
            names = names[1:]
        _run(context, memory, names, printer)
        # Also where a kept search had failures: the same command says the same of the same run.
        search = (run_dir.stage("search") or {}) if last == STAGES[-1] else {}
        failed = search.get("failed", 0)
    if unmet := search.get("unmet"):
        _log.warning("the front is empty: %s", unmet)
    if failed:
        raise RunFault(f"{failed} trials failed; the report names them and their causes")


def run_methods(
    config: RunConfig, run_dir: RunDir, printer: Printer, methods: Sequence[ScoreMethod]
) -> None:
    """Scores heads by these methods alone, and prints what each found. Scores that are there are kept.

    Text and supernet are made only where one of the methods reads the twins. A report shows what is there.
    """
    needs_twins = any(METHODS[method].needs_supernet for method in methods)
    # The report reads the model's shape from what the teacher's stage writes.
    stages = ("teacher", "data", "supernet") if needs_twins else ("teacher",)
    with _opened(config, run_dir, printer, methods) as (context, memory):
        _run(context, memory, stages, printer)
        with printer.stage("scores") as progress:
            scored = score_heads(context, methods, progress)
            kept = [method for method in methods if method not in scored]
            said = [*scored, *(f"{method} kept" for method in kept)]
            progress.summary = f"{pairs_line(run_dir)}{', '.join(said)}"
        tables = read_scores(run_dir, methods)
    width = max(map(len, methods))
    for method in methods:
        printer.line(f"{method:<{width}}  {_best(tables[method])}  {run_dir / score_file(method)}")


def _best(scores: ScoreTables) -> str:
    """The heads that score highest."""
    heads = top_heads(scores.heads, BEST_HEADS)
    return ", ".join(f"L{layer} H{head} {scores.heads[layer][head]:z.3g}" for layer, head in heads)


@contextmanager
def _opened(
    config: RunConfig, run_dir: RunDir, printer: Printer, methods: Sequence[ScoreMethod]
) -> Iterator[tuple[RunContext, MemoryWatch]]:
    """Locks the run directory, writes down what runs there, and names what is without effect on these scores."""
    with run_dir, MemoryWatch() as memory:
        run_dir.freeze_config(config, scored_inputs(config))
        run_dir.record_provenance(config.seed)
        for line in warning_lines(config, run_dir, methods):
            printer.line(line)
        use_kernels(config.kernels)
        with kernel_faults():
            yield RunContext(config, run_dir), memory


def _run(context: RunContext, memory: MemoryWatch, names: Sequence[str], printer: Printer) -> None:
    """Runs those of the named stages that are not finished."""
    run_dir = context.run_dir
    for name in _due(context, names, printer):
        if name == "search":
            # One that goes on is not done until its front is that of all that was evaluated.
            run_dir.mark_open(name)
        with printer.stage(name) as progress:
            try:
                progress.summary = summary = STAGE_WORK[name](context, progress)
            except BaseException:
                progress.close()
                record_stage(run_dir, name, progress.seconds, memory.take_peak(), "stopped")
                raise
        said = "; ".join(summary.splitlines())
        row = record_stage(run_dir, name, progress.seconds, memory.take_peak(), said)
        run_dir.mark_done(**row, **_results(context, name))


def _due(context: RunContext, names: Collection[str], printer: Printer) -> list[str]:
    """The stages to run, in order. The teacher is loaded again only where a later stage needs it."""
    config, run_dir = context.config, context.run_dir
    due = [n for n in names if not _is_finished(run_dir, config, n) or n == "report"]
    needs_teacher = context.loaded is None and {"data", "supernet", "scores"} & set(due)
    if "teacher" not in due and needs_teacher:
        due.insert(0, "teacher")
    for name in names:
        details = run_dir.stage(name)
        if name not in due and details is not None:
            printer.line(f"{name:<9} kept: {details.get('summary', '')}")
            if name == "search":
                _tell_lower_limits(details, config, printer)
    return due


def _tell_lower_limits(details: Mapping[str, Any], config: RunConfig, printer: Printer) -> None:
    """Names the limits of a finished search that are lower than those that it had."""
    for name in changed_limits(details, config.search)[1]:
        now = getattr(config.search, name)
        printer.line(
            f"search.{name}: {details[name]} -> {now} changes nothing of a search that is done"
        )


def _is_finished(run_dir: RunDir, config: RunConfig, name: str) -> bool:
    details = run_dir.stage(name)
    if details is None or (name == "scores" and lost_outputs(run_dir, config)):
        return False
    if name == "supernet" and lost_supernet(run_dir):
        if config.supernet.source == TRAIN:
            check_supernet(run_dir, config)
        return False
    if name != "search":
        return True
    more, _ = changed_limits(details, config.search)
    retention = details.get("retention", RetentionConfig().model_dump(mode="json"))
    return not more and retention == config.search.retention.model_dump(mode="json")


def _results(context: RunContext, name: str) -> dict[str, Any]:
    """What a finished stage is remembered by, beside its seconds."""
    search, outcome = context.config.search, context.outcome
    if name != "search" or outcome is None:
        return {}
    return {
        **limits_of(search),
        "retention": search.retention.model_dump(mode="json"),
        "failed": outcome.failed,
        "unmet": outcome.last.unmet,
    }
