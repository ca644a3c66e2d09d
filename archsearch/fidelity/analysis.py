"""What a study says: how well every cheaper proxy orders the maps as long training does. No torch.

A proxy is a metric at a shorter length, a predictor that needs no student, or a linear fit of such; all are turned so
that smaller is better. Shapes: N maps of a group, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from ..config import ObjectiveConfig
from ..metrics import is_loss, is_share
from .agreement import (
    Array,
    front_lost,
    interval,
    noise_deviation,
    regret,
    regret_rows,
    reliability,
    spearman,
    spearman_rows,
)
from .correction import LEAST_MAPS, held_out_predictions
from .predictors import FA_SHARE, sum_of
from .records import Agreement, Ceiling, Run, Study, Subject

COST = "cache_bytes"
LOSS = "training loss"
FIT = "linear fit"
FIT_PREDICTORS = (FA_SHARE, sum_of("replacement_kl"), sum_of("replacement_nll"))
"""Predictors that a fit reads, where they are there: more would be too many for some ten maps."""
ALL = "all"
LEAST_GROUP = 5
"""Fewest maps of a group that are worth a correlation."""
LEAST_REPEATS = 3
SAME_SHARE = 0.005
"""FA shares that differ by no more count as one."""
_SMALLEST = 1e-9
"""Nats below which a logarithm tells noise apart."""


@dataclass(frozen=True)
class Pair:
    """A map and its long run."""

    subject: Subject
    run: Run


@dataclass(frozen=True)
class MapGroup:
    """Maps that are compared with each other; level: all have the same FA share."""

    title: str
    pairs: tuple[Pair, ...]
    level: bool


@dataclass(frozen=True)
class Proxy:
    """A way to order maps before they are trained long: its values, smaller is better, and the tokens that it costs."""

    name: str
    tokens: int
    values: Callable[[Sequence[Pair]], Array | None]
    """One a map; None where these maps have not got it, or are too few."""


def analyse(study: Study, targets: Sequence[str]) -> Study:
    """The study with its agreements and ceilings; targets are the metrics of long training that count.

    A group that has too few finished maps is left out.
    """
    agreements: list[Agreement] = []
    ceilings: list[Ceiling] = []
    for target in targets:
        for group in groups_of(study, target):
            agreements += _agreements(study, target, group)
            ceilings += _ceiling(study, target, group)
    return replace(study, agreements=tuple(agreements), ceilings=tuple(ceilings))


def targets_of(
    objectives: Sequence[ObjectiveConfig], study: Study, more: Sequence[str] = ()
) -> list[str]:
    """The metrics of long training that count: the objectives that are no cost, KL, and more that are asked for."""
    names = [objective.metric for objective in objectives if has_direction(objective.metric)]
    known = next(iter(study.runs.values())).readings[0].metrics if study.runs else {}
    return [name for name in dict.fromkeys([*names, "kl", *more]) if name in known]


def groups_of(study: Study, target: str) -> list[MapGroup]:
    """All maps; the good ones; the better half of these by the target; other maps of one FA share where there are several."""
    pairs = tuple(Pair(s, run) for s in study.subjects if (run := study.of(s)) is not None)
    good = tuple(pair for pair in pairs if pair.subject.group == "good")
    found = [MapGroup(ALL, pairs, _is_level(pairs))]
    if good:
        title = f"good, {good[0].subject.head_map.fa_share:.1%} FA"
        found.append(MapGroup(title, good, _is_level(good)))
        order = sorted(good, key=lambda pair: signed(target, pair.run.value(target, _end(study))))
        better = tuple(order[: (len(good) + 1) // 2])
        found.append(MapGroup(f"better half of {title}", better, _is_level(better)))
    others = [pair for pair in pairs if pair.subject.group != "good"]
    for share in sorted({pair.subject.head_map.fa_share for pair in others}):
        level = tuple(pair for pair in others if pair.subject.head_map.fa_share == share)
        found.append(MapGroup(f"others, {share:.1%} FA", level, True))
    return [group for group in found if len(group.pairs) >= LEAST_GROUP]


def proxies_of(study: Study, target: str) -> Iterator[Proxy]:
    """All ways to order maps by what costs less than a whole run."""
    lengths = study.settings.lengths
    runs = list(study.runs.values())
    metrics = [name for name in runs[0].readings[0].metrics if has_direction(name)]
    for name in metrics:
        yield Proxy(name, 0, _reading(name, 0))
    names = dict.fromkeys(name for s in study.subjects for name in s.predictors)
    for name in names:
        yield Proxy(name, 0, _predictor(name))
    yield Proxy(FIT, 0, _fit(target, 0, _end(study)))
    for tokens in lengths[1:-1]:
        yield Proxy(target, tokens, _reading(target, tokens))
        if target != "kl":
            yield Proxy("kl", tokens, _reading("kl", tokens))
        yield Proxy(LOSS, tokens, _loss(tokens))
        yield Proxy(FIT, tokens, _fit(target, tokens, _end(study)))


def signed(metric: str, value: float) -> float:
    """A metric as a loss: shares of agreement and of matches, where more is better, change their sign."""
    return -value if is_share(metric) else value


def _end(study: Study) -> int:
    return study.settings.tokens


def _agreements(study: Study, target: str, group: MapGroup) -> Iterator[Agreement]:
    pairs = group.pairs
    truth = np.array([signed(target, pair.run.value(target, _end(study))) for pair in pairs])
    costs = np.array([pair.run.value(COST, 0) for pair in pairs])
    for proxy in proxies_of(study, target):
        values = proxy.values(pairs)
        if values is None:
            continue
        row = Agreement(
            target,
            group.title,
            proxy.name,
            proxy.tokens,
            len(pairs),
            spearman(values, truth),
            interval(spearman_rows, values, truth),
        )
        if group.level:
            yield replace(
                row,
                regret=regret(values, truth),
                regret_range=interval(regret_rows, values, truth),
                regret_of_three=regret(values, truth, min(3, len(pairs))),
            )
        else:
            yield replace(row, front_lost=front_lost(values, truth, costs))


def _ceiling(study: Study, target: str, group: MapGroup) -> list[Ceiling]:
    """How far two seeds agree on a group; nothing where too few maps were trained twice."""
    end = _end(study)
    truth = [pair.run.value(target, end) for pair in group.pairs]
    twice = [
        (pair.run.value(target, end), again.value(target, end))
        for pair in group.pairs
        if (again := study.of(pair.subject, 1)) is not None
    ]
    if len(twice) < LEAST_REPEATS:
        return []
    first, second = zip(*twice, strict=True)
    return [
        Ceiling(
            target,
            group.title,
            len(twice),
            spearman(first, second),
            reliability(first, second, truth),
            noise_deviation(first, second),
        )
    ]


def _is_level(pairs: Sequence[Pair]) -> bool:
    shares = [pair.subject.head_map.fa_share for pair in pairs]
    return bool(shares) and max(shares) - min(shares) <= SAME_SHARE


def has_direction(metric: str) -> bool:
    """Whether smaller or larger is known to be better. FA share is a cost, and among the predictors."""
    return is_loss(metric) or (is_share(metric) and metric != "fa_share")


def _reading(metric: str, tokens: int) -> Callable[[Sequence[Pair]], Array | None]:
    def values(pairs: Sequence[Pair]) -> Array | None:
        return np.array([signed(metric, pair.run.value(metric, tokens)) for pair in pairs])

    return values


def _loss(tokens: int) -> Callable[[Sequence[Pair]], Array | None]:
    def values(pairs: Sequence[Pair]) -> Array | None:
        found = [loss for pair in pairs if (loss := _loss_at(pair.run, tokens)) is not None]
        return np.array(found) if len(found) == len(pairs) else None

    return values


def _loss_at(run: Run, tokens: int) -> float | None:
    return next(reading.loss for reading in run.readings if reading.tokens == tokens)


def _predictor(name: str) -> Callable[[Sequence[Pair]], Array | None]:
    def values(pairs: Sequence[Pair]) -> Array | None:
        found = [p.subject.predictors[name] for p in pairs if name in p.subject.predictors]
        return np.array(found) if len(found) == len(pairs) else None

    return values


def _fit(target: str, tokens: int, end: int) -> Callable[[Sequence[Pair]], Array | None]:
    """A linear fit of what is known after so many tokens to the long run's result, of each map by the others."""

    def values(pairs: Sequence[Pair]) -> Array | None:
        if len(pairs) < LEAST_MAPS:
            return None
        features = np.array([_features(pair, target, tokens) for pair in pairs])
        truth = np.array([_scaled(target, pair.run.value(target, end)) for pair in pairs])
        return held_out_predictions(features, truth)

    return values


def _features(pair: Pair, target: str, tokens: int) -> list[float]:
    """The few numbers that a fit starts from: divergences, the mean loss of answers and top-1 agreement without training, and
    FIT_PREDICTORS; after some tokens the target and the training loss too. Losses as logarithms."""
    start = pair.run.readings[0].metrics
    whole = {name: value for name, value in start.items() if "@" not in name}
    divergences = [n for n in whole if n == "kl" or n.startswith("kl_")]
    answers = [value for name, value in whole.items() if is_loss(name) and name not in divergences]
    found = [_scaled(name, whole[name]) for name in divergences]
    found += [math.log(max(_SMALLEST, fmean(answers)))] if answers else []
    known = pair.subject.predictors
    found += [whole["top1_agreement"], *(known[name] for name in FIT_PREDICTORS if name in known)]
    if tokens:
        loss = _loss_at(pair.run, tokens)
        found.append(_scaled(target, pair.run.value(target, tokens)))
        found += [] if loss is None else [math.log(max(_SMALLEST, loss))]
    return found


def _scaled(metric: str, value: float) -> float:
    """A metric as fits see it: losses by their logarithm."""
    return math.log(max(_SMALLEST, value)) if is_loss(metric) else signed(metric, value)
