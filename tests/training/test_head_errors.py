"""Errors by head over time, and the layers that an alignment has finished with."""

from __future__ import annotations

import json
import statistics

import pytest
import torch

from archsearch.config import SupernetConfig
from archsearch.training.head_errors import ROWS, STALL_ROWS, HeadErrors

SHAPE = (3, 2)
CPU = torch.device("cpu")


def head_errors(steps: int = ROWS, **settings: float) -> HeadErrors:
    return HeadErrors(SHAPE, steps, SupernetConfig(**settings), CPU)


def run(errors: HeadErrors, error_SLH: torch.Tensor, start: int = 0) -> None:
    """What an alignment does with errors: steps from start on, the layers at rest left out."""
    for step in range(start, len(error_SLH)):
        errors.before_step(step)
        errors.add(errors.active, error_SLH[step, errors.active])


def test_rows_are_means_over_the_steps_between() -> None:
    steps = 3 * ROWS + 1
    errors = head_errors(steps)
    error_SLH = torch.rand(steps, *SHAPE, generator=torch.Generator().manual_seed(0))
    run(errors, error_SLH)
    errors.before_step(steps)
    assert [row.step for row in errors.rows] == [*range(3, steps, 3), steps]
    for row in errors.rows[:-1]:
        wanted = error_SLH[row.step - 3 : row.step].mean(0)
        torch.testing.assert_close(torch.tensor(row.error_by_head), wanted)
    torch.testing.assert_close(torch.tensor(errors.rows[-1].error_by_head), error_SLH[-1])


def test_a_layer_below_the_bound_rests() -> None:
    errors = head_errors(stop_below=0.5)
    error_SLH = torch.full((ROWS, *SHAPE), 0.6)
    # Its mean falls below the bound in the fourth step, one head alone in the second.
    error_SLH[1:, 1, 0] = 0.45
    error_SLH[3:, 1, 1] = 0.5
    run(errors, error_SLH)
    assert errors.stopped == {1: 4}
    assert errors.active == [0, 2]
    assert errors.resting_sum == pytest.approx(0.475)
    # Its last error stays in every row.
    torch.testing.assert_close(
        torch.tensor(errors.rows[-1].error_by_head[1]), torch.tensor([0.45, 0.5])
    )


def test_a_layer_that_falls_no_more_rests() -> None:
    errors = head_errors(stop_gain=0.1)
    falling = 0.9 ** torch.arange(ROWS)
    error_SLH = falling[:, None, None].expand(ROWS, *SHAPE).clone()
    error_SLH[5:, 2] = error_SLH[5, 2]
    run(errors, error_SLH)
    # A row is compared with the one STALL_ROWS before it.
    assert errors.stopped == {2: 6 + STALL_ROWS}


def test_nothing_rests_unasked() -> None:
    errors = head_errors()
    run(errors, torch.zeros(ROWS, *SHAPE))
    assert errors.active == [0, 1, 2]


@pytest.mark.parametrize("stop", [4, 9, 10])
def test_restored_goes_on_as_if_never_interrupted(stop: int) -> None:
    steps = 2 * ROWS
    error_SLH = torch.rand(steps, *SHAPE, generator=torch.Generator().manual_seed(1))
    error_SLH[3:, 0] *= 0.1
    settings = {"stop_below": 0.2}
    whole, before, after = (head_errors(steps, **settings) for _ in range(3))
    run(whole, error_SLH)
    run(before, error_SLH[:stop])
    tensors, notes = before.save()
    after.restore(tensors, json.loads(json.dumps(notes)))
    run(after, error_SLH, start=stop)
    assert after.rows == whole.rows
    assert after.stopped == whole.stopped != {}


def test_line_and_history_name_heads_and_tokens() -> None:
    errors = head_errors(stop_below=0.2)
    error_SLH = torch.rand(ROWS, *SHAPE, generator=torch.Generator().manual_seed(2)) + 0.3
    error_SLH[-2:, 1, 1] = 7.123456
    error_SLH[-2:, 0] = 0.1
    run(errors, error_SLH)
    errors.before_step(ROWS)
    line = errors.line(step_tokens=1000)
    flat = error_SLH[-1].flatten().tolist()
    assert "at 20,000 tokens" in line
    assert f"median error {statistics.median(flat):.3f}" in line
    assert "1.1 7.12, " in line
    assert "layers at rest: 1" in line
    history = errors.history(step_tokens=1000)
    assert history["tokens"][0] == 1000
    assert history["error_by_head"][-1][1][1] == 7.123
    assert history["stopped_tokens"] == {"0": 19_000}
