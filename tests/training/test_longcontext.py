"""Long-context tuning: its own length, rate and loss, on the loop that everything is trained by."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from archsearch.attention.modeling_hydrahead import HydraHeadForCausalLM
from archsearch.config import LongContextConfig
from archsearch.headmap import HeadMap, Operator
from archsearch.models.cut import cut
from archsearch.models.teacher import Teacher
from archsearch.training.longcontext import tune_long_context
from archsearch.training.loop import NonFiniteLoss
from tests.random_models import random_supernet
from tests.training.conftest import random_batches

CONFIG = LongContextConfig(
    tokens=12 * 192, sequence_length=96, batch_tokens=192, learning_rate=3e-3, warmup_steps=2
)
batches = partial(random_batches, sequences=2, length=96)


def student_of(teacher: Teacher) -> HydraHeadForCausalLM:
    everywhere = HeadMap.uniform(teacher.shape, Operator.GDN)
    return cut(teacher, random_supernet(teacher), everywhere, copy=True)


def same_batch(step: int) -> Iterator[Tensor]:
    while True:
        yield next(batches(0))


def losses_of(student: HydraHeadForCausalLM, teacher: Teacher) -> dict[str, float]:
    ids = next(batches(0))
    with torch.no_grad():
        log_p = teacher.model(input_ids=ids).logits.log_softmax(-1).flatten(0, 1)
        output = student(input_ids=ids, labels=ids)
    log_q = output.logits.log_softmax(-1).flatten(0, 1)
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    return {"next_token": float(output.loss), "kl": float(kl)}


@pytest.mark.parametrize("loss", ["next_token", "kl"])
@pytest.mark.parametrize("packed", [False, True])
def test_lowers_its_loss(teacher: Teacher, loss: str, packed: bool) -> None:
    student = student_of(teacher)
    before = losses_of(student, teacher)
    config = CONFIG.model_copy(update={"loss": loss, "packed": packed})
    result = tune_long_context(student, teacher, same_batch, config)
    assert (result.steps, result.tokens) == (12, 12 * 192)
    assert losses_of(student, teacher)[loss] < 0.95 * before[loss]
    if not packed:
        assert result.first_loss == pytest.approx(before[loss], rel=1e-4)
    assert not student.training
    assert not any(parameter.requires_grad for parameter in student.parameters())


@pytest.mark.parametrize("trainable", ["attention", "all"])
def test_trains_what_it_should(teacher: Teacher, trainable: str) -> None:
    student = student_of(teacher)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    config = CONFIG.model_copy(update={"trainable": trainable})
    tune_long_context(student, teacher, batches, config)
    moved = {name for name, value in student.state_dict().items() if not value.equal(before[name])}
    attention = {name for name in before if ".self_attn." in name}
    assert moved == (set(before) if trainable == "all" else attention)


def test_layers_computed_twice_change_nothing(teacher: Teacher) -> None:
    students = []
    for again in (True, False):
        student = student_of(teacher)
        config = CONFIG.model_copy(update={"checkpointing": again, "tokens": 3 * 192})
        tune_long_context(student, teacher, batches, config)
        students.append(student.state_dict())
    for name, value in students[0].items():
        assert torch.equal(students[1][name], value), name


def test_batches_of_another_length_are_refused(teacher: Teacher) -> None:
    with pytest.raises(ValueError, match="batches of 48 tokens a row"):
        tune_long_context(student_of(teacher), teacher, random_batches, CONFIG)


def test_nan_is_an_error(teacher: Teacher) -> None:
    student = student_of(teacher)
    with torch.no_grad():
        student.model.norm.weight[0] = torch.nan
    with pytest.raises(NonFiniteLoss):
        tune_long_context(student, teacher, batches, CONFIG)
