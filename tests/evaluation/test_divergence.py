"""Divergence from the teacher: zero for itself, the textbook KL for others, in any chunking."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from torch.nn import functional as F

from archsearch.attention.modeling_hydrahead import HydraHeadForCausalLM
from archsearch.evaluation.divergence import LOGIT_BYTES, TeacherReference, divergence
from archsearch.models.teacher import Teacher
from tests.random_models import random_teacher, random_tokens


def textbook(
    teacher: Teacher, student: HydraHeadForCausalLM, tokens: torch.Tensor
) -> dict[str, float]:
    with torch.no_grad():
        log_p = teacher.model(input_ids=tokens).logits.double().log_softmax(-1)
        log_q = student(input_ids=tokens).logits.double().log_softmax(-1)
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="sum") / tokens.numel()
    agreement = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean()
    return {"kl": float(kl), "top1_agreement": float(agreement)}


def nudged(teacher: Teacher, *, only: str, scale: float = 0.05) -> HydraHeadForCausalLM:
    """A copy of the teacher whose parameters with `only` in their name moved a little."""
    student = deepcopy(teacher.model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if only in name:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return student


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_teacher_itself_diverges_by_zero(family: str) -> None:
    teacher = random_teacher(family)
    reference = TeacherReference(teacher, random_tokens(3, 21))
    found = divergence(teacher.model, reference)
    assert found == {"kl": pytest.approx(0, abs=1e-7), "top1_agreement": 1.0}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("only", ["self_attn", "lm_head", "embed_tokens", ""])
def test_equals_the_textbook_kl(only: str, tied: bool) -> None:
    teacher = random_teacher(tied=tied)
    tokens = random_tokens(3, 21)
    student = nudged(teacher, only=only)
    found = divergence(student, TeacherReference(teacher, tokens))
    expected = textbook(teacher, student, tokens)
    assert found["kl"] == pytest.approx(expected["kl"], abs=1e-6, rel=1e-5)
    assert found["top1_agreement"] == expected["top1_agreement"]


def test_a_tiny_divergence_survives_the_shortcut() -> None:
    teacher = random_teacher()
    tokens = random_tokens(4, 64)
    student = nudged(teacher, only="layers.2.self_attn.o_proj", scale=2e-3)
    expected = textbook(teacher, student, tokens)["kl"]
    assert 1e-6 < expected < 1e-4
    assert divergence(student, TeacherReference(teacher, tokens))["kl"] == pytest.approx(
        expected, rel=0.05
    )


@pytest.mark.parametrize("batch_tokens", [1, 45, 10**6])
def test_batches_and_chunks_change_nothing(
    batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = random_teacher()
    tokens = random_tokens(5, 20)
    student = nudged(teacher, only="self_attn")
    whole = divergence(student, TeacherReference(teacher, tokens))
    monkeypatch.setitem(LOGIT_BYTES, "cpu", 4 * 300 * 7)
    parts = divergence(student, TeacherReference(teacher, tokens, batch_tokens=batch_tokens))
    assert parts["kl"] == pytest.approx(whole["kl"], rel=1e-5)
    assert parts["top1_agreement"] == whole["top1_agreement"]


def test_a_broken_student_diverges_by_nan() -> None:
    teacher = random_teacher()
    student = nudged(teacher, only="layers.1.mlp.down_proj", scale=math.nan)
    assert math.isnan(divergence(student, TeacherReference(teacher, random_tokens(1, 8)))["kl"])


def test_student_keeps_its_mode() -> None:
    teacher = random_teacher()
    student = nudged(teacher, only="self_attn").train()
    divergence(student, TeacherReference(teacher, random_tokens(1, 8)))
    assert student.training


@pytest.mark.parametrize("shape", [(5,), (0, 5)])
def test_tokens_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not \\[N, T\\]"):
        TeacherReference(random_teacher(), torch.zeros(shape, dtype=torch.long))


def test_references_of_one_teacher_share_its_head() -> None:
    teacher = random_teacher()
    student = nudged(teacher, only="self_attn")
    one = TeacherReference(teacher, random_tokens(2, 21))
    weight_VC = one.weight_VC.clone()
    other = TeacherReference(teacher, random_tokens(2, 21, seed=1), weight_VC=weight_VC)
    assert other.weight_VC is weight_VC
    alone = TeacherReference(teacher, random_tokens(2, 21, seed=1))
    assert divergence(student, other) == divergence(student, alone)
