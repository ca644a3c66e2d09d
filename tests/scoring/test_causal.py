"""The causal score end to end on random models: what it is made of, rounds of path patching, groups, counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.config import ScoringConfig
from archsearch.data.niah import Probe
from archsearch.headmap import Head
from archsearch.models.supernet import Supernet
from archsearch.scoring import causal as module
from archsearch.scoring.causal import causal, receivers_of, sender_rounds
from archsearch.scoring.inputs import ScoreInputs, SubProbe
from archsearch.scoring.receivers import receiver_effects
from archsearch.scoring.senders import sender_effects
from tests.random_models import random_probes, random_teacher, random_tokens

CONFIG = ScoringConfig(sender_pairs=4, receiver_share=0.2, threshold=0.02)


def no_supernet() -> Supernet:
    raise AssertionError("the causal score needs no supernet")


def inputs_of(
    capabilities: Mapping[str, Mapping[str, int]], config: ScoringConfig = CONFIG
) -> ScoreInputs:
    """ScoreInputs of random pairs on which the teacher prefers the answer more when clean."""
    teacher = random_teacher("qwen3", num_layers=4)
    pool = iter(usable_pairs(teacher, 20))
    probes = {
        name: {
            kind: SubProbe(tuple(next(pool) for _ in range(count)), 2 * count)
            for kind, count in kinds.items()
        }
        for name, kinds in capabilities.items()
    }
    return ScoreInputs(teacher, probes, random_tokens(1, 8), no_supernet, config, seed=0)


def usable_pairs(teacher: Any, count: int) -> list[Probe]:
    pairs = random_probes(6 * count)
    gaps = receiver_effects(teacher, pairs, decay=0.9, min_gap=0.2).heads_PLH.sum((1, 2))
    return [pair for pair, gap in zip(pairs, gaps.tolist(), strict=True) if math.isfinite(gap)][
        :count
    ]


def test_components_are_means_of_effects_on_the_pairs() -> None:
    inputs = inputs_of({"retrieval": {"single": 3, "multikey": 2}, "general": {"labels": 2}})
    scores = causal(inputs)
    assert set(scores.capabilities) == {"retrieval", "general"}
    found = scores.capabilities["retrieval"]
    means = [
        receiver_effects(inputs.teacher, probe.pairs, decay=0.9, min_gap=0.0).heads_PLH.mean(0)
        for probe in inputs.capabilities["retrieval"].values()
    ]
    torch.testing.assert_close(
        torch.tensor(found.recv), (means[0] + means[1]) / 2, atol=1e-4, rtol=1e-3
    )
    assert found.send is not None
    assert found.probes == {
        "single": {"kept": 3, "drawn": 6},
        "multikey": {"kept": 2, "drawn": 4},
    }
    assert len(scores.groups[0]) == inputs.teacher.shape.num_kv_heads
    assert min(map(min, scores.composite)) >= 0
    assert max(map(max, scores.composite)) <= 1


def test_senders_can_be_left_out() -> None:
    scores = causal(
        inputs_of({"retrieval": {"single": 2}}, CONFIG.model_copy(update={"sender_pairs": 0}))
    )
    assert scores.capabilities["retrieval"].send is None


def test_rounds_go_on_until_no_receiver_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of({"retrieval": {"single": 2}})
    asked: list[frozenset[Head]] = []

    def effects(*args: Any, **_: Any) -> Tensor:
        receivers = args[2]
        asked.append(receivers)
        found = torch.zeros(2, 4, 4)
        # Head (2, 0) sends to (3, 1), and (1, 3) to (2, 0).
        if (3, 1) in receivers:
            found[:, 2, 0] = 0.5
        if (2, 0) in receivers:
            found[:, 1, 3] = 0.3
        return found

    monkeypatch.setattr(module, "sender_effects", effects)
    last, receivers, rounds = sender_rounds(
        inputs, list(inputs.pairs()), frozenset({(3, 1)}), lambda *_: None
    )
    assert asked == [{(3, 1)}, {(3, 1), (2, 0)}, {(3, 1), (2, 0), (1, 3)}]
    assert receivers == {(3, 1), (2, 0), (1, 3)}
    assert rounds == 3
    assert float(last[0, 1, 3]) == pytest.approx(0.3)


def test_sender_effects_are_those_of_the_final_receivers() -> None:
    inputs = inputs_of({"retrieval": {"single": 4}})
    scores = causal(inputs)
    pairs = list(inputs.pairs())
    recv_LH = receiver_effects(inputs.teacher, pairs, decay=0.9, min_gap=0.0).heads_PLH.mean(0)
    first = receivers_of(recv_LH, CONFIG.receiver_share, CONFIG.threshold)
    _, receivers, _ = sender_rounds(inputs, pairs, first, lambda *_: None)
    expected = sender_effects(inputs.teacher, pairs, receivers, decay=0.9, min_gap=0.0).mean(0)
    send = scores.capabilities["retrieval"].send
    assert send is not None
    torch.testing.assert_close(torch.tensor(send), expected, atol=1e-4, rtol=1e-3)


def test_progress_ends_at_its_total() -> None:
    inputs = inputs_of({"retrieval": {"single": 2}, "general": {"labels": 3}})
    calls: list[tuple[int, int]] = []
    causal(
        ScoreInputs(
            inputs.teacher,
            inputs.capabilities,
            inputs.heldout_NT,
            inputs.supernet,
            inputs.config,
            0,
            lambda done, total: calls.append((done, total)),
        )
    )
    assert len({total for _, total in calls}) == 1
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1]
