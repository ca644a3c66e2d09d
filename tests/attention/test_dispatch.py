"""The table of operators: order, reasons, wishes, what is logged; and every backend that runs here against the reference."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor

from archsearch.attention import backends, dispatch
from archsearch.attention.backends import (
    INFERENCE,
    STEP,
    TRAINING,
    Backend,
    Operator,
    Situation,
    wish_of_environment,
)
from archsearch.attention.dispatch import OPERATORS, attend, gated_delta_net, set_backend
from archsearch.attention.gdn_backends import triton_miscompiles
from archsearch.config import KernelsConfig
from archsearch_kernels.gdn import reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ON_CPU = Situation(CPU, torch.float32, 64, INFERENCE)
ON_GPU = Situation(CUDA, torch.bfloat16, 64, INFERENCE)


class Call(NamedTuple):
    x: Tensor


def needs_gpu(situation: Situation) -> str | None:
    return None if situation.device.type == "cuda" else "needs a CUDA device"


def never(situation: Situation) -> str | None:
    return None


def no_steps(situation: Situation) -> str | None:
    return "no steps" if situation.purpose == STEP else None


def fake(**changes: Any) -> Operator:
    """Three backends that multiply by 2, 3 and 4: two for a GPU, and a slow one for everything."""
    table = (
        Backend("quick", lambda call: call.x * 2, needs_gpu, no_steps),
        Backend("other", lambda call: call.x * 3, needs_gpu),
        Backend("plain", lambda call: call.x * 4, never, is_slow=True),
    )
    return Operator("fake", "Fake", "HYDRAHEAD_FAKE_BACKEND", table, **changes)


def test_the_first_that_can_serve_is_chosen() -> None:
    operator = fake()
    assert operator.choose(ON_GPU).name == "quick"
    assert operator.choose(replace(ON_GPU, purpose=STEP)).name == "other"
    assert operator.choose(ON_CPU).name == "plain"
    assert operator.choose(ON_CPU).run(Call(torch.ones(1))).item() == 4


def test_a_choice_is_logged_once_with_reasons(caplog: pytest.LogCaptureFixture) -> None:
    operator = fake()
    with caplog.at_level(logging.INFO, backends.__name__):
        for shape in ((1,), (2,), (1,)):
            operator.choose(replace(ON_CPU, shape=shape))
        operator.choose(replace(ON_CPU, purpose=TRAINING))
    assert [record.getMessage() for record in caplog.records] == [
        "fake: plain serves inference on cpu in float32, head_dim 64; quick: needs a CUDA device; "
        "other: needs a CUDA device",
        "fake: plain serves training on cpu in float32, head_dim 64; quick: needs a CUDA device; "
        "other: needs a CUDA device",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_a_slow_backend_on_a_gpu_is_warned_of_unless_it_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, backends.__name__)  # a command may have asked for more
    operator = Operator("fake", "Fake", "HYDRAHEAD_FAKE_BACKEND", fake().backends[2:])
    operator.choose(ON_GPU)
    operator.choose(replace(ON_GPU, purpose=STEP))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "plain, which is slow, serves inference on cuda:0" in record.getMessage()
    operator.force("plain", "a test")
    operator.choose(ON_GPU)
    assert len(caplog.records) == 1


def test_a_wish_is_obeyed_or_refused_with_its_reason() -> None:
    operator = fake()
    operator.force("plain", "kernels.fake")
    assert operator.choose(ON_GPU).name == "plain"
    operator.force("quick", "kernels.fake")
    assert operator.choose(ON_GPU).name == "quick"
    assert operator.choose(replace(ON_GPU, purpose=STEP)).name == "other", "quick leaves them"
    message = "kernels.fake: quick was asked for, but cannot serve on cpu in float32.*needs a CUDA"
    with pytest.raises(RuntimeError, match=message):
        operator.choose(ON_CPU)
    operator.force("auto", "kernels.fake")
    assert operator.choose(ON_CPU).name == "plain"
    with pytest.raises(ValueError, match="'none'; allowed: auto, quick, other, plain"):
        operator.force("none", "kernels.fake")


def test_the_environment_is_asked_where_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRAHEAD_FAKE_BACKEND", "other")
    operator = fake()
    assert operator.choose(ON_GPU).name == "other"
    operator.force("quick", "kernels.fake")
    assert operator.choose(ON_GPU).name == "quick"
    operator.force("auto", "kernels.fake")
    assert operator.choose(ON_GPU).name == "other"
    with pytest.raises(RuntimeError, match="HYDRAHEAD_FAKE_BACKEND: other was asked for"):
        operator.choose(ON_CPU)


@pytest.mark.parametrize("name", ["cuda", " torch ", "TORCH"])
def test_an_unknown_backend_in_the_environment_is_said_once_to_be_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    variable, allowed = "HYDRAHEAD_GDN_BACKEND", OPERATORS["gdn"].allowed
    backends._warn_of.cache_clear()
    monkeypatch.setenv(variable, name)
    for _ in range(2):
        assert wish_of_environment(variable, allowed) == ("auto", variable)
    said = f"{variable}: {name!r} is ignored; allowed: auto, triton, flashqla, fla, torch"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_an_empty_variable_is_not_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variable, allowed = "HYDRAHEAD_GDN_BACKEND", OPERATORS["gdn"].allowed
    for name, wish in (("", "auto"), ("fla", "fla")):
        monkeypatch.setenv(variable, name)
        assert wish_of_environment(variable, allowed) == (wish, variable)
    assert not caplog.records


def test_what_is_refused_for_one_purpose_alone_is_said_to_be_of_that_purpose() -> None:
    def no_training(situation: Situation) -> str | None:
        return "has no backward pass" if situation.purpose == TRAINING else needs_gpu(situation)

    table = (Backend("half", lambda call: call.x, no_training), *fake().backends)
    operator = Operator("fake", "Fake", "HYDRAHEAD_FAKE_BACKEND", table)
    train = replace(ON_CPU, purpose=TRAINING)
    for name, situation, what in (
        ("quick", train, "on cpu in float32, head_dim 64"),
        ("quick", ON_CPU, "on cpu in float32, head_dim 64"),
        ("half", train, "training on cpu in float32, head_dim 64"),
        ("half", ON_CPU, "inference on cpu in float32, head_dim 64"),
    ):
        operator.force(name, "kernels.fake")
        reason = operator.refusal(name, situation)
        with pytest.raises(RuntimeError) as caught:
            operator.choose(situation)
        asked = f"kernels.fake: {name} was asked for, but cannot serve"
        assert str(caught.value) == f"{asked} {what}: {reason}"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Backends that were timed, in order; `other` is the fastest."""
    names: list[str] = []

    def seconds_of(backend: Backend, situation: Situation, call: Any) -> float:
        names.append(backend.name)
        return {"quick": 0.5, "other": 0.25}[backend.name]

    monkeypatch.setattr(backends, "seconds_of", seconds_of)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return names


