"""What doctor proves of backends: fakes that are right, wrong, broken, and asked for in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from archsearch import doctor, kernel_proofs
from archsearch.attention.backends import Backend, Operator, Situation
from archsearch.attention.dispatch import OPERATORS
from archsearch.doctor import Finding


def cannot(situation: Situation) -> str | None:
    return "needs another machine"


def never(situation: Situation) -> str | None:
    return None


def broken(call: Any) -> Any:
    raise RuntimeError("no such kernel\nand more")


def scaled(factor: float) -> Callable[[Any], Any]:
    right = OPERATORS["gdn"].backend("torch").run

    def run(call: Any) -> Any:
        o, state = right(call)
        return o * factor, state

    return run


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    """Doctor's lines on a table of fakes, by topic."""
    backends = (
        Backend("absent", broken, cannot),
        Backend("broken", broken, never),
        Backend("off", scaled(1.01), never),
        Backend("nan", scaled(float("nan")), never),
        Backend("right", scaled(1.0), never),
    )

    monkeypatch.setitem(OPERATORS, "gdn", Operator("gdn", "GDN", "NO", backends))
    return {finding.topic.strip(): finding for finding in doctor.examine()}


def test_a_line_a_backend(findings: dict[str, Finding]) -> None:
    assert findings["absent"] == Finding("  absent", "not chosen: needs another machine")
    assert findings["broken"].text.startswith(
        "chosen for training in fp32, inference in fp32, step in fp32; DIFFERS: "
        "forward in fp32 raised RuntimeError: no such kernel;"
    )
    assert "DIFFERS: fp32 forward; fp32 backward; " in findings["off"].text
    assert "fp32 step nan" in findings["nan"].text
    assert findings["right"].text.startswith("not chosen; agrees with the fp32 reference (")
    wrong = {topic for topic, finding in findings.items() if not finding.ok}
    assert wrong == {"broken", "off", "nan"}


def test_a_wish_in_vain_is_wrong_and_the_rest_is_proven_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HYDRAHEAD_FULL_BACKEND", "cudnn")
    operator = OPERATORS["full"]
    operator.force("auto", "a test")
    try:
        found = list(doctor._operator("full"))
    finally:
        monkeypatch.undo()
        operator.force("auto", "a test")
    assert not found[0].ok
    assert found[0].text.startswith("HYDRAHEAD_FULL_BACKEND: cudnn was asked for, but cannot serve")
    assert [finding.ok for finding in found[1:]] == [True] * len(operator.backends)


def test_the_worst_error_counts_and_nan_is_the_worst() -> None:
    ones = torch.ones(4)
    worst = kernel_proofs._worst([ones, ones * 1.5], [ones, ones])
    assert worst == pytest.approx(0.5)
    assert not kernel_proofs._worst([ones * float("nan"), ones], [ones, ones]) <= 1
