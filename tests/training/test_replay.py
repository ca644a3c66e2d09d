"""Steps that are recorded and replayed: the same gradients and results as unrecorded ones, or none are replayed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from archsearch.training.replay import (
    GRADIENT_TOLERANCE,
    RESULT_TOLERANCE,
    WARMUP_CALLS,
    Player,
    Recorder,
    Replay,
    Work,
    record_cuda_graph,
)


class Model:
    """Work that counts how often it runs, with gradients that depend on what it is given."""

    def __init__(self, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 4, generator=generator).to(device))
        self.unused = nn.Parameter(torch.zeros(2, device=device))
        self.parameters = [self.weight, self.unused]
        self.calls = 0
        self.scale = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        loss = self.scale * (x @ self.weight).square().sum(1)
        loss.sum().backward()
        return loss.detach()

    def taken(self) -> list[Tensor | None]:
        """The gradients, which are cleared as an optimizer does."""
        found = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return found


class Tape:
    """A Recorder that does recorded work by calling it, and may do it wrong."""

    def __init__(self, error: float = 0.0, gradient_error: float = 0.0) -> None:
        self.recorded = 0
        self.error, self.gradient_error = error, gradient_error

    def __call__(self, work: Work, static: Tensor, parameters: Sequence[nn.Parameter]) -> Player:
        self.recorded += 1

        def play() -> Tensor:
            for parameter in parameters:
                parameter.grad = None
            result = work(static) * (1 + self.error)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad *= 1 + self.gradient_error
            return result

        return play


def refuse(work: Work, static: Tensor, parameters: Sequence[nn.Parameter]) -> Player:
    """A Recorder on a machine that cannot."""
    for parameter in parameters:
        parameter.grad = None
    raise RuntimeError("operation not permitted\nmore lines")


def inputs(count: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator).to(device) for _ in range(count)]


def check_equal(replay: Replay, model: Model, given: Sequence[Tensor], key: str = "") -> None:
    for x in given:
        wanted = model(x)
        gradient, unused = model.taken()
        torch.testing.assert_close(replay(model, x, key), wanted)
        found, none = model.taken()
        torch.testing.assert_close(found, gradient)
        assert unused is none is None


def test_replayed_calls_equal_unrecorded_ones() -> None:
    model, tape = Model(), Tape()
    check_equal(Replay(model.parameters, tape), model, inputs(WARMUP_CALLS + 4))
    assert tape.recorded == 1


def test_another_key_or_shape_is_recorded_anew() -> None:
    model, tape = Model(), Tape()
    replay = Replay(model.parameters, tape)
    for key, rows in (("a", 5), ("b", 5), ("b", 2)):
        model.scale += 1
        check_equal(replay, model, [x[:rows] for x in inputs(WARMUP_CALLS + 2)], key)
    assert tape.recorded == 3


def elsewhere(work: Work, static: Tensor, parameters: Sequence[nn.Parameter]) -> Player:
    """A Recorder whose gradients land on another parameter as well."""
    play = Tape()(work, static, parameters)

    def wrong() -> Tensor:
        found = play()
        parameters[1].grad = torch.zeros_like(parameters[1])
        return found

    return wrong


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [
        (refuse, "operation not permitted"),
        (Tape(error=2 * RESULT_TOLERANCE), "it gives another result"),
        (Tape(gradient_error=2 * GRADIENT_TOLERANCE), "its gradients differ by 0.2"),
        (elsewhere, "it gives gradients to other parameters"),
    ],
)
def test_what_cannot_be_replayed_goes_on_as_it_is(
    recorder: Recorder, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    with caplog.at_level(logging.WARNING):
        check_equal(Replay(model.parameters, recorder), model, inputs(WARMUP_CALLS + 3))
    (record,) = caplog.records
    assert f"cannot be replayed ({reason}" in record.getMessage()


def test_a_number_of_one_batch_in_a_recording_is_found_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model()
    replay = Replay(model.parameters, Tape())
    for x in inputs(WARMUP_CALLS + 3):
        # Not all of what the work depends on is in its input.
        wanted = model(x * x.sum())
        expected = model.taken()[0]
        size = x.sum()
        torch.testing.assert_close(replay(lambda x, size=size: model(x * size), x), wanted)
        torch.testing.assert_close(model.taken()[0], expected)
    (record,) = caplog.records
    assert "cannot be replayed" in record.getMessage()


def test_what_is_forgotten_is_recorded_anew() -> None:
    model, tape = Model(), Tape()
    replay = Replay(model.parameters, tape)
    for _ in range(2):
        check_equal(replay, model, inputs(WARMUP_CALLS + 2))
        replay.forget()
    assert tape.recorded == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_equal_unrecorded_calls(caplog: pytest.LogCaptureFixture) -> None:
    model = Model("cuda")
    replay = Replay(model.parameters, record_cuda_graph)
    check_equal(replay, model, inputs(WARMUP_CALLS + 4, "cuda"))
    assert caplog.records == []
    calls = model.calls
    replay(model, inputs(1, "cuda")[0], "")
    assert model.calls == calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_that_waits_for_the_gpu_goes_on_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model, before = Model("cuda"), torch.cuda.current_stream()

    def waits(x: Tensor) -> Tensor:
        return model(x) * float(x.new_ones(()))

    replay = Replay(model.parameters, record_cuda_graph)
    for x in inputs(WARMUP_CALLS + 3, "cuda"):
        wanted, expected = model(x), model.taken()[0]
        torch.testing.assert_close(replay(waits, x), wanted)
        torch.testing.assert_close(model.taken()[0], expected)
    (record,) = caplog.records
    assert "cannot be replayed" in record.getMessage()
    assert torch.cuda.current_stream() == before
