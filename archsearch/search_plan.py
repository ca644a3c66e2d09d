"""What a search is going to do and what of it is done: head maps at each proxy, the time that they take, what ends it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from .config import RunConfig
from .errors import ArchsearchError
from .headmap import ModelShape
from .metrics import GeneralKind
from .models.sources import resolve_path
from .rundir import RunDir
from .search.driver import scored_methods
from .search.final import final_config
from .search.outcome import RungDone, read_done
from .search.seeds import most_seeds_of_search
from .search.stopping import affordable_candidates, candidate_tokens

GENERAL_TOKENS = 100
"""Length of a general prompt (61 to 129 with the tokenizer of SmolLM2)."""
BYTES_A_TOKEN, PACKED = 5, 8
"""English text in bytes a token, and how much smaller gzip makes repetitive prompts (the shipped ones: 5.3 and 8.6)."""
TRAINING_COST = 4
"""Forwards that a token of distillation costs, the teacher's included."""


@dataclass(frozen=True)
class SearchDone:
    """What earlier calls have evaluated at each length, the random control included, and the seconds that they searched."""

    rungs: tuple[RungDone, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class PlannedRung:
    """The head maps that are trained so long, the random control included. wanted: without the limit on tokens."""

    tokens: int
    wanted: int
    count: int
    done: int = 0

    @property
    def left(self) -> int:
        """Head maps still to evaluate."""
        return max(0, self.count - self.done)


def search_done(config: RunConfig, run_dir: RunDir, shape: ModelShape) -> SearchDone:
    """What the studies of a run hold, nothing where it has none yet. Raises EnvironmentFault where they are damaged."""
    if not (run_dir / "study.db").exists() and config.search.storage is None:
        return SearchDone()
    # A database of the user's own is not asked before this run has got as far as its search.
    if run_dir.stage("scores") is None:
        return SearchDone()
    rungs, seconds = read_done(config, run_dir, shape)
    return SearchDone(tuple(rungs), seconds)


def planned_rungs(config: RunConfig, done: SearchDone = SearchDone()) -> list[PlannedRung]:
    """How many head maps each length will have, as far as that is known beforehand: search.patience may end it earlier."""
    search, groups = config.search, 2 if config.search.random_control else 1
    found: list[PlannedRung] = []
    spent = 0
    for rung, tokens in enumerate(search.lengths):
        if not rung:
            wanted = search.trials * groups
        elif search.is_final(rung):
            wanted = min(found[-1].count, (1 + groups) * search.final.max_points)
        else:
            wanted = min(found[-1].count, promoted_candidates(config, found[-1].count))
        bound = affordable_candidates(config, rung, spent, groups)
        count = wanted if bound is None else min(wanted, bound[0] * groups)
        spent += count * candidate_tokens(config, rung)
        there = done.rungs[rung].count if rung < len(done.rungs) else 0
        found.append(PlannedRung(tokens, wanted, max(count, there), there))
    return found


def promoted_candidates(config: RunConfig, before: int | None = None) -> int:
    """Candidates of a later rung: those that halving keeps of the rung before, or those on fronts.

    A third of the trials are on the fronts of search and seeds, a fifth of the random ones.
    """
    search = config.search
    if search.halving is not None:
        first = search.trials * (2 if search.random_control else 1)
        return max(1, math.ceil(search.halving.keep * (before or first)))
    most = search.max_promoted or search.trials
    control = min(search.trials // 5, most) if search.random_control else 0
    return max(1, min(search.trials // 3, 2 * most) + control)


def search_forwards(config: RunConfig, rungs: Sequence[PlannedRung]) -> float:
    """What is left to evaluate, search.retention included, in tokens of a forward."""
    final, total = final_config(config), float(_retention_tokens(config))
    for rung, planned in enumerate(rungs):
        measured = final if final is not None and config.search.is_final(rung) else config
        trained = TRAINING_COST * candidate_tokens(config, rung)
        total += planned.left * (evaluation_tokens(measured) + trained)
    return total


def seconds_left(config: RunConfig, done: SearchDone) -> float:
    """What search.max_minutes leaves of time."""
    minutes = config.search.max_minutes
    return math.inf if minutes is None else max(0.0, 60 * minutes - done.seconds)


def search_lines(config: RunConfig, rungs: Sequence[PlannedRung], done: SearchDone) -> list[str]:
    """Who proposes head maps and how many, where they are measured, and what ends it."""
    search = config.search
    control = ", and as many random ones" if search.random_control else ""
    seeds = min(search.trials, most_seeds_of_search(search, scored_methods(config)))
    workers = config.execution.workers if config.execution.executor == "ray" else 1
    tasks = ", ".join(config.harness.tasks)
    lines = [
        f"{search.trials} head maps, up to {seeds} of them seeds, the others {search.representation} by {search.sampler}{control}",
        f"{', '.join(_rung_text(config, rungs, number) for number in range(len(rungs)))}; "
        f"{workers} {config.execution.executor} worker(s)"
        + (f"; lm-eval's {tasks} not counted" if tasks else ""),
    ]
    if limits := _limits(config, done):
        lines.append(f"ends earlier after {', or '.join(limits)}")
    return lines


def _rung_text(config: RunConfig, rungs: Sequence[PlannedRung], number: int) -> str:
    """`131,072 tokens for about 60 (halving, 0.3 of them; 12 done)`."""
    search, rung = config.search, rungs[number]
    notes = []
    about = "" if not number or search.is_final(number) else "about "
    who = f"{about}{rung.count}"
    if rung.count < rung.wanted:
        notes.append(f"search.max_tokens, of {rung.wanted}")
    if number and not search.is_final(number):
        kept = "the fronts" if search.halving is None else f"halving, keep {search.halving.keep:g}"
        notes.append(kept)
    if rung.done:
        notes.append(f"{rung.done} done")
    length = f"{rung.tokens:,} tokens" if rung.tokens else "untrained"
    stage = "final stage: " if search.is_final(number) else ""
    return f"{stage}{length} for {who}" + (f" ({'; '.join(notes)})" if notes else "")


def _limits(config: RunConfig, done: SearchDone) -> list[str]:
    search, found = config.search, list[str]()
    if search.max_minutes is not None:
        used = f" ({done.seconds / 60:.1f} are over)" if done.seconds else ""
        found.append(f"{search.max_minutes:g} minutes{used}")
    if search.max_tokens is not None:
        spent = sum(rung.tokens for rung in done.rungs)
        used = f" ({spent:,} are spent)" if spent else ""
        found.append(f"{search.max_tokens:,} tokens of distillation{used}")
    if search.patience is not None:
        above = f" above {search.min_gain:g}" if search.min_gain else ""
        found.append(f"{search.patience} head maps without a gain in hypervolume{above}")
    return found


def evaluation_tokens(config: RunConfig) -> int:
    """Tokens of one candidate's evaluation: held-out text and prompts."""
    data, probes = config.data, config.probes
    general = len(set(probes.kinds) & set(get_args(GeneralKind)))
    haystacks = len(probes.kinds) - general + len(probes.unseen)
    prompts = probes.prompts * (haystacks * sum(probes.contexts) + general * GENERAL_TOKENS)
    prompts += sum(_file_tokens(file.path) for file in probes.files)
    heldout = sum(count for _, count in data.heldout_texts)
    return heldout * data.sequence_length + prompts


def _file_tokens(source: str) -> int:
    """About how many tokens a file of prompts has, from its size; 0 where it cannot be read."""
    try:
        path = resolve_path(source)
        packed = PACKED if path.suffix == ".gz" else 1
        return path.stat().st_size * packed // BYTES_A_TOKEN
    except (ArchsearchError, OSError):
        return 0


def _retention_tokens(config: RunConfig) -> int:
    """What search.retention costs, in tokens of a forward: the teacher, up to two found maps, and baselines to train."""
    options, proxies = config.search.retention, config.search.proxy_tokens
    if not options.prompts:
        return 0
    baselines = len(options.methods) + (
        options.random_maps - 1 if "random" in options.methods else 0
    )
    asked = options.prompts * len(options.kinds) * sum(config.probes.contexts)
    return (3 + baselines) * asked + baselines * TRAINING_COST * max(proxies)
