"""A student in training: its terms, layers computed twice, packed documents, bf16 weights on fp32 masters."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from archsearch.attention.modeling_hydrahead import HydraHeadForCausalLM, set_rope_share
from archsearch.config import DistillConfig
from archsearch.data.corpora import PackedBatch, end_of_text
from archsearch.headmap import HeadMap
from archsearch.models.cut import cut
from archsearch.models.teacher import Teacher
from archsearch.training.distill import distill
from archsearch.training.packing import document_bounds, document_starts
from archsearch.training.replay import Replay
from archsearch.training.student import (
    LossWeights,
    StudentLoss,
    computed_twice,
    in_training,
    trainable_parameters,
)
from archsearch.training.teacher_logits import FORMS, TeacherLogits
from tests.random_models import random_supernet, random_teacher, random_tokens
from tests.training.conftest import random_batches
from tests.training.test_replay import Tape

END = 7


def student_of(teacher: Teacher) -> HydraHeadForCausalLM:
    rows = ("FGGG", "GGFG", "GGGG")[: teacher.shape.num_layers]
    return cut(teacher, random_supernet(teacher), HeadMap(teacher.shape, rows), copy=True)


def gradients_of(
    student: HydraHeadForCausalLM, loss: StudentLoss, ids: Tensor, *, again: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one batch; the student's gradients are cleared."""
    with computed_twice(student, again):
        value = float(loss(ids))
    found = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    for parameter in student.parameters():
        parameter.grad = None
    return value, found


