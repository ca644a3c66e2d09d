"""A training step recorded once and replayed: on a GPU as one CUDA graph, since small batches are bound by launches.

The work of a step is a function of one tensor, whose shape decides all that it launches; it adds gradients to
parameters and returns a tensor. Nothing in it may wait for the device, move data to it or draw at random.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

WARMUP_CALLS = 2
"""Calls as they are before one is recorded: backends are chosen, kernels compiled and tuned in them."""
RESULT_TOLERANCE = 0.02
"""Most that a replay's result may differ from that of the same call unrecorded, relative to it."""
GRADIENT_TOLERANCE = 0.1
"""The same for the norm of all gradients' difference: sums of bf16 products change order from call to call, which adds up
over layers. Gradients of another batch, or of a layer too few, are off by far more."""

Work = Callable[[Tensor], Tensor]
Player = Callable[[], Tensor]
"""Does the recorded work on what lies in its input now: gradients set anew, not added, and the result."""
Recorder = Callable[[Work, Tensor, Sequence[nn.Parameter]], Player]
"""Records work on an input, without effect on the parameters."""


def record_cuda_graph(work: Work, static: Tensor, parameters: Sequence[nn.Parameter]) -> Player:
    """A Recorder. Raises RuntimeError where the work cannot be captured, as with a wait for the device in it."""
    device, graph = static.device, torch.cuda.CUDAGraph()
    for parameter in parameters:
        parameter.grad = None
    # The outer stream is there again even where the end of a capture fails, which leaves the inner one current.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)), _kept():
        stream = _capture_stream(device)
        # Only this thread's calls are watched: autograd's own allocate, others may copy to the device.
        with (
            _generator_kept(device),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            result = work(static)
    gradients = [parameter.grad for parameter in parameters]

    def play() -> Tensor:
        graph.replay()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return result.clone()

    return play


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all recordings: cuBLAS keeps a workspace for each stream that it has ever seen, in the memory of the
    # first graph, which would then never be given back.
    return torch.cuda.Stream(device)


@contextmanager
def _generator_kept(device: torch.device) -> Iterator[None]:
    """Has the device draw at random again after a capture that failed, which leaves its generator waiting for the end."""
    generator = torch.cuda.default_generators[device.index or 0]
    try:
        yield
    except BaseException:
        # A copy of a state is in no capture.
        generator.graphsafe_set_state(generator.clone_state())
        raise


@contextmanager
def _kept() -> Iterator[None]:
    """Has nothing collected inside: to free another graph in the middle of a capture would break it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Replay:
    """Calls work, from the third call of a shape and key on from a recording.

    What is recorded is the work of the call before, and it is checked against the third call unrecorded, so that a
    number of one batch that got into the recording shows. Where results or gradients differ, or where recording fails,
    a warning says so and everything goes on unrecorded. Gradients must be taken between two calls: a replay replaces
    them. A recording holds the memory of a step until `forget`, another shape or key, or its owner's end.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], recorder: Recorder = record_cuda_graph
    ) -> None:
        self._parameters = list(parameters)
        self._recorder = recorder
        self._given_up = False
        self.forget()

    def forget(self) -> None:
        """Frees what is recorded; the next calls record anew."""
        self._signature: Hashable = None
        self._calls = 0
        self._static = torch.empty(0)
        self._player: Player | None = None
        self._earlier: Work | None = None

    def __call__(self, work: Work, given: Tensor, key: Hashable = None) -> Tensor:
        """work(given), with all that work depends on besides given's numbers told apart by key."""
        if self._given_up:
            return work(given)
        signature = (key, given.shape, given.dtype)
        if signature != self._signature:
            self.forget()
            self._signature = signature
        if self._player is not None:
            self._static.copy_(given)
            return self._player()
        self._calls += 1
        if self._calls > WARMUP_CALLS and self._earlier is not None:
            return self._record(self._earlier, work, given)
        self._earlier = work
        return work(given)

    def _record(self, earlier: Work, work: Work, given: Tensor) -> Tensor:
        """Does the call both ways; what stays is the recording's where both agree."""
        wanted = work(given)
        gradients = self._gradients()
        try:
            self._static = given.clone()
            player = self._recorder(earlier, self._static, self._parameters)
            found = player()
            problem = _difference(found, wanted, self._gradients(), gradients)
        except RuntimeError as error:
            problem = _first_of(error)
        if not problem:
            self._player, self._earlier = player, None
            return found
        logger.warning("a training step cannot be replayed (%s): each is launched anew", problem)
        self.forget()
        if given.is_cuda:
            # What a recording took, above all where it is memory that was missing.
            torch.cuda.empty_cache()
        self._given_up = True
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return wanted

    def _gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]


def _first_of(error: BaseException) -> str:
    """The first line of what went wrong first: a capture that failed fails a second time as it ends."""
    while isinstance(error.__context__, Exception):
        error = error.__context__
    return str(error).partition("\n")[0]


def _difference(
    found: Tensor,
    wanted: Tensor,
    found_gradients: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
) -> str:
    """What a replay has other than the call itself, in words; empty where nothing."""
    if not torch.allclose(found, wanted, rtol=RESULT_TOLERANCE, atol=0):
        return "it gives another result"
    pairs = list(zip(found_gradients, gradients, strict=True))
    if any((one is None) != (other is None) for one, other in pairs):
        return "it gives gradients to other parameters"
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    if not both:
        return ""
    ours, theirs = ([x.float() for x in side] for side in zip(*both, strict=True))
    size, off = (
        float(torch.stack(torch._foreach_norm(x)).norm())
        for x in (theirs, torch._foreach_sub(ours, theirs))
    )
    if not off <= GRADIENT_TOLERANCE * size:
        return f"its gradients differ by {off / max(size, 1e-30):.2g} of their norm"
    return ""
