"""What a study of proxies is going to do: its maps, how they are trained, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import get_args

from .config import RunConfig, ScoreMethod
from .errors import ConfigError
from .execution.base import Payload
from .fidelity.analysis import has_direction
from .fidelity.driver import tasks_of
from .fidelity.predictors import TWIN_ERROR, predictors_of
from .fidelity.records import FIDELITY_FILE, Group, Settings, Study, Subject, read_study
from .fidelity.subjects import TooManyMaps, choose_subjects
from .fidelity_changes import changed_config
from .footprint import checkpoint_bytes
from .models.teacher import TeacherInfo, inspect_teacher, pick_device
from .plan import RAY_SECONDS, Speed, duration, matmul_rate, training_rows
from .preflight import check_machine
from .rundir import RunDir, score_file
from .search.front import Candidate
from .search.outcome import read_outcome
from .search.ranking import Table
from .search.records import measured_metrics
from .search.seeds import read_scores
from .search.trial import SUPERNET_FILE
from .search_plan import TRAINING_COST, evaluation_tokens
from .stages import ALIGNMENT_FILE, check_supernet
from .trainconfig import FORK_SHARE

FOLDER = "fidelity"
"""Training text of a study, where the run's own is too short for it, and checkpoints."""
MAPS = 12
FACTOR = 8
"""Times the run's longest proxy that maps are trained by default."""
PARTS = (1 / 80, 1 / 40, 1 / 20, 1 / 10, 1 / 5, 1 / 2)
"""Where a map is read by default, as parts of its tokens, beside 0, the search's own proxies and the end."""
GOOD_PART, REPEATED_PART = 2 / 3, 1 / 4
"""Of all maps."""


@dataclass(frozen=True)
class Options:
    """What is asked of a study; None and () leave a choice to the run, or to the study that it has already."""

    counts: Mapping[Group, int] | None = None
    tokens: int | None = None
    lengths: tuple[int, ...] = ()
    repeats: int | None = None
    share: float = 0.125
    """Of full-attention heads, of the good maps."""
    needs_front: bool = True
    overrides: tuple[str, ...] = ()
    """`a.b=value` on the run's config, in the sections that say how students are trained."""
    targets: tuple[str, ...] = ()
    """Metrics that count after long training beside the objectives and KL."""


