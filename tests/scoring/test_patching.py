"""The position-local shortcut of receiver effects against patched forwards of the whole model."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.data.niah import Probe
from archsearch.headmap import Head
from archsearch.models.teacher import Teacher
from archsearch.scoring.patching import pair_ids, receiver_effects
from tests.random_models import random_probes, random_teacher

DECAY = 0.9


def readout(logits_TV: Tensor, probe: Probe) -> float:
    """m(x), term by term as it is written down."""
    first = len(probe.prompt) - 1
    total = norm = 0.0
    for j, (right, wrong) in enumerate(zip(probe.answer, probe.distractor, strict=True)):
        total += DECAY**j * float(logits_TV[first + j, right] - logits_TV[first + j, wrong])
        norm += DECAY**j
    return total / norm


class Recorder:
    """What o_proj of every layer reads and gives in one forward."""

    def __init__(self, teacher: Teacher, ids_1T: Tensor) -> None:
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

        def keep(_: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            self.inputs.append(args[0].clone())
            self.outputs.append(output.clone())

        layers = teacher.model.model.layers
        handles = [layer.self_attn.o_proj.register_forward_hook(keep) for layer in layers]
        self.logits_TV = teacher.model(input_ids=ids_1T, use_cache=False).logits[0]
        for handle in handles:
            handle.remove()


def patched_logits(
    teacher: Teacher, ids_1T: Tensor, clean: Recorder, corrupt: Recorder, where: Head
) -> Tensor:
    """A whole forward with one head's output from the corrupt run, later attention blocks frozen."""
    (layer, head), dim = where, teacher.shape.head_dim
    columns = slice(head * dim, (head + 1) * dim)

    def patch(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        mixed = args[0].clone()
        mixed[..., columns] = corrupt.inputs[layer][..., columns]
        return (mixed,)

    layers = teacher.model.model.layers
    handles = [layers[layer].self_attn.o_proj.register_forward_pre_hook(patch)]
    for later in range(layer + 1, len(layers)):
        frozen = clean.outputs[later]
        handles.append(
            layers[later].self_attn.o_proj.register_forward_hook(lambda *_, value=frozen: value)
        )
    logits_TV = teacher.model(input_ids=ids_1T, use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return logits_TV


def brute_force(teacher: Teacher, probe: Probe) -> Tensor | None:
    """IE_recv of every head, a whole forward a head; None where the gap is too small to divide by."""
    clean_1T, corrupt_1T = pair_ids(probe).split(1)
    clean, corrupt = Recorder(teacher, clean_1T), Recorder(teacher, corrupt_1T)
    m_clean, m_corrupt = readout(clean.logits_TV, probe), readout(corrupt.logits_TV, probe)
    if abs(m_clean - m_corrupt) < 0.2:
        return None
    shape = teacher.shape
    effects_LH = torch.zeros(shape.num_layers, shape.num_heads)
    for layer, head in shape.heads():
        logits_TV = patched_logits(teacher, clean_1T, clean, corrupt, (layer, head))
        effects_LH[layer, head] = (m_clean - readout(logits_TV, probe)) / (m_clean - m_corrupt)
    return effects_LH


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("answer", [1, 3])
def test_shortcut_equals_patched_forwards(family: str, answer: int) -> None:
    teacher = random_teacher(family)
    probes = random_probes(5, answer=answer)
    found_PLH = receiver_effects(teacher, probes, decay=DECAY, min_gap=-math.inf)
    assert found_PLH.shape == (5, teacher.shape.num_layers, teacher.shape.num_heads)
    compared = 0
    for found_LH, probe in zip(found_PLH, probes, strict=True):
        expected_LH = brute_force(teacher, probe)
        if expected_LH is not None:
            assert expected_LH.abs().amax() > 1e-2
            torch.testing.assert_close(found_LH, expected_LH, atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared >= 2


def test_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, probes = random_teacher(), random_probes(1)
    whole = receiver_effects(teacher, probes, decay=DECAY, min_gap=-math.inf)
    monkeypatch.setattr("archsearch.scoring.patching.MLP_ROWS", 7)
    chunked = receiver_effects(teacher, probes, decay=DECAY, min_gap=-math.inf)
    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)


def test_tail_of_a_bf16_teacher_does_not_lose_small_patches() -> None:
    teacher, probes = random_teacher(), random_probes(2)
    exact = receiver_effects(teacher, probes, decay=DECAY, min_gap=-math.inf)
    teacher.model.bfloat16()
    rough = receiver_effects(teacher, probes, decay=DECAY, min_gap=-math.inf)
    assert torch.corrcoef(torch.stack([exact.flatten(), rough.flatten()]))[0, 1] > 0.98


def test_pairs_that_the_model_does_not_use_are_nan(caplog: pytest.LogCaptureFixture) -> None:
    teacher = random_teacher()
    [probe] = random_probes(1)
    useless = Probe(
        probe.kind, probe.context, probe.prompt, probe.answer, probe.prompt, probe.distractor
    )
    with caplog.at_level(logging.WARNING):
        effects_PLH = receiver_effects(teacher, [useless], decay=DECAY)
    assert effects_PLH.isnan().all()
    assert "1 pairs" in caplog.text


def test_unequal_lengths_are_refused() -> None:
    [probe] = random_probes(1)
    longer = Probe(
        probe.kind, 0, probe.prompt, probe.answer, (*probe.corrupt_prompt, 1), probe.distractor
    )
    with pytest.raises(ValueError, match="one length"):
        receiver_effects(random_teacher(), [longer], decay=DECAY)


def test_hooks_are_gone_afterwards_and_progress_counts_pairs() -> None:
    teacher = random_teacher()
    calls: list[tuple[int, int]] = []
    receiver_effects(
        teacher,
        random_probes(2),
        decay=DECAY,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(1, 2), (2, 2)]
    for module in teacher.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
