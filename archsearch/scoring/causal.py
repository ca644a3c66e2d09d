"""The causal score: receiver effects, sender effects through the strongest receivers, and their composite.

Source: HydraHead (arXiv 2606.20097), section on head selection.

Legend: P pairs, L layers, H query heads, G KV heads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from itertools import cycle

from torch import Tensor

from ..data.niah import Probe
from ..headmap import Head
from ..progress import Progress
from .composite import Evidence, head_scores
from .head_scores import HeadScores
from .inputs import ScoreInputs, SubProbe
from .receivers import Effects, receiver_effects
from .senders import sender_effects

_LOG = logging.getLogger(__name__)


def causal(inputs: ScoreInputs) -> HeadScores:
    """Composite causal score of every head and KV group (scores.json).

    A group's receiver effects are of all its heads patched at once, its sender effects the largest of its heads'.
    inputs' pairs are usable ones, so that none is left out here for its gap; sub-probes without pairs only count.
    progress counts pairs: receivers', then senders' of every round that may come.
    """
    config = inputs.config
    total = len(inputs.pairs())
    rounds = config.sender_rounds if config.sender_pairs else 0
    steps = total + rounds * config.sender_pairs * len(inputs.capabilities)
    heads: dict[str, dict[str, Evidence]] = {}
    groups: dict[str, dict[str, Evidence]] = {}
    done = 0
    for name, probes in inputs.capabilities.items():
        pairs = [pair for probe in probes.values() for pair in probe.pairs]
        found = receiver_effects(
            inputs.teacher,
            pairs,
            decay=config.decay,
            min_gap=-math.inf,
            memory_bytes=inputs.memory_bytes,
            progress=_span(inputs.progress, done, len(pairs), steps),
        )
        done += len(pairs)
        later = _span(inputs.progress, done, rounds * config.sender_pairs, steps)
        send = _senders(inputs, probes, found, later) if rounds else {}
        done += rounds * config.sender_pairs
        heads[name], groups[name] = _evidence(inputs, probes, found, send)
    inputs.progress(steps, steps)
    return head_scores("causal", heads, groups, config.threshold, inputs.counts())


def receivers_of(effects_LH: Tensor, share: float, threshold: float) -> frozenset[Head]:
    """The heads of the largest mean effect: at most a share of all (at least one head), all above threshold."""
    count = max(1, round(share * effects_LH.numel()))
    values, places = effects_LH.flatten().topk(count)
    width = effects_LH.shape[1]
    return frozenset(
        (place // width, place % width)
        for value, place in zip(values.tolist(), places.tolist(), strict=True)
        if value > threshold
    )


def sender_rounds(
    inputs: ScoreInputs, pairs: list[Probe], first: frozenset[Head], progress: Progress
) -> tuple[Tensor, frozenset[Head], int]:
    """Path patching one step further back a round, until no round adds a receiver.

    Returns the last round's effects [P, L, H], its receivers, and how many rounds it took. A round's strongest
    senders (by receivers_of) are receivers of the next.
    """
    config, receivers = inputs.config, first
    for number in range(1, config.sender_rounds + 1):
        effects_PLH = sender_effects(
            inputs.teacher,
            pairs,
            receivers,
            decay=config.decay,
            min_gap=-math.inf,
            memory_bytes=inputs.memory_bytes,
            progress=_span(progress, 100 * (number - 1), 100, 100 * config.sender_rounds),
        )
        mean_LH = effects_PLH.mean(0)
        more = receivers | receivers_of(mean_LH, config.receiver_share, config.threshold)
        if more == receivers:
            break
        if number < config.sender_rounds:
            receivers = more
    return effects_PLH, receivers, number


def _senders(
    inputs: ScoreInputs, probes: Mapping[str, SubProbe], found: Effects, progress: Progress
) -> dict[str, Tensor]:
    """Sender effects by sub-probe, on the first pairs of each by turns."""
    config = inputs.config
    chosen = _by_turns(probes, config.sender_pairs)
    first = receivers_of(found.heads_PLH.mean(0), config.receiver_share, config.threshold)
    if not first or not chosen:
        _LOG.warning("scores: no head's receiver effect is above scoring.threshold: no senders")
        return {}
    pairs = [pair for _, pair in chosen]
    effects_PLH, receivers, number = sender_rounds(inputs, pairs, first, progress)
    _LOG.info("scores: %d receivers after %d rounds of path patching", len(receivers), number)
    names = [name for name, _ in chosen]
    return {
        name: effects_PLH[[i for i, other in enumerate(names) if other == name]]
        for name in dict.fromkeys(names)
    }


def _by_turns(probes: Mapping[str, SubProbe], count: int) -> list[tuple[str, Probe]]:
    """The first pair of each sub-probe, then the second of each ..., count in all."""
    chosen: list[tuple[str, Probe]] = []
    queues = {name: list(probe.pairs) for name, probe in probes.items()}
    for name in cycle(list(queues)):
        if len(chosen) == count or not any(queues.values()):
            return chosen
        if queues[name]:
            chosen.append((name, queues[name].pop(0)))
    return chosen


def _evidence(
    inputs: ScoreInputs, probes: Mapping[str, SubProbe], found: Effects, send: Mapping[str, Tensor]
) -> tuple[dict[str, Evidence], dict[str, Evidence]]:
    heads: dict[str, Evidence] = {}
    groups: dict[str, Evidence] = {}
    sizes = [len(probe.pairs) for probe in probes.values()]
    for name, recv_PLH, whole_PLG in zip(
        probes, found.heads_PLH.split(sizes), found.groups_PLG.split(sizes), strict=True
    ):
        if not len(recv_PLH):
            continue
        send_PLH = send.get(name)
        num_groups = inputs.teacher.shape.num_kv_heads
        grouped = None if send_PLH is None else send_PLH.unflatten(-1, (num_groups, -1)).amax(-1)
        heads[name] = Evidence(recv_PLH, send_PLH)
        groups[name] = Evidence(whole_PLG, grouped)
    return heads, groups


def _span(progress: Progress, start: int, size: int, total: int) -> Progress:
    """Progress of a part that takes steps start to start + size of total, whatever it counts itself."""
    return lambda done, whole: progress(start + size * done // whole, total)
