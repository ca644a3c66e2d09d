"""Single-replacement KL against the divergence of whole models cut with one twin."""

from __future__ import annotations

import pytest
import torch

from archsearch.evaluation.divergence import TeacherReference, divergence
from archsearch.headmap import HeadMap, Operator
from archsearch.models.cut import cut
from archsearch.scoring.replacement import replacement_kl
from tests.random_models import random_supernet, random_teacher, random_tokens


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("batch_tokens", [1, 100])
def test_equals_the_divergence_of_the_cut_model(family: str, batch_tokens: int) -> None:
    teacher = random_teacher(family)
    supernet = random_supernet(teacher)
    tokens_NT = random_tokens(2, 33)
    found_LH = replacement_kl(teacher, supernet, tokens_NT, batch_tokens=batch_tokens)
    reference = TeacherReference(teacher, tokens_NT)
    full = HeadMap.uniform(teacher.shape, Operator.FULL)
    expected_LH = torch.zeros_like(found_LH)
    for layer, head in teacher.shape.heads():
        student = cut(teacher, supernet, full.with_operator([(layer, head)], Operator.GDN))
        expected_LH[layer, head] = divergence(student, reference)["kl"]
    assert expected_LH.min() > 1e-4
    torch.testing.assert_close(found_LH, expected_LH, atol=1e-4, rtol=1e-4)


def test_a_bf16_teacher_ranks_heads_as_its_fp32_self_does() -> None:
    teacher = random_teacher()
    supernet = random_supernet(teacher)
    tokens_NT = random_tokens(2, 33)
    exact_LH = replacement_kl(teacher, supernet, tokens_NT)
    teacher.model.bfloat16()
    rough_LH = replacement_kl(teacher, supernet, tokens_NT)
    assert torch.corrcoef(torch.stack([exact_LH.flatten(), rough_LH.flatten()]))[0, 1] > 0.98


def test_progress_counts_heads_and_hooks_are_gone() -> None:
    teacher = random_teacher()
    calls: list[tuple[int, int]] = []
    replacement_kl(
        teacher,
        random_supernet(teacher),
        random_tokens(1, 8),
        lambda done, total: calls.append((done, total)),
    )
    total = teacher.shape.total_heads
    assert calls == [(done, total) for done in range(1, total + 1)]
    for module in teacher.model.modules():
        assert not module._forward_pre_hooks


def test_tokens_of_another_shape_are_refused() -> None:
    teacher = random_teacher()
    with pytest.raises(ValueError, match="not \\[N, T\\]"):
        replacement_kl(teacher, random_supernet(teacher), torch.zeros(5, dtype=torch.long))
