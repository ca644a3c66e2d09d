"""Distillation: it lowers KL, trains what it should and nothing else, and its gradients are right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from archsearch.attention.modeling_hydrahead import HydraHeadForCausalLM
from archsearch.config import DistillConfig
from archsearch.evaluation.divergence import TeacherReference, divergence
from archsearch.headmap import HeadMap, Operator
from archsearch.models.cut import cut
from archsearch.models.teacher import Teacher
from archsearch.training.distill import distill
from archsearch.training.loop import BatchSource, NonFiniteLoss
from tests.random_models import random_supernet, random_tokens

CONFIG = DistillConfig(learning_rate=2e-3, batch_tokens=384)


def student_of(teacher: Teacher) -> HydraHeadForCausalLM:
    head_map = HeadMap.uniform(teacher.shape, Operator.GDN).with_operator([(0, 1)], Operator.FULL)
    return cut(teacher, random_supernet(teacher), head_map, copy=True)


def test_lowers_kl_and_leaves_the_rest_alone(teacher: Teacher, batches: BatchSource) -> None:
    student, reference = (
        student_of(teacher),
        TeacherReference(teacher, random_tokens(4, 48, seed=9)),
    )
    before = divergence(student_of(teacher), reference)["kl"]
    frozen = {k: v.clone() for k, v in student.state_dict().items() if ".self_attn." not in k}
    teacher_weights = {k: v.clone() for k, v in teacher.model.state_dict().items()}
    result = distill(student, teacher, batches, tokens=30 * 384, config=CONFIG)
    assert divergence(student, reference)["kl"] < 0.9 * before
    assert (result.tokens, result.steps) == (30 * 384, 30)
    assert result.last_loss < result.first_loss
    for name, value in frozen.items():
        assert torch.equal(student.state_dict()[name], value), name
    for name, value in teacher_weights.items():
        assert torch.equal(teacher.model.state_dict()[name], value), name
    assert not student.training
    assert not any(parameter.requires_grad for parameter in student.parameters())


def test_all_trains_the_rest_too(teacher: Teacher, batches: BatchSource) -> None:
    student = student_of(teacher)
    before = student.model.embed_tokens.weight.clone()
    config = CONFIG.model_copy(update={"trainable": "all"})
    distill(student, teacher, batches, tokens=384, config=config)
    assert not torch.equal(student.model.embed_tokens.weight, before)


def test_same_inputs_same_student(teacher: Teacher, batches: BatchSource) -> None:
    first, second = student_of(teacher), student_of(teacher)
    for student in (first, second):
        distill(student, teacher, batches, tokens=5 * 384, config=CONFIG)
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


def test_start_step_skips_batches(teacher: Teacher, batches: BatchSource) -> None:
    seen: list[Tensor] = []

    def source(step: int) -> Iterator[Tensor]:
        for batch in batches(step):
            seen.append(batch)
            yield batch

    distill(student_of(teacher), teacher, source, tokens=384, config=CONFIG, start_step=7)
    assert torch.equal(seen[-1], next(batches(7)))


def test_nan_is_an_error(teacher: Teacher, batches: BatchSource) -> None:
    student = student_of(teacher)
    with torch.no_grad():
        student.model.layers[1].self_attn.gdn.gamma[0, 0] = torch.nan
    with pytest.raises(NonFiniteLoss):
        distill(student, teacher, batches, tokens=384, config=CONFIG)
