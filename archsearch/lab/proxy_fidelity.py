"""How well short looks at head maps predict long training: the hard case, good maps of one FA share, and mixed ones.

    archsearch score search_spaces/smollm2_135m_gpu.yaml --run-dir RUN
    python -m archsearch.lab.proxy_fidelity RUN --seconds 540 --figures runs/lab/proxy_fidelity.json

The study of `archsearch fidelity`, also on a run that has scores and a supernet but no front yet. With --seconds no map is
begun that would not end in time: the same command goes on, and RUN/fidelity.json is all that it needs of the work before.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from ..console import Printer
from ..fidelity.analysis import targets_of
from ..fidelity.records import Agreement, Study
from ..fidelity_plan import Options, plan_fidelity
from ..fidelity_run import run_fidelity
from ..metrics import is_loss
from ..rundir import RunDir
from .entry import add_run, run_script, script_parser
from .records import LabBook

AT = (50_000, 200_000, 500_000, 2_000_000)
"""Readings beside 0 and the end: 200,000 is 5% of the default's 4 M tokens."""
ANALYSIS_SECONDS = 40.0
"""Left of --seconds for what comes after the last map."""
CHEAP = 0.05
"""Share of the long training's tokens that a proxy may take."""


def record(study: Study, targets: Iterable[str], book: LabBook) -> None:
    """Adds a study's maps, agreements and ceilings."""
    whole = study.settings.tokens
    for metric in targets:
        unit = "nats/token" if is_loss(metric) else ""
        for subject in study.subjects:
            for seed in (0, 1):
                run = study.of(subject, seed)
                if run is None:
                    continue
                name = f"{metric} after {whole:,} tokens, {subject.origin}, seed {seed}"
                book.add(
                    name,
                    run.value(metric, whole),
                    unit,
                    group=subject.group,
                    head_map=list(subject.head_map.layers),
                    readings={r.tokens: r.metrics[metric] for r in run.readings},
                    seconds=run.seconds,
                )
    for row in study.agreements:
        name = f"Spearman, {row.proxy} at {row.tokens:,} tokens with {row.metric} after {whole:,}, {row.group}"
        book.add(
            name,
            row.spearman,
            "",
            maps=row.maps,
            interval=row.spearman_range,
            regret=row.regret,
            regret_interval=row.regret_range,
            regret_of_three=row.regret_of_three,
            front_lost=row.front_lost,
        )
    for top in study.ceilings:
        book.add(
            f"Spearman, two seeds of {top.metric} after {whole:,} tokens, {top.group}",
            top.spearman,
            "",
            maps=top.maps,
            reliability=top.reliability,
            deviation=top.deviation,
        )


def best_lines(study: Study) -> list[str]:
    """A line a metric and group: the best proxy without training, the best of little training, and what two seeds reach."""
    lines = []
    most = CHEAP * study.settings.tokens
    places = dict.fromkeys((row.metric, row.group) for row in study.agreements)
    for metric, group in places:
        rows = [row for row in study.agreements if (row.metric, row.group) == (metric, group)]
        free = [row for row in rows if not row.tokens]
        cheap = [row for row in rows if row.tokens <= most]
        ceiling = next((c for c in study.ceilings if (c.metric, c.group) == (metric, group)), None)
        reached = "" if ceiling is None else f"; two seeds {ceiling.reliability:.2f} by variance"
        lines.append(
            f"{metric}, {group}: without training {_named(free)}; within {CHEAP:.0%} of the tokens {_named(cheap)}{reached}"
        )
    return lines


def _named(rows: Iterable[Agreement]) -> str:
    best = max(rows, key=lambda row: row.spearman)
    return f"{best.spearman:.2f} ({best.proxy} at {best.tokens:,})"


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    add_run(parser)
    parser.add_argument("--good", type=int, default=24, help="maps of one FA share")
    parser.add_argument("--mixed", type=int, default=12, help="maps of other shares")
    parser.add_argument("--share", type=float, default=0.125, help="FA share of the good maps")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of each map")
    parser.add_argument("--at", type=int, nargs="*", default=AT, help="tokens of the readings")
    parser.add_argument(
        "--repeats", type=int, default=8, help="maps trained again with another seed"
    )
    parser.add_argument("--seconds", type=float, default=inf, help="most in all")
    parser.add_argument(
        "--keep-logits", action="store_true", help="leaves the teacher's answers to the next call"
    )
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], help="such as distill.replay=true"
    )
    parser.add_argument(
        "--targets", nargs="+", default=(), help="metrics that count beside the objectives and KL"
    )
    parser.add_argument("--dry-run", action="store_true", help="stops after the plan")
    args = parser.parse_args()
    run_dir, printer = RunDir(args.run), Printer()
    options = Options(
        {"good": args.good, "mixed": args.mixed},
        args.tokens,
        tuple(tokens for tokens in args.at if tokens < args.tokens),
        args.repeats,
        args.share,
        needs_front=False,
        overrides=tuple(args.overrides),
        targets=tuple(args.targets),
    )
    plan = plan_fidelity(run_dir, options)
    for line in plan.lines():
        printer.line(line)
    if args.dry_run:
        return
    seconds = args.seconds - ANALYSIS_SECONDS
    study = run_fidelity(run_dir, plan, printer, seconds=seconds, keep_logits=args.keep_logits)
    book = LabBook(plan.config.seed)
    record(study, targets_of(plan.config.search.objectives, study, plan.targets), book)
    book.write(args.figures)
    for line in best_lines(study):
        printer.line(line)


if __name__ == "__main__":
    run_script(main)
