"""fp32 masters: an update is AdamW's with clipped gradients, rounding hides nothing, a group may rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from archsearch.training.loop import Plan, TrainingState, train
from archsearch.training.masters import BETAS, MasterOptimizer, Masters

SHAPES = ((3, 4), (5,), (2, 3, 2))


def parameters(seed: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [5 * torch.randn(s, generator=generator) for s in SHAPES]


def test_an_update_is_that_of_adamw_on_clipped_gradients() -> None:
    ours, theirs = parameters(0), parameters(0)
    optimizer = MasterOptimizer([Masters(ours)])
    adamw = torch.optim.AdamW(theirs, lr=0.0, betas=BETAS, weight_decay=0.0)
    for step in range(4):
        for group in (ours, theirs):
            for parameter, gradient in zip(group, gradients(step), strict=True):
                parameter.grad = gradient.clone()
        norms = optimizer.update(0.1 / (step + 1), 1.0)
        expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        adamw.param_groups[0]["lr"] = 0.1 / (step + 1)
        adamw.step()
        torch.testing.assert_close(norms[0], expected)
        assert all(parameter.grad is None for parameter in ours)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


def test_small_steps_of_half_precision_weights_add_up() -> None:
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = MasterOptimizer([Masters([weight])])
    for _ in range(40):
        weight.grad = torch.ones_like(weight)
        optimizer.update(1e-3, 1.0)
    # A step of 0.001 is less than half the distance between 1 and its neighbour below.
    torch.testing.assert_close(optimizer.groups[0].flat, torch.full((8,), 0.96), rtol=0, atol=1e-4)
    torch.testing.assert_close(weight, torch.full((8,), 0.96).bfloat16(), rtol=0, atol=0)


def test_a_parameter_without_a_gradient_counts_as_zero_and_a_group_without_any_rests() -> None:
    busy, idle = parameters(1), parameters(2)
    before = [parameter.detach().clone() for parameter in idle]
    optimizer = MasterOptimizer([Masters(busy), Masters(idle)])
    for group in (busy, idle):
        for parameter, gradient in zip(group, gradients(3), strict=True):
            parameter.grad = gradient
    optimizer.update(0.0, 1.0)
    busy[0].grad = gradients(4)[0]
    norms = optimizer.update(0.1, 1e9)
    assert norms.tolist() == [pytest.approx(float(gradients(4)[0].norm())), 0.0]
    assert [optimizer.updates(group) for group in optimizer.groups] == [2, 1]
    for parameter, value in zip(idle, before, strict=True):
        assert torch.equal(parameter, value)
    assert not torch.equal(busy[1], parameters(1)[1])


def test_values_that_somebody_else_sets_are_followed() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    masters = Masters([weight])
    masters.flat.data += 1e-4
    weight.data[1] = 3.0
    masters.take_values()
    assert masters.flat.tolist() == [pytest.approx(1.0001, abs=1e-6), 3.0]


def test_a_snapshot_goes_back_to_the_bit() -> None:
    ours = parameters(5, torch.bfloat16)
    state = TrainingState({str(i): p for i, p in enumerate(ours)})

    def loss_step(batch: Tensor) -> Tensor:
        loss = sum(((p - batch.mean()) ** 2).sum() for p in ours)
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss.detach().float()

    def batches(step: int):  # noqa: ANN202
        while True:
            yield torch.full((1, 1), float(step))
            step += 1

    plan = Plan(steps=12, learning_rate=0.01)
    train(state, plan, loss_step, batches, until=5)
    snapshot, ends = state.snapshot(), []
    for _ in range(2):
        train(state, plan, loss_step, batches)
        ends.append((state.optimizer.groups[0].flat.detach().clone(), list(state.losses)))
        state.restore(snapshot)
        assert state.step == 5
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    assert len(state.losses) == 5
