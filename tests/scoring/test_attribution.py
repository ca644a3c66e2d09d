"""First-order estimates against slopes of patched forwards of the whole model, and what scores make of them."""

from __future__ import annotations

import logging
import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.data.niah import Probe
from archsearch.models.teacher import Teacher
from archsearch.scoring.attribution import attribution, attribution_effects
from tests.random_models import random_probes, random_teacher
from tests.scoring.handmade import inputs_of

DECAY = 0.9


def readout(logits_TV: Tensor, probe: Probe) -> float:
    """m(x), term by term as it is written down."""
    first = len(probe.prompt) - 1
    total = norm = 0.0
    for j, (right, wrong) in enumerate(zip(probe.answer, probe.distractor, strict=True)):
        total += DECAY**j * float(logits_TV[first + j, right] - logits_TV[first + j, wrong])
        norm += DECAY**j
    return total / norm


def run(teacher: Teacher, ids: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    """What o_proj of every layer reads, and the logits."""
    read: list[Tensor] = []
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: read.append(args[0]))
        for layer in teacher.model.model.layers
    ]
    logits_TV = teacher.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return read, logits_TV


def moved_readout(
    teacher: Teacher, probe: Probe, where: tuple[int, int], change_TD: Tensor
) -> float:
    """m of a whole clean forward in which change_TD is added to one head's output; all that follows reacts."""
    (layer, head), dim = where, teacher.shape.head_dim

    def move(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        moved = args[0].clone()
        moved[0, :, head * dim : (head + 1) * dim] += change_TD
        return (moved,)

    o_proj = teacher.model.model.layers[layer].self_attn.o_proj
    handle = o_proj.register_forward_pre_hook(move)
    logits_TV = run(teacher, probe.prompt + probe.answer[:-1])[1]
    handle.remove()
    return readout(logits_TV, probe)


def slopes(teacher: Teacher, probe: Probe, step: float = 1e-3) -> tuple[Tensor, float]:
    """Central differences along corrupt less clean outputs, over the gap, [L, H]; and the gap."""
    forced, shape, dim = probe.answer[:-1], teacher.shape, teacher.shape.head_dim
    clean, clean_TV = run(teacher, probe.prompt + forced)
    corrupt, corrupt_TV = run(teacher, probe.corrupt_prompt + forced)
    gap = readout(clean_TV, probe) - readout(corrupt_TV, probe)
    found_LH = torch.zeros(shape.num_layers, shape.num_heads)
    for layer, head in shape.heads():
        columns = slice(head * dim, (head + 1) * dim)
        change_TD = step * (corrupt[layer] - clean[layer])[0, :, columns]
        up, down = (moved_readout(teacher, probe, (layer, head), s * change_TD) for s in (1, -1))
        found_LH[layer, head] = -(up - down) / (2 * step) / gap
    return found_LH, gap


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_estimates_are_slopes_of_patched_forwards(family: str) -> None:
    teacher = random_teacher(family)
    teacher.model.double()
    probes = [*random_probes(5, answer=1), *random_probes(5, length=19, seed=2)]
    found_PLH = attribution_effects(teacher, probes, decay=DECAY, min_gap=-math.inf)
    compared = 0
    for found_LH, probe in zip(found_PLH, probes, strict=True):
        expected_LH, gap = slopes(teacher, probe)
        if abs(gap) > 0.1:
            assert expected_LH.abs().amax() > 1e-2
            torch.testing.assert_close(found_LH, expected_LH, atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared >= 3


def test_gradients_go_through_later_attention_and_earlier_positions() -> None:
    teacher, [probe] = random_teacher(num_layers=2), random_probes(1)
    [whole_LH] = attribution_effects(teacher, [probe], decay=DECAY, min_gap=-math.inf)
    for layer in teacher.model.model.layers[1:]:
        layer.self_attn.o_proj.weight.data.zero_()
    [cut_LH] = attribution_effects(teacher, [probe], decay=DECAY, min_gap=-math.inf)
    assert (cut_LH[1] == 0).all()
    assert not torch.allclose(whole_LH[0], cut_LH[0], atol=1e-2)


def test_batches_of_mixed_lengths_and_small_memory_change_nothing() -> None:
    teacher = random_teacher("qwen3")
    probes = [
        *random_probes(2, length=24, answer=3),
        *random_probes(2, length=17, answer=1, seed=1),
        *random_probes(1, length=24, answer=2, seed=2),
    ]
    together = attribution_effects(teacher, probes, decay=DECAY, min_gap=-math.inf)
    apart = attribution_effects(teacher, probes, decay=DECAY, min_gap=-math.inf, memory_bytes=1)
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)


def test_bf16_teacher_gives_about_the_same() -> None:
    teacher, probes = random_teacher(), random_probes(4)
    exact = attribution_effects(teacher, probes, decay=DECAY, min_gap=0.5)
    teacher.model.bfloat16()
    rough = attribution_effects(teacher, probes, decay=DECAY, min_gap=0.5)
    both = exact.isfinite() & rough.isfinite()
    assert both.any()
    assert torch.corrcoef(torch.stack([exact[both], rough[both]]))[0, 1] > 0.98


def test_the_teacher_is_left_as_it_was() -> None:
    teacher, calls = random_teacher(), []
    attribution_effects(
        teacher,
        random_probes(3),
        decay=DECAY,
        memory_bytes=1,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(1, 3), (2, 3), (3, 3)]
    for module in teacher.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for parameter in teacher.model.parameters():
        assert not parameter.requires_grad
        assert parameter.grad is None


def usable_probes(teacher: Teacher, count: int, seed: int) -> list[Probe]:
    probes = random_probes(8 * count, seed=seed)
    effects = attribution_effects(teacher, probes, decay=DECAY, min_gap=0.5)
    return [p for p, rows in zip(probes, effects, strict=True) if rows.isfinite().all()][:count]


def scaled(values: list[float]) -> list[float]:
    return [value / (max(values) - min(values)) for value in values]


def test_scores_are_means_over_capabilities_of_effects_over_their_range() -> None:
    teacher = random_teacher()
    pairs = {
        "retrieval": {
            "single": usable_probes(teacher, 3, 1),
            "multikey": usable_probes(teacher, 3, 2),
        },
        "general": {"labels": usable_probes(teacher, 2, 3)},
    }
    scores = attribution(inputs_of(teacher, pairs))
    heads, groups, variances = [], [], []
    places = list(teacher.shape.heads())
    for probes in pairs.values():
        effects = attribution_effects(
            teacher, [p for ps in probes.values() for p in ps], decay=DECAY
        )
        means = [statistics.fmean(effects[:, layer, head].tolist()) for layer, head in places]
        heads.append(scaled(means))
        by_group = [sum(means[i : i + 2]) for i in range(0, len(means), 2)]
        groups.append(scaled(by_group))
        if len(probes) == 1:
            errors = [
                statistics.stdev(effects[:, layer, head].tolist()) / math.sqrt(len(effects))
                for layer, head in places
            ]
            variances.append([(e / (max(means) - min(means))) ** 2 for e in errors])
    for index, (layer, head) in enumerate(places):
        expected = statistics.fmean(part[index] for part in heads)
        assert scores.composite[layer][head] == pytest.approx(expected, abs=1e-6)
        assert scores.spread[layer][head] >= math.sqrt(variances[0][index]) / 2 - 1e-9
    for index in range(len(places) // 2):
        expected = statistics.fmean(part[index] for part in groups)
        assert scores.groups[index // 2][index % 2] == pytest.approx(expected, abs=1e-6)
    assert scores.method == "attribution"
    assert scores.capabilities["general"].probes == {"labels": {"kept": 2, "drawn": 4}}


def test_consistency_is_the_share_of_sub_probes_above_the_threshold() -> None:
    teacher = random_teacher()
    probes = {name: usable_probes(teacher, 2, seed) for seed, name in enumerate(("a", "b"))}
    capability = attribution(inputs_of(teacher, {"user": probes})).capabilities["user"]
    means = [attribution_effects(teacher, pairs, decay=DECAY).mean(0) for pairs in probes.values()]
    above = torch.stack([mean_LH > 0.01 for mean_LH in means]).double().mean(0)
    assert capability.consistency == above.tolist()
    assert 0 < above.mean() < 1
    # It does not weigh: the score is the mean effect.
    assert capability.score == capability.recv


def test_negative_effects_count_in_a_group() -> None:
    teacher = random_teacher()
    probes = usable_probes(teacher, 2, 4)
    scores = attribution(inputs_of(teacher, {"user": {"pairs": probes}}))
    effects_LH = torch.tensor(scores.capabilities["user"].recv)
    sums_LG = effects_LH.unflatten(-1, (2, 2)).sum(-1)
    assert (effects_LH < 0).any()
    order = torch.tensor(scores.groups).flatten().argsort()
    assert order.equal(sums_LG.flatten().argsort())


def test_pairs_that_say_nothing_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    teacher = random_teacher()
    good = usable_probes(teacher, 2, 5)
    useless = [replace(probe, corrupt_prompt=probe.prompt) for probe in good]
    alone = attribution(inputs_of(teacher, {"retrieval": {"single": good}}))
    with caplog.at_level(logging.WARNING):
        mixed = attribution(
            inputs_of(
                teacher,
                {
                    "retrieval": {"single": [*good, useless[0]], "multikey": useless},
                    "general": {"labels": useless},
                },
            )
        )
    torch.testing.assert_close(
        torch.tensor(mixed.composite), torch.tensor(alone.composite), atol=1e-5, rtol=1e-5
    )
    assert "multikey" in caplog.text
    assert "labels" in caplog.text
    with pytest.raises(ValueError, match="no capability"):
        attribution(inputs_of(teacher, {"retrieval": {"single": useless}}))
