"""Distillation: it lowers KL, trains what it should and nothing else, and its gradients are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.attention.modeling_hydrahead import HydraHeadForCausalLM
from archsearch.config import DistillConfig
from archsearch.evaluation.divergence import TeacherReference, divergence
from archsearch.headmap import HeadMap, Operator
from archsearch.models.cut import cut
from archsearch.models.teacher import Teacher
from archsearch.training.distill import distill, plan_of
from archsearch.training.loop import BatchSource, NonFiniteLoss
from archsearch.training.teacher_logits import TeacherLogits
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


@pytest.mark.parametrize("form", ["exact", "hidden", "mean_row", "topk"])
def test_every_form_of_the_teacher_teaches_the_same(
    teacher: Teacher, batches: BatchSource, form: str
) -> None:
    result, reference = {}, TeacherReference(teacher, random_tokens(4, 48, seed=9))
    for name in ("exact", form):
        student = student_of(teacher)
        config = CONFIG.model_copy(update={"teacher_logits": name, "top_k": 300})
        logits = TeacherLogits(teacher, config)
        distill(student, teacher, batches, tokens=10 * 384, config=config, logits=logits)
        result[name] = divergence(student, reference)["kl"]
    assert result[form] == pytest.approx(result["exact"], rel=5e-3 if form == "topk" else 1e-4)
    if form == "hidden":
        assert result["hidden"] == result["exact"]


def test_the_rate_falls_over_the_last_share_and_the_fork_is_shown(
    teacher: Teacher, batches: BatchSource
) -> None:
    plan = plan_of(CONFIG.model_copy(update={"decay_share": 0.25}), 20)
    rates = [plan.rate(step) for step in range(20)]
    assert rates[2:15] == [CONFIG.learning_rate] * 13
    assert rates[14:] == sorted(rates[14:], reverse=True)
    assert rates[19] < 0.25 * CONFIG.learning_rate
    seen: dict[int, Tensor] = {}
    student = student_of(teacher)
    weight = student.model.layers[0].self_attn.o_proj.weight
    config = CONFIG.model_copy(update={"decay_share": 0.25})
    distill(
        student,
        teacher,
        batches,
        tokens=8 * 384,
        config=config,
        at_fork=lambda steps: seen.update({steps: weight.detach().clone()}),
    )
    assert list(seen) == [6]
    other = student_of(teacher)
    constant = CONFIG.model_copy(update={"decay_share": 0.0})
    distill(other, teacher, batches, tokens=6 * 384, config=constant)
    assert torch.equal(other.model.layers[0].self_attn.o_proj.weight, seen[6])


def test_steps_are_counted_on_from_an_earlier_distillation(
    teacher: Teacher, batches: BatchSource
) -> None:
    seen: list[tuple[int, int]] = []
    distill(
        student_of(teacher),
        teacher,
        batches,
        tokens=2 * 384,
        config=CONFIG,
        start_step=5,
        before_step=lambda step, steps: seen.append((step, steps)),
    )
    assert seen == [(5, 7), (6, 7), (7, 7)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kl_weight": 0.0}, "nothing to learn from"),
        ({"teacher_logits": "mean_row", "trainable": "all"}, "mean_row needs trainable: attention"),
        ({"teacher_logits": "topk", "hidden_weight": 1.0}, "hidden_weight needs teacher_logits"),
        ({"replay": True, "packed": True}, "replay goes with neither"),
        ({"replay": True, "checkpointing": True}, "replay goes with neither"),
    ],
)
def test_what_cannot_go_together_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DistillConfig(**fields)


def test_other_terms_need_no_teacher_or_add_to_it(teacher: Teacher, batches: BatchSource) -> None:
    losses = {}
    for name, fields in {
        "kl": {},
        "ce": {"kl_weight": 0.0, "ce_weight": 1.0},
        "all": {"ce_weight": 1.0, "hidden_weight": 3.0},
        "hidden": {"hidden_weight": 3.0},
    }.items():
        config = CONFIG.model_copy(update={"learning_rate": 1e-9, **fields})
        result = distill(student_of(teacher), teacher, batches, tokens=384, config=config)
        losses[name] = result.first_loss
    assert losses["all"] == pytest.approx(losses["ce"] + losses["hidden"], rel=1e-5)
    assert losses["hidden"] > losses["kl"] > 0
