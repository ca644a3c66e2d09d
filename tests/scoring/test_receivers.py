"""The position-local shortcut of receiver effects against patched forwards of the whole model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.data.niah import Probe
from archsearch.models.teacher import Teacher
from archsearch.scoring.pairs import PairBatch, pair_batches
from archsearch.scoring.receivers import receiver_effects
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


def pair_ids(probe: Probe) -> tuple[Tensor, Tensor]:
    """Clean and corrupt row, [1, T] each."""
    forced = probe.answer[:-1]
    return torch.tensor([probe.prompt + forced]), torch.tensor([probe.corrupt_prompt + forced])


def patched_logits(
    teacher: Teacher,
    ids_1T: Tensor,
    clean: Recorder,
    corrupt: Recorder,
    layer: int,
    heads: slice,
) -> Tensor:
    """A whole forward with some heads' output from the corrupt run, later attention blocks frozen."""
    dim = teacher.shape.head_dim
    columns = slice(heads.start * dim, heads.stop * dim)

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


def brute_force(teacher: Teacher, probe: Probe, size: int = 1) -> Tensor | None:
    """IE_recv of every run of `size` heads, a whole forward each; None where the gap is too small to divide by."""
    clean_1T, corrupt_1T = pair_ids(probe)
    clean, corrupt = Recorder(teacher, clean_1T), Recorder(teacher, corrupt_1T)
    m_clean, m_corrupt = readout(clean.logits_TV, probe), readout(corrupt.logits_TV, probe)
    if abs(m_clean - m_corrupt) < 0.2:
        return None
    shape = teacher.shape
    effects_LX = torch.zeros(shape.num_layers, shape.num_heads // size)
    for layer in range(shape.num_layers):
        for index in range(shape.num_heads // size):
            heads = slice(index * size, (index + 1) * size)
            logits_TV = patched_logits(teacher, clean_1T, clean, corrupt, layer, heads)
            effects_LX[layer, index] = (m_clean - readout(logits_TV, probe)) / (m_clean - m_corrupt)
    return effects_LX


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("answer", [1, 3])
def test_shortcut_equals_patched_forwards(family: str, answer: int) -> None:
    teacher = random_teacher(family)
    probes = random_probes(5, answer=answer)
    found = receiver_effects(teacher, probes, decay=DECAY, min_gap=-math.inf)
    assert found.heads_PLH.shape == (5, teacher.shape.num_layers, teacher.shape.num_heads)
    compared = 0
    for index, probe in enumerate(probes):
        expected_LH, expected_LG = brute_force(teacher, probe), brute_force(teacher, probe, 2)
        if expected_LH is not None and expected_LG is not None:
            assert expected_LH.abs().amax() > 1e-2
            torch.testing.assert_close(found.heads_PLH[index], expected_LH, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.groups_PLG[index], expected_LG, atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared >= 2


def test_pairs_of_different_lengths_in_one_batch_equal_pairs_alone() -> None:
    teacher = random_teacher("qwen3")
    probes = [
        *random_probes(2, length=24, answer=3),
        *random_probes(2, length=37, answer=1, seed=1),
        *random_probes(1, length=18, answer=4, seed=2),
    ]
    together = receiver_effects(teacher, probes, decay=DECAY, min_gap=-math.inf)
    for index, probe in enumerate(probes):
        alone = receiver_effects(teacher, [probe], decay=DECAY, min_gap=-math.inf)
        # Where the gap is small, dividing by it makes rounding large.
        scale = 1e-4 * max(1.0, float(alone.heads_PLH.abs().amax()))
        torch.testing.assert_close(
            together.heads_PLH[index], alone.heads_PLH[0], atol=scale, rtol=1e-3
        )


def test_little_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, probes = random_teacher(), random_probes(3)
    whole = receiver_effects(teacher, probes, decay=DECAY, min_gap=-math.inf)
    monkeypatch.setattr("archsearch.scoring.streams.ROW_BYTES", 7 * 4 * (3 * 48 + 3 * 32))
    small = receiver_effects(teacher, probes, decay=DECAY, min_gap=-math.inf, memory_bytes=1)
    torch.testing.assert_close(small.heads_PLH, whole.heads_PLH, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(small.groups_PLG, whole.groups_PLG, atol=1e-4, rtol=1e-4)


def test_tail_of_a_bf16_teacher_does_not_lose_small_patches() -> None:
    teacher, probes = random_teacher(), random_probes(2)
    exact = receiver_effects(teacher, probes, decay=DECAY, min_gap=-math.inf).heads_PLH
    teacher.model.bfloat16()
    rough = receiver_effects(teacher, probes, decay=DECAY, min_gap=-math.inf).heads_PLH
    assert torch.corrcoef(torch.stack([exact.flatten(), rough.flatten()]))[0, 1] > 0.98


def test_pairs_that_the_model_does_not_use_are_nan() -> None:
    teacher = random_teacher()
    [probe] = random_probes(1)
    useless = Probe(
        probe.kind, probe.context, probe.prompt, probe.answer, probe.prompt, probe.distractor
    )
    effects = receiver_effects(teacher, [useless], decay=DECAY)
    assert effects.heads_PLH.isnan().all()
    assert effects.groups_PLG.isnan().all()


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
    assert calls == [(2, 2)]
    for module in teacher.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_readout_is_the_weighted_logit_difference() -> None:
    teacher, probes = random_teacher(), random_probes(3)
    batch = PairBatch.of(probes, DECAY, teacher.device)
    hidden = teacher.model.model(input_ids=batch.ids_2PT, use_cache=False).last_hidden_state
    hidden_2PAC = batch.at_answers(hidden).unflatten(0, (2, -1))
    m_2P = batch.readout(teacher.model, hidden_2PAC)
    for index, probe in enumerate(probes):
        for row, ids_1T in enumerate(pair_ids(probe)):
            logits_TV = teacher.model(input_ids=ids_1T, use_cache=False).logits[0]
            assert float(m_2P[row, index]) == pytest.approx(readout(logits_TV, probe), abs=1e-4)


def test_batches_hold_every_pair_once_within_their_bounds() -> None:
    probes = [probe for n in (30, 20, 25) for probe in random_probes(3, length=n)]
    batches = list(pair_batches(probes, 2, 120))
    assert sorted(index for batch in batches for index in batch) == list(range(9))
    assert all(len(batch) <= 2 for batch in batches)
    assert list(pair_batches(probes, 9, 1)) == [[i] for i in (3, 4, 5, 6, 7, 8, 0, 1, 2)]
