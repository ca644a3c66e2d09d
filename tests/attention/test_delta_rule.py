"""Which backend computes the delta rule: versions of Triton, and the environment's wish."""

from __future__ import annotations

import pytest

from archsearch.attention import delta_rule
from archsearch.attention.delta_rule import triton_miscompiles


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


def test_an_unknown_backend_in_the_environment_is_said_to_be_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HYDRAHEAD_GDN_BACKEND", "cuda")
    with pytest.warns(UserWarning, match="HYDRAHEAD_GDN_BACKEND=cuda is ignored; allowed: auto"):
        assert delta_rule._backend_of_environment() == "auto"
    monkeypatch.setenv("HYDRAHEAD_GDN_BACKEND", "torch")
    assert delta_rule._backend_of_environment() == "torch"
