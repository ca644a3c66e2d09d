"""Learned gates: the mixture against attention written out, and what training makes of a model made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archsearch.models.teacher import Teacher
from archsearch.scoring.duo_gates import (
    LEAST_RECENT,
    LEAST_SINK,
    PENALTY,
    duo_gates,
    gated,
    learn_gates,
    rate_factor,
    streaming_mask,
)
from tests.random_models import random_probes, random_teacher
from tests.scoring.handmade import attention_logits, copying_probe, copying_teacher, inputs_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tokens", "sink", "recent"), [(9, 4, 16), (60, 4, 16), (1024, 16, 64)])
def test_streaming_attention_sees_first_and_latest_tokens(
    tokens: int, sink: int, recent: int
) -> None:
    seen_TT = streaming_mask(tokens, CPU)[0, 0]
    for query in {0, 1, tokens // 3, tokens - 1}:
        expected = {key for key in range(query + 1) if key < sink or key > query - recent}
        assert set(seen_TT[query].nonzero().flatten().tolist()) == expected


def written_out(teacher: Teacher, ids: tuple[int, ...], gates_LG: Tensor) -> Tensor:
    """Final normed hidden states [T, C] with every head's two branches computed one query at a time."""
    handles = []
    for layer, gate_G in zip(teacher.model.model.layers, gates_LG.tolist(), strict=True):
        outputs: list[Tensor] = []

        def mix(
            block: Any, args: tuple[Any, ...], gate_G: Any = gate_G, outputs: Any = outputs
        ) -> None:
            outputs.clear()
            for head in range(4):
                logits_TT, v_TD = attention_logits(block.full, args[0][0], head)
                full_TD, streamed_TD = (
                    logits.softmax(-1) @ v_TD for logits in (logits_TT, streamed(logits_TT))
                )
                gate = gate_G[head // 2]
                outputs.append(gate * full_TD + (1 - gate) * streamed_TD)

        def replace(_: Any, args: Any, outputs: Any = outputs) -> tuple[Tensor]:
            return (torch.cat(outputs, -1)[None],)

        handles.append(layer.self_attn.register_forward_pre_hook(mix))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(replace))
    hidden_1TC: Tensor = teacher.model.model(input_ids=torch.tensor([ids]), use_cache=False)[0]
    for handle in handles:
        handle.remove()
    return hidden_1TC[0]


def streamed(logits_TT: Tensor) -> Tensor:
    logits_TT = logits_TT.clone()
    for query in range(len(logits_TT)):
        for key in range(LEAST_SINK, max(LEAST_SINK, query - LEAST_RECENT + 1)):
            logits_TT[query, key] = float("-inf")
    return logits_TT


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gates_mix_full_and_streaming_attention(family: str) -> None:
    teacher = random_teacher(family, num_layers=2)
    [probe] = random_probes(1, length=30)
    gates_LG = torch.tensor([[1.0, 0.3], [0.0, 0.8]])
    with gated(teacher.model, gates_LG):
        found = teacher.model.model(input_ids=torch.tensor([probe.prompt]), use_cache=False)[0][0]
    expected_TC = written_out(teacher, probe.prompt, gates_LG)
    torch.testing.assert_close(found, expected_TC, atol=1e-4, rtol=1e-4)
    plain = teacher.model.model(input_ids=torch.tensor([probe.prompt]), use_cache=False)[0][0]
    assert not torch.allclose(found, plain, atol=1e-2)