@dataclass(frozen=True)
class FidelityPlan:
    """The study with the maps that a call trains, and what that takes."""

    config: RunConfig
    study: Study
    repeats: int
    map_seconds: float
    """Of one map on one worker: measured if there are any, else estimated."""
    workers: int
    makes_text: bool
    """Whether the run's own training text is too short."""
    targets: tuple[str, ...] = ()
    """Options.targets."""

    @property
    def missing(self) -> int:
        """Maps still to train, repeats among them."""
        tasks = tasks_of(self.study.subjects, self.repeats)
        return sum(task.key not in self.study.runs for task in tasks)

    @property
    def seconds(self) -> float:
        """Estimated seconds until all are trained; making text is not counted."""
        start = RAY_SECONDS if self.missing and self.config.execution.executor == "ray" else 0.0
        return start + -(-self.missing // self.workers) * self.map_seconds

    def payload(self, run_dir: RunDir) -> Payload:
        """What workers are built from."""
        return {
            "config": self.config.model_dump(mode="json", by_alias=True),
            "run_dir": str(run_dir.path),
            "train_dir": str(run_dir / FOLDER if self.makes_text else run_dir.path),
        }

    def lines(self) -> list[str]:
        """The plan as text."""
        subjects, settings = self.study.subjects, self.study.settings
        good = [s for s in subjects if s.group == "good"]
        share = f" with {good[0].head_map.fa_share:.1%} FA heads" if good else ""
        read = ", ".join(f"{tokens:,}" for tokens in settings.lengths)
        text = "; training text is made first" if self.makes_text else ""
        executor = self.config.execution.executor
        return [
            f"  maps      {len(subjects)}: {len(good)} good ones{share}, {len(subjects) - len(good)} at other shares; "
            f"{self.repeats} of all again with another seed",
            f"  training  {settings.tokens:,} tokens a map, read at {read}; {settings.trained_tokens:,} with the "
            f"forks of these readings{_as_trials(settings)}{text}",
            f"  in all about {duration(self.seconds)}: {self.missing} maps are missing, {duration(self.map_seconds)} "
            f"each, {self.workers} {executor} worker(s)",
        ]


def plan_fidelity(run_dir: RunDir, options: Options) -> FidelityPlan:
    """Checks a run and the options, chooses maps and estimates the work. Nothing is written.

    Raises ConfigError for options that do not fit the run, or the study that it has already, and where the run has no
    front (unless options do without) or scores; EnvironmentFault for what the machine lacks.
    """
    _check(options)
    config = changed_config(run_dir, options.overrides)
    _check_targets(config, options.targets)
    if options.needs_front:
        run_dir.require_search("pareto.json")
    check_supernet(run_dir, config)
    run_dir.require_search(SUPERNET_FILE)
    check_machine(config)
    info, old = inspect_teacher(config.teacher), read_study(run_dir)
    settings = _settings(config, options, run_dir, old)
    study = Study(info.shape, settings) if old is None else old
    study = replace(study, subjects=_subjects(run_dir, config, options, study))
    repeats = options.repeats
    if repeats is None:
        repeats = max(_repeated(study), round(REPEATED_PART * len(study.subjects)))
    if not 0 <= repeats <= len(study.subjects):
        raise ConfigError(f"--repeats {repeats}: allowed: 0 to the {len(study.subjects)} maps")
    workers = config.execution.workers if config.execution.executor == "ray" else 1
    run_dir.require_disk(workers * checkpoint_bytes(config, info))
    there, wanted = (training_rows(c) for c in (config, training_config(config, settings.tokens)))
    seconds = _map_seconds(config, info, study)
    makes_text = wanted.text > there.text or wanted.prompts > there.prompts
    return FidelityPlan(config, study, repeats, seconds, workers, makes_text, options.targets)


def _check(options: Options) -> None:
    """Raises ConfigError for options that no run could fit."""
    if not 0 < options.share < 1:
        raise ConfigError(f"--share {options.share:g}: allowed: between 0 and 1")
    if options.counts is not None and sum(options.counts.values()) < 2:
        raise ConfigError(f"--maps {sum(options.counts.values())}: allowed: 2 or more")


def _check_targets(config: RunConfig, targets: tuple[str, ...]) -> None:
    """Raises ConfigError for a target that the run does not measure, or that is no better either way."""
    allowed = [name for name in measured_metrics(config) if has_direction(name)]
    for name in targets:
        if name not in allowed:
            raise ConfigError(
                f"--target {name}: the run has no such measure; allowed: {', '.join(allowed)}"
            )


def training_config(config: RunConfig, tokens: int) -> RunConfig:
    """The config of a run whose longest proxy has so many tokens: it says how much training text there must be."""
    search = config.search.model_copy(update={"proxy_tokens": (tokens,)})
    return config.model_copy(update={"search": search})


def _settings(config: RunConfig, options: Options, run_dir: RunDir, old: Study | None) -> Settings:
    """Those of the study that is there, else what the options say. Raises ConfigError where both differ."""
    if old is not None and options.tokens is None and not options.lengths:
        return old.settings
    tokens = options.tokens
    if tokens is None:
        tokens = old.settings.tokens if old else FACTOR * max(config.search.proxy_tokens)
    batch = config.data.sequence_length
    batch *= max(1, config.distill.batch_tokens // batch)
    steps = round(tokens / batch)
    if steps < 2:
        hint = "" if options.tokens is not None else " (the run has no proxy with tokens to go by)"
        raise ConfigError(f"--tokens {tokens}{hint}: allowed: {2 * batch:,} or more, two batches")
    beyond = [length for length in options.lengths if not 0 <= length <= tokens]
    if beyond:
        raise ConfigError(f"--at {beyond[0]}: allowed: 0 to {tokens}, the tokens of a map")
    lost = [length for length in options.lengths if length and not round(length / batch)]
    if lost:
        raise ConfigError(
            f"--at {lost[0]}: is no batch yet; allowed: 0, or {batch:,} (a batch) to {tokens}, the tokens of a map"
        )
    # A study of an earlier version, which read them off its trunk, goes on as it began.
    has_none = old is not None and not old.settings.proxies
    proxies = () if has_none else _own_proxies(config, batch, steps)
    wanted: tuple[float, ...] = options.lengths
    wanted = wanted or (
        *(part * tokens for part in PARTS),
        *(config.search.proxy_tokens if has_none else ()),
    )
    counts = {0, steps, *(round(length / batch) for length in wanted if length <= tokens)}
    counts -= {_steps(proxy, batch) for proxy in proxies}
    lengths = tuple(sorted({*proxies, *(batch * count for count in counts)}))
    share = config.distill.decay_share
    fork = share if share < 1 else FORK_SHARE
    found = Settings(lengths, fork, batch, proxies, share if proxies else 1.0)
    if old is not None and found != old.settings:
        read = ", ".join(f"{length:,}" for length in old.settings.lengths)
        raise ConfigError(
            f"{run_dir / FIDELITY_FILE}: its maps are read at {read} tokens; allowed: the same --tokens and --at, or "
            "to move that file away"
        )
    return found


def _own_proxies(config: RunConfig, batch: int, steps: int) -> tuple[int, ...]:
    """The search's own proxies with tokens that are shorter than so many steps."""
    return tuple(p for p in config.search.proxy_tokens if p and _steps(p, batch) < steps)


def _steps(proxy: int, batch: int) -> int:
    return max(1, round(proxy / batch))


def _as_trials(settings: Settings) -> str:
    if not settings.proxies:
        return ""
    own = ", ".join(f"{tokens:,}" for tokens in settings.proxies)
    return f", and with the search's own proxies ({own}), each trained as a trial is"


def _subjects(
    run_dir: RunDir, config: RunConfig, options: Options, study: Study
) -> tuple[Subject, ...]:
    """The study's maps, more of them where more are asked for, with what can be said of each without training."""
    methods = [m for m in get_args(ScoreMethod) if (run_dir / score_file(m)).exists()]
    scores = read_scores(run_dir, methods)
    counts = options.counts
    if counts is None:
        counts = {"good": 0, "mixed": 0} if study.subjects else counts_of(MAPS)
    choose = partial(
        choose_subjects,
        study.shape,
        scores,
        _front(run_dir, config, study),
        share=options.share,
        shares=config.search.seeds.fa_shares,
        seed=config.seed,
        kept=study.subjects,
    )
    try:
        found = choose(counts=counts)
    except TooManyMaps as error:
        asked, most = sum(counts.values()), _most_maps(choose, error)
        allowed = f"2 to {most}" if most else "another --share"
        raise ConfigError(
            f"--maps {asked}: {study.shape.total_heads} heads give fewer such maps; allowed: {allowed}"
        ) from error
    tables = {name: table.heads for name, table in scores.items()}
    errors = _twin_errors(run_dir, study)
    tables |= {TWIN_ERROR: errors} if errors else {}
    return tuple(
        replace(s, predictors=predictors_of(s.head_map, tables, config.cost)) for s in found
    )


def _most_maps(choose: Callable[..., list[Subject]], error: TooManyMaps) -> int:
    """The most maps that can be had where so many cannot, 0 where not even two can."""
    while True:
        found = error.found
        within = (
            maps
            for maps in range(sum(found.values()), 1, -1)
            if all(count <= found[group] for group, count in counts_of(maps).items())
        )
        most = next(within, 0)
        try:
            # Fewer maps are made from fewer others, so that there may be fewer still.
            choose(counts=counts_of(most))
        except TooManyMaps as fewer:
            error = fewer
        else:
            return most


def _twin_errors(run_dir: RunDir, study: Study) -> Table | None:
    """What each twin leaves of its head's variance on held-out text, where the supernet's training measured that."""
    if not (run_dir / ALIGNMENT_FILE).exists():
        return None
    table = run_dir.read_json(ALIGNMENT_FILE).get("metrics", {}).get("error_by_head")
    shape = study.shape
    if not table or [len(row) for row in table] != [shape.num_heads] * shape.num_layers:
        return None
    found: Table = table
    return found


def counts_of(maps: int) -> dict[Group, int]:
    """How many of all maps are in each group."""
    good = round(GOOD_PART * maps)
    return {"good": good, "mixed": maps - good}


def _front(run_dir: RunDir, config: RunConfig, study: Study) -> list[Candidate]:
    """The run's front, none where it has not searched."""
    if not (run_dir / "pareto.json").exists():
        return []
    outcome = read_outcome(config, run_dir, study.shape)
    return list(outcome.fronts.points) if outcome.rungs else []


def _repeated(study: Study) -> int:
    return sum(seed > 0 for _, seed in study.runs)


def _map_seconds(config: RunConfig, info: TeacherInfo, study: Study) -> float:
    if study.runs:
        return fmean(run.seconds for run in study.runs.values())
    device = pick_device(config.teacher.device)
    speed = Speed.of(info, device.type, matmul_rate(device))
    tokens = TRAINING_COST * study.settings.trained_tokens
    tokens += len(study.settings.lengths) * evaluation_tokens(config)
    # Workers on one device share what it can do.
    execution = config.execution
    workers = execution.workers if execution.executor == "ray" else 1
    shared = workers / max(1, workers * execution.gpus_per_worker) if device.type == "cuda" else 1
    return tokens * speed.forward * shared
