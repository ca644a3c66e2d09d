"""Copy scores against attention written out, and on a model made by hand."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.data.niah import Probe
from archsearch.models.teacher import Teacher
from archsearch.scoring.retrieval_heads import (
    copied_tokens,
    copy_scores,
    retrieval_heads,
    retrieval_pairs,
)
from tests.random_models import random_probes, random_teacher
from tests.scoring.handmade import attention_logits, copying_probe, copying_teacher, inputs_of


def crowded_probe(seed: int) -> tuple[Probe, range]:
    """A prompt that is mostly its value, of two different tokens, so that random heads copy some; and the value."""
    rng = random.Random(seed)
    filler = [rng.randrange(3) for _ in range(4)]
    value, distractor = ([rng.choice(pair) for _ in range(9)] for pair in ((3, 4), (5, 6)))
    prompts = [(*filler[:2], *tokens, *filler[2:]) for tokens in (value, distractor)]
    probe = Probe("single", 22, prompts[0], tuple(value), prompts[1], tuple(distractor))
    return probe, range(2, 11)


def written_out(teacher: Teacher, probe: Probe, needle: range) -> Tensor:
    """The copy score of every head by its definition, after a check that its attention is the model's."""
    ids = probe.prompt + probe.answer[:-1]
    layers, dim = teacher.model.model.layers, teacher.shape.head_dim
    read: list[Tensor] = []
    outputs: list[Tensor] = []

    def keep(block: Any, args: tuple[Any, ...]) -> None:
        (read if block in [layer.self_attn for layer in layers] else outputs).append(args[0][0])

    handles = [
        module.register_forward_pre_hook(keep)
        for layer in layers
        for module in (layer.self_attn, layer.self_attn.o_proj)
    ]
    teacher.model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    scores_LH = torch.zeros(teacher.shape.num_layers, teacher.shape.num_heads)
    for layer, head in teacher.shape.heads():
        logits_TT, v_TD = attention_logits(layers[layer].self_attn.full, read[layer], head)
        weights_TT = logits_TT.softmax(-1)
        output_TD = outputs[layer][:, head * dim : (head + 1) * dim]
        torch.testing.assert_close(weights_TT @ v_TD, output_TD, atol=1e-4, rtol=1e-4)
        for j, token in enumerate(probe.answer):
            top = int(weights_TT[len(probe.prompt) - 1 + j].argmax())
            scores_LH[layer, head] += (top in needle and ids[top] == token) / len(probe.answer)
    return scores_LH


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_scores_equal_the_definition(family: str) -> None:
    teacher = random_teacher(family, num_layers=2)
    total = 0.0
    for seed in range(2):
        probe, needle = crowded_probe(seed)
        expected_LH = written_out(teacher, probe, needle)
        torch.testing.assert_close(copy_scores(teacher, probe), expected_LH)
        total += float(expected_LH.sum())
    assert total > 1


def test_heads_made_to_copy_are_found() -> None:
    teacher = copying_teacher()
    assert copy_scores(teacher, copying_probe()).tolist() == [[1.0, 0.0, 0.5, 0.0]]
    teacher.model.bfloat16()
    assert copy_scores(teacher, copying_probe(at=7)).tolist() == [[1.0, 0.0, 0.5, 0.0]]


def keys_of(probe: Probe) -> list[list[int]]:
    """The key positions that give each answer token away."""
    return [row.nonzero().flatten().tolist() for row in copied_tokens(probe)]


def probe_of(clean: str, corrupt: str, answer: str, distractor: str) -> Probe:
    """A probe whose tokens are characters."""
    tokens = [tuple(map(ord, text)) for text in (clean, answer, corrupt, distractor)]
    return Probe("single", 0, *tokens)


def test_tokens_that_both_values_share_belong_to_the_needle() -> None:
    probe = probe_of("34..1234.12?", "34..5634.12?", "1234", "5634")
    assert keys_of(probe) == [[4], [5], [6], [7]]
    middle = probe_of("..1234.2?", "..1264.2?", "34", "64")
    assert keys_of(middle) == [[4], [5]]
    apart = probe_of("..1234..?", "..5238..?", "1234", "5238")
    assert keys_of(apart) == [[2], [3], [4], [5]]


def test_a_token_twice_in_the_needle_counts_at_both_places() -> None:
    assert keys_of(probe_of("7.717.", "7.828.", "717", "828")) == [[2, 4], [3], [2, 4]]


def test_an_answer_that_is_not_in_the_prompt_is_copied_from_nowhere() -> None:
    teacher = copying_teacher()
    clean = copying_probe()
    probe = Probe("labels", 60, clean.prompt, (40, 41), clean.corrupt_prompt, (42, 43))
    assert keys_of(probe) == [[], []]
    assert copy_scores(teacher, probe).eq(0).all()


def test_mean_spread_and_groups() -> None:
    teacher = random_teacher(num_layers=2)
    probes = [crowded_probe(seed)[0] for seed in range(3)]
    calls: list[tuple[int, int]] = []
    scores = retrieval_heads(
        inputs_of(
            teacher,
            {"retrieval": {"single": probes}},
            progress=lambda done, total: calls.append((done, total)),
        )
    )
    rows_PLH = torch.stack([copy_scores(teacher, probe) for probe in probes])
    for layer, head in teacher.shape.heads():
        values = rows_PLH[:, layer, head].tolist()
        assert scores.composite[layer][head] == pytest.approx(statistics.fmean(values))
        error = statistics.stdev(values) / math.sqrt(3)
        assert scores.spread[layer][head] == pytest.approx(error, abs=1e-9)
        group = head // 2
        assert scores.groups[layer][group] == max(
            scores.composite[layer][2 * group : 2 * group + 2]
        )
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_retrieval_pairs_come_first_then_the_users_then_all() -> None:
    teacher = random_teacher(num_layers=1)
    first, second, third = random_probes(3)
    groups = {"general": {"labels": [first]}, "user": {"pairs": [second]}}
    everything = inputs_of(teacher, {**groups, "retrieval": {"single": [third]}})
    assert list(retrieval_pairs(everything)) == [third]
    assert list(retrieval_pairs(inputs_of(teacher, groups))) == [second]
    del groups["user"]
    assert list(retrieval_pairs(inputs_of(teacher, groups))) == [first]
    with pytest.raises(ValueError, match="no pair"):
        retrieval_pairs(inputs_of(teacher, {}))


def test_hooks_are_gone_afterwards() -> None:
    teacher = random_teacher()
    copy_scores(teacher, random_probes(1)[0])
    for module in teacher.model.modules():
        assert not module._forward_pre_hooks
