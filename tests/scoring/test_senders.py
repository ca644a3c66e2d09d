"""Path patching against two hooked forwards of the whole model a sender."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.config import TeacherConfig
from archsearch.data.niah import Probe
from archsearch.data.tasks import make_probes
from archsearch.headmap import Head
from archsearch.models.teacher import Teacher, load_teacher
from archsearch.scoring.causal import receivers_of
from archsearch.scoring.pairs import usable
from archsearch.scoring.receivers import receiver_effects
from archsearch.scoring.senders import sender_effects
from tests.random_models import random_probes, random_teacher
from tests.scoring.test_receivers import DECAY, Recorder, pair_ids, readout

Patch = Callable[[int, Tensor], Tensor]
"""From a layer and what its o_proj would read, [1, T, H * D], to what it reads instead."""


def run(teacher: Teacher, ids_1T: Tensor, patch: Patch) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, V], and what every o_proj read."""
    read: list[Tensor] = []
    handles = []
    for index, layer in enumerate(teacher.model.model.layers):

        def hook(_: Any, args: tuple[Tensor, ...], index: int = index) -> tuple[Tensor, ...]:
            read.append(patch(index, args[0]).clone())
            return (read[-1],)

        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(hook))
    logits_TV = teacher.model(input_ids=ids_1T, use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return logits_TV, read


def brute_force(teacher: Teacher, probe: Probe, receivers: frozenset[Head], sender: Head) -> float:
    """m(x) less m of the path patch, in logits: first the receivers' new outputs, then a run with those alone."""
    clean_1T, corrupt_1T = pair_ids(probe)
    clean, corrupt = Recorder(teacher, clean_1T), Recorder(teacher, corrupt_1T)
    dim = teacher.shape.head_dim

    def columns(head: int) -> slice:
        return slice(head * dim, (head + 1) * dim)

    def with_sender(layer: int, live: Tensor) -> Tensor:
        mixed = clean.inputs[layer].clone()
        for _, head in (place for place in receivers if place[0] == layer):
            mixed[..., columns(head)] = live[..., columns(head)]
        if layer == sender[0]:
            mixed[..., columns(sender[1])] = corrupt.inputs[layer][..., columns(sender[1])]
        return mixed

    _, read = run(teacher, clean_1T, with_sender)

    def with_receivers(layer: int, live: Tensor) -> Tensor:
        mixed = clean.inputs[layer].clone()
        for place in receivers - {sender}:
            if place[0] == layer:
                mixed[..., columns(place[1])] = read[layer][..., columns(place[1])]
        return mixed

    logits_TV, _ = run(teacher, clean_1T, with_receivers)
    return readout(clean.logits_TV, probe) - readout(logits_TV, probe)


def gap(teacher: Teacher, probe: Probe) -> float:
    clean, corrupt = (Recorder(teacher, ids_1T).logits_TV for ids_1T in pair_ids(probe))
    return readout(clean, probe) - readout(corrupt, probe)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "receivers",
    [
        frozenset({(3, 2)}),
        frozenset({(1, 0), (2, 1), (2, 0), (3, 3)}),
        frozenset({(1, 3), (2, 2)}),
    ],
    ids=["one", "chain", "middle"],
)
def test_equals_hooked_forwards(family: str, receivers: frozenset[Head]) -> None:
    teacher = random_teacher(family, num_layers=4)
    probes = random_probes(3, answer=2)
    found_PLH = sender_effects(teacher, probes, receivers, decay=DECAY, min_gap=-math.inf)
    largest = 0.0
    for found_LH, probe in zip(found_PLH, probes, strict=True):
        scale = gap(teacher, probe)
        for layer, head in teacher.shape.heads():
            expected = brute_force(teacher, probe, receivers, (layer, head))
            assert float(found_LH[layer, head]) * scale == pytest.approx(expected, abs=1e-4)
            largest = max(largest, abs(expected))
    assert largest > 0.05
    last = max(layer for layer, _ in receivers)
    assert not found_PLH[:, last:].any()


@pytest.fixture(scope="module")
def tiny() -> tuple[Teacher, list[Probe]]:
    """The shipped tiny teacher, and two short pairs that it answers."""
    teacher = load_teacher(TeacherConfig(source="package:archsearch/assets/tiny/teacher"))
    pairs = make_probes(teacher.tokenizer, "multikey", 2, 128, keys=4, digits=4, seed=5)
    assert all(usable(teacher, pairs, decay=DECAY, memory_bytes=1 << 28))
    return teacher, pairs


def test_equals_hooked_forwards_on_the_tiny_teacher(tiny: tuple[Teacher, list[Probe]]) -> None:
    teacher, pairs = tiny
    recv_LH = receiver_effects(teacher, pairs, decay=DECAY).heads_PLH.mean(0)
    receivers = receivers_of(recv_LH, 0.1, 0.01)
    assert len(receivers) >= 3
    found_PLH = sender_effects(teacher, pairs, receivers, decay=DECAY)
    for found_LH, pair in zip(found_PLH, pairs, strict=True):
        scale = gap(teacher, pair)
        for layer, head in teacher.shape.heads():
            expected = brute_force(teacher, pair, receivers, (layer, head)) / scale
            assert float(found_LH[layer, head]) == pytest.approx(expected, abs=1e-4)
    # A needle must be bound to its key before it can be found: some early head sends that to the late receivers.
    assert found_PLH.mean(0).max() > 0.2


def test_little_memory_changes_nothing() -> None:
    teacher = random_teacher("qwen3", num_layers=4)
    probes, receivers = random_probes(2), frozenset({(2, 1), (3, 0)})
    whole = sender_effects(teacher, probes, receivers, decay=DECAY, min_gap=-math.inf)
    small = sender_effects(
        teacher, probes, receivers, decay=DECAY, min_gap=-math.inf, memory_bytes=1
    )
    torch.testing.assert_close(small, whole, atol=1e-4, rtol=1e-4)


def test_pairs_that_the_model_does_not_use_are_nan() -> None:
    teacher = random_teacher()
    [probe] = random_probes(1)
    useless = Probe(
        probe.kind, probe.context, probe.prompt, probe.answer, probe.prompt, probe.distractor
    )
    effects_PLH = sender_effects(teacher, [useless], frozenset({(2, 0)}), decay=DECAY)
    assert effects_PLH.isnan().all()


def test_no_receivers_no_effects_and_progress_counts_layers() -> None:
    teacher, probes = random_teacher(), random_probes(2)
    none = sender_effects(teacher, probes, frozenset(), decay=DECAY, min_gap=-math.inf)
    assert not none.any()
    calls: list[tuple[int, int]] = []
    sender_effects(
        teacher,
        probes,
        frozenset({(2, 0)}),
        decay=DECAY,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for module in teacher.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_receivers_are_the_strongest_above_the_threshold() -> None:
    effects_LH = torch.tensor([[0.5, 0.0, 0.02], [0.005, 0.3, 0.4]])
    assert receivers_of(effects_LH, 0.5, 0.01) == {(0, 0), (1, 1), (1, 2)}
    assert receivers_of(effects_LH, 0.01, 0.01) == {(0, 0)}
    assert receivers_of(effects_LH, 1.0, 0.35) == {(0, 0), (1, 2)}
    assert receivers_of(effects_LH, 1.0, 0.6) == frozenset()