def test_open_gates_change_nothing_even_in_bf16() -> None:
    teacher = random_teacher()
    teacher.model.bfloat16()
    ids_1T = torch.tensor([random_probes(1, length=40)[0].prompt])
    plain = teacher.model(input_ids=ids_1T, use_cache=False).logits
    with gated(teacher.model, torch.ones(3, 2)):
        assert teacher.model(input_ids=ids_1T, use_cache=False).logits.equal(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_of_a_group_that_copies_stays_and_the_other_falls(dtype: torch.dtype) -> None:
    teacher = copying_teacher()
    nn.Module.to(teacher.model, dtype)
    probes = [copying_probe(at=at) for at in (12, 21, 30)]
    learned = learn_gates(teacher, probes, steps=100)
    [[copying, idle]] = learned.gates_LG.tolist()
    assert copying > 0.8
    assert idle < 0.1
    (first_error, first_penalty), (last_error, last_penalty) = learned.losses[0], learned.losses[-1]
    assert first_error < 1e-3
    assert first_penalty == pytest.approx(PENALTY)
    assert last_error + last_penalty < 0.7 * (first_error + first_penalty)


def test_both_gates_fall_where_the_answer_is_among_the_latest_tokens() -> None:
    learned = learn_gates(copying_teacher(), [copying_probe(at=52)], steps=100)
    assert learned.gates_LG.max() < 0.1


def test_a_step_goes_down_the_gradient_of_the_written_loss() -> None:
    teacher, [probe] = random_teacher(num_layers=2), random_probes(1, length=40)
    learned = learn_gates(teacher, [probe], steps=2, memory_bytes=1)
    ids, last = probe.prompt + probe.answer[:-1], len(probe.answer)
    # Adam's first step is the learning rate times the sign of the gradient, which is the penalty's.
    after_one_LG = torch.full((2, 2), 1 - 0.02)
    with torch.no_grad():
        target_AC = teacher.model.model(input_ids=torch.tensor([ids]), use_cache=False)[0][
            0, -last:
        ]
        moved_AC = written_out(teacher, ids, after_one_LG)[-last:]
    error, penalty = learned.losses[1]
    assert error == pytest.approx(float((moved_AC - target_AC).square().mean()), rel=1e-2)
    assert penalty == pytest.approx(PENALTY * 0.98)


def test_recomputing_layers_changes_nothing() -> None:
    teacher, probes = random_teacher("qwen3"), random_probes(2, length=40)
    held = learn_gates(teacher, probes, steps=6)
    recomputed = learn_gates(teacher, probes, steps=6, memory_bytes=1)
    torch.testing.assert_close(held.gates_LG, recomputed.gates_LG, atol=1e-5, rtol=1e-5)


def test_scores_are_the_groups_gates_and_the_teacher_is_left_as_it_was() -> None:
    teacher, calls = random_teacher(), []
    probes = random_probes(3, length=40)
    inputs = inputs_of(
        teacher,
        {"retrieval": {"single": probes[:2]}, "general": {"labels": probes[2:]}},
        progress=lambda done, total: calls.append((done, total)),
        gate_steps=5,
    )
    scores = duo_gates(inputs)
    gates_LG = learn_gates(teacher, probes[:2], steps=5).gates_LG
    torch.testing.assert_close(torch.tensor(scores.groups), gates_LG)
    for heads, (first, second) in zip(scores.composite, scores.groups, strict=True):
        assert heads == [first, first, second, second]
    assert sum(map(sum, scores.spread)) == 0
    assert calls == [(step, 5) for step in range(1, 6)]
    for module in teacher.model.modules():
        assert not module._forward_hooks
    for parameter in teacher.model.parameters():
        assert not parameter.requires_grad
        assert parameter.grad is None


def test_the_rate_rises_holds_and_falls() -> None:
    factors = [rate_factor(step, 100) for step in range(100)]
    assert factors[0] == factors[-1] == 0.1
    assert factors[9] == 0.5
    assert all(factor == 1 for factor in factors[19:80])
    assert factors[90] == 0.5
    assert rate_factor(0, 1) == 1


def test_each_prompt_has_its_own_target() -> None:
    teacher, probes = random_teacher(), random_probes(3, length=40)
    for seed in range(4):
        assert learn_gates(teacher, probes, steps=1, seed=seed).losses[0][0] < 1e-6
