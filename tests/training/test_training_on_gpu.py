"""Distillation on a CUDA device in bf16: products summed in fp32, gradients near those on the CPU, every form learns alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archsearch.attention.modeling_hydrahead import HydraHeadForCausalLM
from archsearch.config import DistillConfig, SupernetConfig
from archsearch.headmap import HeadMap
from archsearch.models.cut import cut
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import Teacher
from archsearch.training.align import align
from archsearch.training.distill import distill, student_loss
from archsearch.training.student import in_training
from archsearch.training.targets import HeadProducts
from archsearch.training.teacher_logits import FORMS
from tests.random_models import random_supernet, random_teacher, random_tokens
from tests.training import resuming
from tests.training.conftest import random_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = ("FGGG", "GGFG", "GGGG")
CONFIG = DistillConfig(learning_rate=2e-3, batch_tokens=384)


def on_gpu(teacher: Teacher) -> Teacher:
    device = torch.device("cuda")
    nn.Module.to(teacher.model, device, torch.bfloat16)
    return replace(teacher, device=device)


def student_of(teacher: Teacher) -> HydraHeadForCausalLM:
    supernet = random_supernet(random_teacher(head_dim=teacher.shape.head_dim))
    nn.Module.to(supernet, teacher.device)
    return cut(teacher, supernet, HeadMap(teacher.shape, ROWS), copy=True)


def gradients_of(teacher: Teacher, config: DistillConfig) -> tuple[float, Tensor]:
    student = student_of(teacher)
    with in_training(student, "attention", checkpointing=config.checkpointing) as state:
        value = float(student_loss(student, teacher, config)(random_tokens(8, 64)))
        (group,) = state.optimizer.groups
        group.take_gradients()
        return value, group.gradient.cpu()


def test_products_of_half_precision_are_summed_in_full() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(50, 96, generator=generator),
        torch.randn(300, 96, generator=generator),
    )
    half = HeadProducts(weight.bfloat16().cuda(), torch.bfloat16)
    found = half.logits(hidden.bfloat16().cuda())
    assert found.dtype == torch.float32
    expected = hidden.bfloat16().double() @ weight.bfloat16().double().T
    torch.testing.assert_close(found.cpu(), expected.float(), atol=1e-4, rtol=1e-5)
    p = torch.rand(50, 300, generator=generator)
    rows = half.expected_rows(p.cuda())
    expected = p.bfloat16().double() @ weight.bfloat16().double()
    torch.testing.assert_close(rows.cpu(), expected.float(), atol=1e-4, rtol=1e-5)
    outer = half.outer(p.cuda(), hidden.bfloat16().cuda())
    expected = p.bfloat16().double().T @ hidden.bfloat16().double()
    torch.testing.assert_close(outer.cpu(), expected.float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("form", ["exact", *FORMS])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_near_those_on_the_cpu(form: str, checkpointing: bool) -> None:
    config = DistillConfig(teacher_logits=form, top_k=300, checkpointing=checkpointing)
    exact, gradient = gradients_of(random_teacher(), DistillConfig())
    found, rough = gradients_of(on_gpu(random_teacher()), config)
    assert found == pytest.approx(exact, rel=0.05)
    assert float(torch.cosine_similarity(gradient, rough, dim=0)) > 0.97


@pytest.mark.parametrize("form", ["exact", *FORMS])
@pytest.mark.parametrize("packed", [False, True])
def test_every_form_learns(form: str, packed: bool) -> None:
    teacher = on_gpu(random_teacher())
    config = CONFIG.model_copy(update={"teacher_logits": form, "top_k": 300, "packed": packed})
    result = distill(student_of(teacher), teacher, random_batches, tokens=30 * 384, config=config)
    assert result.last_loss < 0.95 * result.first_loss


def kernel_teacher() -> Teacher:
    """On the GPU, with heads that every kernel takes."""
    return on_gpu(random_teacher(head_dim=64))


@pytest.mark.parametrize("form", ["exact", *FORMS])
@pytest.mark.parametrize("options", [{}, {"trainable": "all", "ce_weight": 0.1}])
def test_a_replayed_distillation_is_the_distillation(
    form: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if form == "mean_row" and options:
        pytest.skip("mean_row needs a head that is not trained")
    teacher, found = kernel_teacher(), []
    options = {"teacher_logits": form, "top_k": 300, **options}
    for replay in (False, True):
        config = CONFIG.model_copy(update={"replay": replay, **options})
        found.append(
            distill(student_of(teacher), teacher, random_batches, tokens=30 * 384, config=config)
        )
    assert "cannot be replayed" not in caplog.text
    assert found[1].first_loss == pytest.approx(found[0].first_loss, rel=1e-2)
    gain = found[0].first_loss - found[0].last_loss
    assert found[1].last_loss == pytest.approx(found[0].last_loss, abs=0.2 * gain)


def test_a_replayed_alignment_is_the_alignment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    teacher, errors = kernel_teacher(), []
    for replay in (False, True):
        config = SupernetConfig(tokens=40 * 384, learning_rate=2e-3, replay=replay)
        supernet = Supernet.migrated(teacher, config.gdn)
        align(
            teacher,
            supernet,
            random_batches,
            config,
            checkpoint=tmp_path / f"{replay}.safetensors",
            heldout_NT=random_tokens(4, 48),
        )
        errors.append(supernet.meta["metrics"]["error_by_head"])
    assert "cannot be replayed" not in caplog.text
    torch.testing.assert_close(*(torch.tensor(x) for x in errors), rtol=0.05, atol=0.01)


def test_recordings_of_students_do_not_pile_up() -> None:
    teacher, used = kernel_teacher(), []
    config = CONFIG.model_copy(update={"replay": True})
    for _ in range(6):
        distill(student_of(teacher), teacher, random_batches, tokens=6 * 384, config=config)
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_reserved())
    # The first ones compile, tune and make room for what libraries keep.
    assert used[-1] <= used[2]


def test_all_weights_and_all_terms_learn() -> None:
    teacher = on_gpu(random_teacher(tied=True))
    options = {"trainable": "all", "ce_weight": 0.1, "hidden_weight": 1.0}
    config = CONFIG.model_copy(update=options)
    result = distill(student_of(teacher), teacher, random_batches, tokens=30 * 384, config=config)
    assert result.last_loss < 0.95 * result.first_loss


@pytest.mark.parametrize("kind", [resuming.reads_student, resuming.aligns])
def test_a_resumed_run_is_as_near_to_a_whole_one_as_two_whole_ones_are(
    kind: Callable[[Teacher], resuming.Train], tmp_path: Path
) -> None:
    resuming.check_resumed_equals_whole(kind(kernel_teacher()), tmp_path, steps=(5, 10))
