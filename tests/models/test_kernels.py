"""The config's kernels section: it holds in this process, and what a machine cannot run is refused before any work."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from archsearch.attention import backends
from archsearch.attention.backends import INFERENCE, Situation
from archsearch.attention.dispatch import OPERATORS, attend, set_backend
from archsearch.config import KernelsConfig
from archsearch.errors import ConfigError, EnvironmentFault, FieldFault
from archsearch.models.kernels import check_environment, check_kernels, kernel_faults, use_kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    yield
    use_kernels(KernelsConfig())


def test_the_section_holds_until_the_next_one() -> None:
    use_kernels(KernelsConfig(full="torch", fusion="torch"))
    wishes = [operator.wish for operator in OPERATORS.values()]
    assert wishes == ["auto", "torch", "auto", "torch"]
    use_kernels(KernelsConfig(gdn="torch"))
    wishes = [operator.wish for operator in OPERATORS.values()]
    assert wishes == ["torch", "auto", "auto", "auto"]


@pytest.mark.parametrize("trains", [False, True])
def test_what_this_machine_cannot_run_is_named_with_what_it_can(trains: bool) -> None:
    check_kernels(KernelsConfig(), CPU, "float32", 64, trains=trains)
    check_kernels(KernelsConfig(gdn="torch", full="sdpa"), CPU, "bfloat16", 64, trains=trains)
    with pytest.raises(FieldFault) as caught:
        check_kernels(KernelsConfig(full="cudnn"), CPU, "float32", 64, trains=trains)
    assert str(caught.value) == (
        "kernels.full: cudnn cannot serve on cpu in float32, head_dim 64: needs a CUDA device; "
        "allowed here: auto, sdpa, torch"
    )


def test_training_on_a_gpu_is_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def cannot(situation: object) -> None:
        asked.append(str(situation))

    table = OPERATORS["gdn"]
    changed = replace(table.backend("fla"), cannot=cannot)
    monkeypatch.setattr(table, "backends", (changed,))
    check_kernels(KernelsConfig(gdn="fla"), torch.device("cuda"), "float32", 64, trains=True)
    assert asked == [
        "inference on cuda in float32, head_dim 64",
        "training on cuda in bfloat16, head_dim 64",
    ]


def test_a_backend_that_leaves_the_dtype_of_the_teacher_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leaves(situation: Situation) -> str | None:
        return "takes bf16 only" if situation.dtype == torch.float32 else None

    table = OPERATORS["full"]
    half = replace(table.backend("sdpa"), cannot=lambda situation: None, leaves=leaves)
    monkeypatch.setattr(table, "backends", (half, table.backend("torch")))
    config, gpu = KernelsConfig(full="sdpa"), torch.device("cuda")
    check_kernels(config, gpu, "bfloat16", 64, trains=True)
    with pytest.raises(EnvironmentFault, match=r"bf16 only; allowed here: auto, torch$"):
        check_kernels(config, gpu, "float32", 64, trains=True)


def test_a_refusal_in_the_midst_of_work_is_a_fault_of_one_line() -> None:
    set_backend("full", "flash_attn", "kernels.full")
    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(EnvironmentFault) as caught, kernel_faults():
        attend(x, x, x)
    assert str(caught.value) == (
        "kernels.full: flash_attn was asked for, but cannot serve on cpu in float32, head_dim 16: "
        "needs a CUDA device"
    )


def test_a_wish_of_the_environment_is_checked_where_the_section_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for operator, wish in (("FULL", "cudnn"), ("FUSION", "triton")):
        variable = f"HYDRAHEAD_{operator}_BACKEND"
        with monkeypatch.context() as patch:
            patch.setenv(variable, wish)
            with pytest.raises(
                EnvironmentFault, match=f"^{variable}: {wish} cannot serve on"
            ) as caught:
                check_kernels(KernelsConfig(), CPU, "float32", 64, trains=False)
            assert not isinstance(caught.value, FieldFault), "no field of the config is to blame"
            torch_alone = KernelsConfig(full="torch", fusion="torch")
            check_kernels(torch_alone, CPU, "float32", 64, trains=True)


def test_a_variable_that_asks_for_nobody_is_an_error_of_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("", "auto", "torch"):
        monkeypatch.setenv("HYDRAHEAD_GDN_BACKEND", name)
        check_environment()
    for name in ("tritn", "TORCH", " torch "):
        monkeypatch.setenv("HYDRAHEAD_GDN_BACKEND", name)
        with pytest.raises(ConfigError) as caught:
            check_environment()
        assert str(caught.value) == (
            f"HYDRAHEAD_GDN_BACKEND: {name!r} is not allowed; allowed: auto, triton, flashqla, fla, torch"
        )
    monkeypatch.delenv("HYDRAHEAD_GDN_BACKEND")
    monkeypatch.setenv("HYDRAHEAD_GND_BACKEND", "torch")
    with pytest.raises(
        ConfigError, match="HYDRAHEAD_GND_BACKEND: no such variable; allowed: HYDRA"
    ):
        check_environment()


def test_what_holds_already_is_not_said_again(caplog: pytest.LogCaptureFixture) -> None:
    operator, situation = OPERATORS["full"], Situation(CPU, torch.float32, 32, INFERENCE)
    with caplog.at_level(logging.INFO, backends.__name__):
        use_kernels(KernelsConfig(full="sdpa"))
        operator.choose(situation)
        for config, said in ((KernelsConfig(full="sdpa"), 1), (KernelsConfig(), 2)):
            use_kernels(config, once=True)
            operator.choose(situation)
            assert len(caplog.records) == said
        use_kernels(KernelsConfig())
        operator.choose(situation)
    assert len(caplog.records) == 3