def test_rivals_are_timed_once_a_shape(timed: list[str]) -> None:
    operator, call = fake(rivals=("quick", "other")), Call(torch.ones(1))
    assert operator.choose(ON_GPU).name == "quick", "without a call there is nothing to time"
    small, large = (replace(ON_GPU, shape=(size,)) for size in (1, 2))
    for situation in (small, large, small):
        assert operator.choose(situation, call).name == "other"
    assert timed == ["quick", "other"] * 2
    assert operator.races[small] == {"quick": 0.5, "other": 0.25}
    # With one of them there is no race.
    assert operator.choose(replace(small, purpose=STEP), call).name == "other"
    assert operator.choose(ON_CPU, call).name == "plain"
    assert len(timed) == 4


def test_a_rival_that_fails_loses(
    timed: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(backend: Backend, situation: Situation, call: Any) -> float:
        if backend.name == "other":
            raise ValueError("no kernel\nand more")
        return 1.0

    monkeypatch.setattr(backends, "seconds_of", broken)
    operator = fake(rivals=("quick", "other"))
    with caplog.at_level(logging.INFO, backends.__name__):
        assert operator.choose(ON_GPU, Call(torch.ones(1))).name == "quick"
    assert "quick 1000.000 ms, other failed (ValueError: no kernel)" in caplog.text


def test_the_config_offers_what_the_table_has() -> None:
    fields = KernelsConfig.model_fields
    assert set(fields) == set(OPERATORS)
    for name, operator in OPERATORS.items():
        assert get_args(fields[name].annotation) == operator.allowed


def test_an_operator_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="'nha'; allowed: gdn, full"):
        set_backend("nha", "torch")


@pytest.fixture
def forced() -> Iterator[Callable[[str, str], None]]:
    yield set_backend
    for name in OPERATORS:
        set_backend(name, "auto")


def test_a_forced_backend_of_a_head_cannot_serve_here(
    forced: Callable[[str, str], None],
) -> None:
    x = torch.randn(1, 2, 4, 16)
    forced("gdn", "triton")
    with pytest.raises(RuntimeError, match=r"set_backend: triton was asked for.*needs a CUDA"):
        gated_delta_net(x, x, x, x[..., 0], x[..., 0], torch.zeros(4), torch.zeros(4))
    forced("full", "flash_attn")
    with pytest.raises(RuntimeError, match=r"flash_attn was asked for.*needs a CUDA"):
        attend(x, x, x)