def expected_of(
    student: HydraHeadForCausalLM, teacher: Teacher, ids: Tensor, weights: LossWeights
) -> tuple[float, dict[str, Tensor]]:
    """The same by autograd over whole logits."""
    theirs = teacher.model.model(input_ids=ids).last_hidden_state
    ours = student.model(input_ids=ids).last_hidden_state
    log_p = teacher.model.lm_head(theirs).log_softmax(-1).flatten(0, 1)
    log_q = student.lm_head(ours).log_softmax(-1)
    kl = F.kl_div(log_q.flatten(0, 1), log_p, log_target=True, reduction="batchmean")
    ce = F.nll_loss(log_q[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    error = (ours - theirs).square().sum() / theirs.square().sum()
    loss = weights.kl * kl + weights.ce * ce + weights.hidden * error
    loss.backward()
    found = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    for parameter in student.parameters():
        parameter.grad = None
    return float(loss.detach()), found


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.5, 0.3, 2.0)])
@pytest.mark.parametrize("tied", [True, False])
def test_terms_and_gradients_of_all_parameters(
    weights: tuple[float, float, float], tied: bool
) -> None:
    teacher = random_teacher("qwen3", num_layers=2, tied=tied)
    student = student_of(teacher)
    ids = random_tokens(3, 20)
    wanted = LossWeights(*weights)
    loss = StudentLoss(student, TeacherLogits(teacher, DistillConfig()), wanted)
    value, found = gradients_of(student, loss, ids)
    expected, gradients = expected_of(student, teacher, ids, wanted)
    assert value == pytest.approx(expected, rel=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("trainable", ["attention", "all"])
def test_layers_computed_twice_give_the_same_gradients(teacher: Teacher, trainable: str) -> None:
    student = student_of(teacher)
    calls = []
    for layer in student.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    with in_training(student, trainable):
        loss = StudentLoss(
            student, TeacherLogits(teacher, DistillConfig()), LossWeights(kl=1.0, ce=0.1)
        )
        ids = random_tokens(2, 30)
        once, plain = gradients_of(student, loss, ids)
        assert len(calls) == 2
        twice, again = gradients_of(student, loss, ids, again=True)
        assert len(calls) == 6
    assert once == twice
    assert plain.keys() == again.keys() == trainable_parameters(student, trainable).keys()
    for name, gradient in plain.items():
        assert torch.equal(again[name], gradient), name


def test_layers_are_left_as_they_were(teacher: Teacher) -> None:
    student = student_of(teacher)
    before = student(input_ids=random_tokens(1, 9)).logits
    with computed_twice(student), torch.no_grad():
        assert torch.equal(student(input_ids=random_tokens(1, 9)).logits, before)
    assert all("forward" not in vars(layer) for layer in student.model.layers)


def test_packed_documents_train_as_each_alone(teacher: Teacher) -> None:
    ids = random_tokens(2, 40, seed=3)
    ids[0, [4, 20, 39]] = END
    ids[1, 11] = END
    student, weights = student_of(teacher), LossWeights(kl=1.0, ce=0.5)
    logits = TeacherLogits(teacher, DistillConfig())
    packed = StudentLoss(student, logits, weights, end_token=END)
    value, found = gradients_of(student, packed, ids)
    bounds = document_bounds(document_starts(ids, END)).tolist()
    assert bounds == [0, 5, 21, 40, 52, 80]
    apart = StudentLoss(student, logits, LossWeights(kl=1.0))
    asked = StudentLoss(student, None, LossWeights(ce=1.0))
    total, sums = 0.0, dict.fromkeys(found, torch.zeros(()))
    labels = sum(end - start - 1 for start, end in pairwise(bounds))
    for start, end in pairwise(bounds):
        part = ids.flatten()[start:end][None]
        for loss, share in ((apart, (end - start) / 80), (asked, 0.5 * (end - start - 1) / labels)):
            one, gradients = gradients_of(student, loss, part)
            total += one * share
            sums = {name: sums[name] + gradients[name] * share for name in sums}
    assert value == pytest.approx(total, rel=1e-5)
    for name, gradient in sums.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_marked_documents_go_before_end_tokens(teacher: Teacher) -> None:
    ids = random_tokens(2, 30, seed=5)
    ids[:, 9] = END
    starts = document_starts(ids, END)
    student, logits = student_of(teacher), TeacherLogits(teacher, DistillConfig())
    ended = StudentLoss(student, logits, LossWeights(kl=1.0), end_token=END)
    marked = StudentLoss(student, logits, LossWeights(kl=1.0))
    assert float(marked(PackedBatch(ids, starts))) == float(ended(ids))
    other = starts.clone()
    other[:, 20] = True
    assert float(ended(PackedBatch(ids, other))) != float(ended(ids))
    for parameter in student.parameters():
        parameter.grad = None


@pytest.mark.parametrize("form", ["exact", *FORMS])
def test_a_replayed_step_is_the_step(teacher: Teacher, form: str) -> None:
    student, tape = student_of(teacher), Tape()
    logits = TeacherLogits(teacher, DistillConfig(teacher_logits=form))
    weights = LossWeights(kl=1.0, ce=0.2, hidden=0.5 if form in ("exact", "hidden") else 0.0)
    with in_training(student, "attention"):
        parameters = list(trainable_parameters(student, "attention").values())
        plain = StudentLoss(student, logits, weights)
        replayed = StudentLoss(student, logits, weights, replay=Replay(parameters, tape))
        for seed in range(6):
            ids = random_tokens(3, 20, seed=seed)
            value, wanted = gradients_of(student, plain, ids)
            found, gradients = gradients_of(student, replayed, ids)
            assert found == pytest.approx(value, rel=1e-6)
            for name, gradient in wanted.items():
                torch.testing.assert_close(gradients[name], gradient, msg=name)
        assert tape.recorded == 1
        # Another share of RoPE is another step.
        set_rope_share(student, 0.5)
        ids = random_tokens(3, 20, seed=9)
        value = gradients_of(student, plain, ids)[0]
        assert gradients_of(student, replayed, ids)[0] == pytest.approx(value, rel=1e-6)


def test_half_precision_weights_learn_as_full_ones(teacher: Teacher) -> None:
    config = DistillConfig(learning_rate=2e-3, batch_tokens=384)
    half = replace(teacher, model=in_half(teacher))
    losses, students = {}, {}
    for name, owner in (("full", teacher), ("half", half), ("mixed", half)):
        student = student_of(owner)
        if name == "mixed":
            for parameter in trainable_parameters(student, "attention").values():
                parameter.data = parameter.data.float()
        before = {k: v.clone() for k, v in student.state_dict().items()}
        result = distill(student, owner, random_batches, tokens=20 * 384, config=config)
        losses[name], students[name] = result, student
        assert all(v.dtype == before[k].dtype for k, v in student.state_dict().items())
    assert next(students["half"].parameters()).dtype == torch.bfloat16
    gain = losses["full"].first_loss - losses["full"].last_loss
    for name in ("half", "mixed"):
        found = losses[name]
        assert found.first_loss == pytest.approx(losses["full"].first_loss, rel=0.05)
        assert found.last_loss == pytest.approx(losses["full"].last_loss, abs=0.25 * gain)


def in_half(teacher: Teacher) -> HydraHeadForCausalLM:
    """The teacher's model in bf16."""
    return deepcopy(teacher.model).to(torch.bfloat16)


def test_documents_end_at_eos_or_else_at_bos(teacher: Teacher) -> None:
    assert end_of_text(teacher.tokenizer) == teacher.tokenizer.eos_token_id
