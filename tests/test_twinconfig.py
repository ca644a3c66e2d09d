"""Sections of the config about twins: defaults, and fields that would go unread."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from archsearch.config import SupernetConfig, TwinInitConfig


def test_a_config_survives_its_own_dump() -> None:
    config = SupernetConfig(init=TwinInitConfig(half_life="spread", half_life_span=(2.0, 99.0)))
    assert SupernetConfig(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("field", "value", "reader"),
    [
        ("half_life_share", 0.2, "half_life: attention"),
        ("half_life_tokens", 9.0, "half_life: fixed"),
        ("half_life_span", (1.0, 2.0), "half_life: spread"),
        ("write_strength", 0.9, "write: constant"),
    ],
)
def test_a_field_that_nobody_reads_is_an_error(field: str, value: object, reader: str) -> None:
    name, _, needed = reader.partition(": ")
    settings = {} if TwinInitConfig().model_dump()[name] != needed else {name: "fixed"}
    with pytest.raises(ValidationError, match=f"{field} is read with {reader}"):
        TwinInitConfig(**settings, **{field: value})
    assert getattr(TwinInitConfig(**{name: needed, field: value}), field) == value
