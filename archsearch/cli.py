"""The command line: parse, load, one call each. Every fault of a user's is one line and an exit status."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import Annotated, get_args

import typer

from .config import RunConfig, ScoreMethod
from .configfile import load_config
from .console import Printer
from .errors import ConfigError, EnvironmentFault, RunFault
from .faults import faults, interrupt, naming
from .rundir import RunDir

KERNEL_CHOICES = "archsearch.attention.backends"
"""The logger that says once who computes each operator."""

app = typer.Typer(
    help="Searches head-wise hybrids of full and linear attention for a pretrained language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Overrides one value of the config."),
]
RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", help="Where the run lives; runs/NAME by default.")
]
Candidate = Annotated[int | None, typer.Option(help="Its number in the report.")]
Knee = Annotated[bool, typer.Option("--knee", help="The front's knee.")]
FaShare = Annotated[
    float | None, typer.Option(help="The front's best map of at most so many full-attention heads.")
]
MapFile = Annotated[
    Path | None,
    typer.Option("--head-map", metavar="FILE", help="Any head map of the run's teacher."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Shows the traceback of a fault.")]


@app.command()
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    run_dir: RunDirOption = None,
    reuse: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Takes text, twins and scores of that run where they fit."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stops after the plan.")] = False,
    debug: Debug = False,
) -> None:
    """Searches from a config to a Pareto front; the same command again resumes."""
    with faults(debug, resumes=True):
        _run(
            config,
            overrides,
            run_dir,
            last="report",
            reuse=reuse,
            dry_run=dry_run,
            tells_backends=True,
        )


@app.command()
def score(
    config: ConfigPath,
    overrides: Overrides = None,
    run_dir: RunDirOption = None,
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", metavar="NAME", help="Only these scores; may be given again."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Runs up to the head scores and writes scores.json and scores/."""
    with faults(debug, resumes=True):
        if methods:
            _score_by(config, overrides, run_dir, methods, debug=debug)
        else:
            _run(config, overrides, run_dir, last="scores", tells_backends=debug)


@app.command()
def validate(config: ConfigPath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Reads a config, and checks it against the teacher and this machine."""
    with faults(debug):
        settings = load_config(config, overrides or [])
        from .models.kernels import check_environment
        from .models.teacher import inspect_teacher
        from .pipeline import warning_lines
        from .preflight import check_config, check_machine

        check_environment()
        with naming(config, overrides):
            check_machine(settings)
            info = inspect_teacher(settings.teacher)
            check_config(settings, info)
        for line in warning_lines(settings):
            typer.echo(line)
        typer.echo(f"{config}: valid for {settings.teacher.source} ({info.shape.family})")


@app.command()
def export(
    run: RunPath,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="A new or empty folder.")],
    candidate: Candidate = None,
    knee: Knee = False,
    fa_share: FaShare = None,
    head_map: MapFile = None,
    debug: Debug = False,
) -> None:
    """Writes one hybrid as a folder that transformers loads by itself."""
    with faults(debug):
        from .candidates import export_candidate
        from .chosen import Choice

        choice = Choice(candidate, knee, fa_share, head_map)
        typer.echo(export_candidate(RunDir(run), to, choice))


@app.command()
def train(
    run: RunPath,
    candidate: Candidate = None,
    knee: Knee = False,
    fa_share: FaShare = None,
    head_map: MapFile = None,
    tokens: Annotated[
        int | None, typer.Option(metavar="T", help="8 times the longest proxy by default.")
    ] = None,
    overrides: Overrides = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="RUN/train/... by default.")
    ] = None,
    checkpoint_minutes: Annotated[float, typer.Option(min=0, help="Between two of them.")] = 2.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stops after the plan.")] = False,
    debug: Debug = False,
) -> None:
    """Distils one hybrid, tunes it on long context and exports it; the same command again resumes."""
    with faults(debug, resumes=True):
        from .chosen import Choice
        from .train_plan import plan_training
        from .train_run import run_training

        _tell_backends(debug)
        place, printer = RunDir(run), Printer()
        choice = Choice(candidate, knee, fa_share, head_map)
        plan = plan_training(place, choice, tokens=tokens, overrides=overrides or [], to=to)
        for line in plan.lines():
            printer.line(line)
        if not dry_run:
            run_training(place, plan, printer, checkpoint_minutes=checkpoint_minutes)


@app.command()
def report(run: RunPath, debug: Debug = False) -> None:
    """Writes the report of a run, finished or not, and prints its tables."""
    with faults(debug):
        from .report.files import write_report
        from .report.markdown import markdown_report
        from .report.summary import read_summary

        run_dir = _writable(run)
        page = write_report(run_dir)
        typer.echo(markdown_report(read_summary(run_dir)))
        typer.echo(page)


@app.command()
def fidelity(
    run: RunPath,
    maps: Annotated[
        int | None, typer.Option("--maps", metavar="N", help="Head maps to train; 12 by default.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(metavar="T", help="Of each map; 8 times the longest proxy by default."),
    ] = None,
    at: Annotated[
        list[int] | None,
        typer.Option("--at", metavar="T", help="Reads each map there; may be given again."),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            metavar="R", help="Maps trained again with another seed; a quarter by default."
        ),
    ] = None,
    share: Annotated[
        float, typer.Option(metavar="S", help="Share of full-attention heads of the good maps.")
    ] = 0.125,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC", help="Counts too after long training; may be given again."),
    ] = None,
    keep_logits: Annotated[
        bool, typer.Option("--keep-logits", help="Leaves RUN/teacher_logits to the next call.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stops after the plan.")] = False,
    debug: Debug = False,
) -> None:
    """Trains head maps long and says how well every shorter look predicts that; the same command again resumes."""
    with faults(debug, resumes=True):
        from .fidelity_plan import Options, counts_of, plan_fidelity
        from .fidelity_run import run_fidelity

        _tell_backends(debug)
        counts = None if maps is None else counts_of(maps)
        options = Options(
            counts, tokens, tuple(at or ()), repeats, share, targets=tuple(target or ())
        )
        run_dir = _writable(run)
        plan, printer = plan_fidelity(run_dir, options), Printer()
        for line in plan.lines():
            printer.line(line)
        if dry_run:
            return
        failures = run_fidelity(run_dir, plan, printer, keep_logits=keep_logits).failures
        if failures:
            raise RunFault(
                f"{len(failures)} maps failed; fidelity.json has the causes, and the same command tries them again"
            )


@app.command()
def dashboard(
    run: RunPath,
    port: Annotated[str, typer.Option(help="On the loopback interface.")] = "8080",
    debug: Debug = False,
) -> None:
    """Serves optuna-dashboard on the run's study, and prints its address."""
    with faults(debug):
        from .dashboard import serve

        serve(RunDir(run), port, typer.echo)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Looks at what its run needs.")
    ] = None,
    overrides: Overrides = None,
    every: Annotated[
        bool, typer.Option("--all", help="Proves backends that are not chosen too.")
    ] = False,
    backends: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="NAME", help="Proves only this one; may be given again."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Limit of a proof: a backend in one dtype.")
    ] = 60.0,
    debug: Debug = False,
) -> None:
    """Says what this machine offers, and whether the kernels that it would choose compute the right thing."""
    with faults(debug):
        settings = None if config is None else load_config(config, overrides or [])
        if overrides and config is None:
            raise ConfigError("--set: needs a config; allowed: doctor CONFIG --set A.B=VALUE")
        from .doctor import complaint, examine
        from .kernel_report import Scope

        scope, printer, found = Scope(every, tuple(backends or ()), seconds), Printer(), []
        with (
            printer.waiting() as waiting,
            contextlib.closing(examine(settings, scope, waiting=waiting)) as findings,
        ):
            for finding in findings:
                printer.line(f"{finding.verdict:<5} {finding.topic:<20} {finding.text}")
                found.append(finding)
        if said := complaint(found):
            raise EnvironmentFault(f"doctor: {said}")


