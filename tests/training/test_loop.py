"""The training loop by itself: rates, clipping, when it saves, what it refuses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from archsearch.training.loop import LossStep, NonFiniteLoss, Plan, TrainingState, train


def linear_problem() -> tuple[nn.Parameter, LossStep]:
    """A parameter, and the LossStep that pulls it to the batch's mean."""
    parameter = nn.Parameter(torch.zeros(3))

    def loss_step(batch: Tensor) -> Tensor:
        loss = (parameter - batch.float().mean(0)).square().sum()
        loss.backward()
        return loss.detach()

    return parameter, loss_step


def ones(step: int) -> Iterator[Tensor]:
    return itertools.repeat(torch.ones(2, 3))


def test_rate_warms_up_and_ends_at_its_final_share() -> None:
    plan = Plan(steps=100, learning_rate=2.0, warmup_steps=10, final_share=0.1)
    rates = [plan.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[10] == pytest.approx(2.0)
    assert rates[-1] == pytest.approx(0.2, abs=1e-2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_warmup_takes_at_most_half_of_a_short_run() -> None:
    plan = Plan(steps=4, learning_rate=1.0, warmup_steps=50)
    assert plan.rate(1) == pytest.approx(1.0)
    assert Plan(steps=1, learning_rate=1.0, warmup_steps=50).rate(0) == pytest.approx(1.0)


def test_a_constant_rate_falls_at_the_end_alone_whatever_the_length() -> None:
    plans = [
        Plan(steps=steps, learning_rate=1.0, warmup_steps=4, final_share=0.1, decay_steps=3)
        for steps in (12, 40)
    ]
    for plan in plans:
        rates = [plan.rate(step) for step in range(plan.steps)]
        assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
        assert set(rates[4:-3]) == {1.0}
        assert 1 > rates[-3] > rates[-2] > rates[-1] > 0.1
    assert [plan.rate(step) for plan in plans for step in range(9)] == 2 * [
        plans[0].rate(step) for step in range(9)
    ]


def test_no_decay_and_a_later_start() -> None:
    plan = Plan(steps=30, learning_rate=1.0, warmup_steps=4, decay_steps=0, start=10)
    assert [plan.rate(step) for step in (10, 11, 13, 14, 29)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_hooks_come_before_each_step_and_after_the_last() -> None:
    parameter, loss_step = linear_problem()
    seen: list[tuple[int, int]] = []
    state = TrainingState({"w": parameter})
    plan = Plan(steps=3, learning_rate=0.1)
    train(state, plan, loss_step, ones, until=2, before_step=lambda *now: seen.append(now))
    assert seen == [(0, 3), (1, 3), (2, 3)]


def test_trains_and_logs_every_step_once() -> None:
    parameter, loss_step = linear_problem()
    state = TrainingState({"w": parameter})
    train(state, Plan(steps=120, learning_rate=0.05), loss_step, ones)
    assert state.step == 120
    assert state.losses[-1][0] == 120
    assert state.losses[-1][1] < 0.01 * state.losses[0][1]


def test_saves_when_due_and_not_otherwise() -> None:
    counts = []
    for seconds in (0.0, math.inf):
        parameter, loss_step = linear_problem()
        saved: list[int] = []
        train(
            TrainingState({"w": parameter}),
            Plan(steps=5, learning_rate=0.1),
            loss_step,
            ones,
            save=lambda state, saved=saved: saved.append(state.step),
            save_seconds=seconds,
        )
        counts.append(saved)
    assert counts == [[1, 2, 3, 4, 5], []]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_batch_is_an_error_before_it_is_saved(value: float) -> None:
    parameter, loss_step = linear_problem()
    saved: list[int] = []
    with pytest.raises(NonFiniteLoss, match=r"not finite between steps \d+ and \d+"):
        train(
            TrainingState({"w": parameter}),
            Plan(steps=1000, learning_rate=0.1),
            loss_step,
            lambda step: itertools.chain(
                itertools.islice(ones(0), 5), itertools.repeat(torch.full((2, 3), value))
            ),
            save=lambda state: saved.append(state.step),
            save_seconds=0.0,
        )
    assert saved == [1, 2, 3, 4, 5]


def test_groups_are_clipped_apart() -> None:
    quiet, loud = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def loss_step(batch: Tensor) -> Tensor:
        loss = 1e6 * loud.sum() + 0.5 * quiet.sum()
        loss.backward()
        return loss.detach()

    state = TrainingState({"quiet": quiet, "loud": loud}, [[quiet], [loud]])
    train(state, Plan(steps=1, learning_rate=0.1), loss_step, ones)
    gradients = [float(group.gradient) for group in state.optimizer.groups]
    assert gradients == [pytest.approx(0.5), pytest.approx(1.0, abs=1e-3)]


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter"):
        TrainingState({})