@pytest.mark.parametrize(
    ("version", "wrong"),
    [
        ("3.3.1", False),
        ("3.4.0", True),
        ("3.6.0+git1234", True),
        ("3.7.0", True),
        ("3.7.1", False),
        ("3.10.0rc1", False),
    ],
)
def test_triton_versions(version: str, wrong: bool) -> None:
    assert triton_miscompiles(version) is wrong


def draw(tokens: int, *, heads: int = 4, groups: int = 2, dim: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "q_BTHD": randn(1, tokens, heads, dim),
        "k_BTGD": randn(1, tokens, groups, dim),
        "v_BTGD": randn(1, tokens, groups, dim),
        "a_BTH": randn(1, tokens, heads),
        "b_BTH": randn(1, tokens, heads),
        "A_log_H": 0.5 * randn(heads),
        "dt_bias_H": randn(heads) - 2,
        "q_index_n": torch.tensor([3, 0, 2], dtype=torch.int32),
        "kv_index_n": torch.tensor([1, 0, 1], dtype=torch.int32),
    }


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("bounds", [None, [0, 20, 20, 70]])
def test_chosen_heads_and_packed_sequences(tokens: int, bounds: list[int] | None) -> None:
    if bounds is not None and tokens == 1:
        bounds = [0, 1]
    inputs, count = draw(tokens), 1 if bounds is None else len(bounds) - 1
    state = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {
        "initial_state": state,
        "cu_seqlens": None if bounds is None else torch.tensor(bounds),
        "output_final_state": True,
    }
    found = gated_delta_net(**inputs, **options)
    expected = reference.gdn_forward(**inputs, **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_without_indices_all_heads_run_and_no_state_comes_back_unasked() -> None:
    inputs = draw(9, groups=4)
    every = torch.arange(4, dtype=torch.int32)
    indexed = gated_delta_net(**{**inputs, "q_index_n": every, "kv_index_n": every})
    del inputs["q_index_n"], inputs["kv_index_n"]
    plain = gated_delta_net(**inputs)
    torch.testing.assert_close(plain[0], indexed[0])
    assert plain[1] is None


def test_a_token_without_gates_leaves_the_state_alone_and_gets_no_gradient() -> None:
    inputs, state = draw(3), torch.randn(1, 3, 16, 16)
    masked = torch.full_like(inputs["a_BTH"], float("-inf"))
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if x.is_floating_point()}
    inputs |= {"a_BTH": masked, "b_BTH": masked}
    o, found = gated_delta_net(**inputs, initial_state=state, output_final_state=True)
    assert found is not None
    torch.testing.assert_close(found, state)
    del leaves["a_BTH"], leaves["b_BTH"]
    gradients = torch.autograd.grad(o.sum() + found.sum(), list(leaves.values()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("backend", ["sdpa", "torch"])
def test_full_attention_backends_agree(forced: Callable[[str, str], None], backend: str) -> None:
    q, k, v = torch.randn(2, 4, 9, 16), *torch.randn(2, 2, 2, 9, 16).unbind()
    pairs = torch.rand(2, 1, 9, 9) > 0.5
    pairs |= torch.eye(9, dtype=torch.bool)
    expected = [attend(q, k, v), attend(q, k, v, pairs), attend(q[:, :, :1], k, v)]
    forced("full", backend)
    found = [attend(q, k, v), attend(q, k, v, pairs), attend(q[:, :, :1], k, v)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_decides_what_kernels_compute_in() -> None:
    x = torch.randn(1, 2, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(x, x, x).dtype == torch.bfloat16
        o, _ = dispatch.gated_delta_net(
            x, x, x, x[..., 0], x[..., 0], torch.zeros(3), torch.zeros(3)
        )
    assert o.dtype == torch.bfloat16


def test_dense_makes_the_last_stride_1_also_of_one_entry() -> None:
    single = torch.empty_strided((2, 5, 1), (5, 1, 5)).normal_().requires_grad_()
    for x in (single, torch.randn(2, 3, 4).transpose(1, 2)):
        found = backends.dense(x)
        assert found.stride(-1) == 1
        assert found.is_contiguous()
        assert torch.equal(found, x)
    backends.dense(single).sum().backward()
    assert single.grad is not None
    rows = torch.randn(4, 6)[:, :3]
    assert backends.dense(rows) is rows