def _run(
    config: Path,
    overrides: list[str] | None,
    run_dir: Path | None,
    *,
    last: str,
    reuse: Path | None = None,
    dry_run: bool = False,
    tells_backends: bool,
) -> None:
    settings = load_config(config, overrides or [])
    from .pipeline import plan_run, run_stages, warning_lines

    _tell_backends(tells_backends)
    place, printer = _begin(settings, run_dir)
    source = None if reuse is None else RunDir(reuse)
    with naming(config, overrides):
        plan = plan_run(settings, place, last=last, reuse=source)
    warned = warning_lines(settings, place) if dry_run else []
    for line in (*plan.lines(), *warned):
        printer.line(line)
    if not dry_run:
        run_stages(settings, place, printer, last=last, reuse=source)


def _score_by(
    config: Path,
    overrides: list[str] | None,
    run_dir: Path | None,
    names: list[str],
    *,
    debug: bool,
) -> None:
    methods = [method for method in get_args(ScoreMethod) if method in names]
    if unknown := set(names) - set(methods):
        allowed = ", ".join(get_args(ScoreMethod))
        raise ConfigError(f"--method {min(unknown)}: no such method; allowed: {allowed}")
    settings = load_config(config, overrides or [])
    from .pipeline import plan_run, run_methods

    _tell_backends(debug)
    place, printer = _begin(settings, run_dir)
    with naming(config, overrides):
        plan_run(settings, place, last="scores")
    run_methods(settings, place, printer, methods)


def _begin(settings: RunConfig, run_dir: Path | None) -> tuple[RunDir, Printer]:
    """Where the run lives, runs/NAME where nothing is given, and what prints; it has said both ends."""
    place, printer = RunDir(run_dir or Path("runs") / settings.name), Printer()
    printer.line(f"{settings.name}: {settings.teacher.source} -> {place.path}")
    return place, printer


def _writable(run: Path) -> RunDir:
    """The run at that path, checked to be one that this command can write to."""
    run_dir = RunDir(run)
    run_dir.load_config()
    run_dir.require_writable()
    return run_dir


def _tell_backends(all_of_them: bool) -> None:
    """Whether each choice of a backend is said, or slow ones alone. Raises ConfigError for a wish for one that there is not."""
    from .models.kernels import check_environment

    check_environment()
    logging.getLogger(KERNEL_CHOICES).setLevel(logging.INFO if all_of_them else logging.WARNING)


def main() -> None:
    """Calls the command that the arguments name."""
    # A polite kill ends like Ctrl-C, so that workers are shut down and the run can go on later.
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    logging.basicConfig(format="archsearch: %(message)s")
    # OpenMP threads that spin while they wait make small operations 100 times slower wherever another
    # process wants the core; torch reads this when it is imported, workers inherit it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # Stages print their own.
    app()


if __name__ == "__main__":
    main()
