"""The section `student` of a config: nothing unless asked for, and no NoPE without the tokens that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from archsearch.attention.configuration_hydrahead import FA_CHOICES, FA_DEFAULTS, HydraHeadConfig
from archsearch.config import RunConfig
from archsearch.configfile import load_config
from archsearch.errors import ConfigError
from archsearch.models.full_heads import full_switches
from archsearch.studentconfig import FullConfig

BASE = "schema: 1\nname: one\nteacher: {source: somewhere}\n"


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    path = folder / "config.yaml"
    path.write_text(BASE + text)
    return load_config(path, list(overrides))


def test_full_attention_heads_are_the_teachers_unless_asked_for_otherwise(tmp_path: Path) -> None:
    full = load(tmp_path, "").student.full
    assert full == FullConfig()
    assert full_switches(full) == FA_DEFAULTS


def test_every_form_that_a_config_may_name_is_one_of_the_model(tmp_path: Path) -> None:
    for name, forms in FA_CHOICES.items():
        assert get_args(FullConfig.model_fields[name].annotation) == forms
        for form in forms:
            full = load(tmp_path, "", f"student.full.{name}={form}").student.full
            assert HydraHeadConfig(fa=full_switches(full)).fa == {**FA_DEFAULTS, name: form}


def test_rope_goes_only_with_the_tokens_that_it_takes(tmp_path: Path) -> None:
    text = (
        "student: {full: {rope: false, rope_fade_tokens: 1000}}\nsearch: {proxy_tokens: [0, 999]}"
    )
    with pytest.raises(ConfigError, match=r"rope: false takes rope_fade_tokens \(1000\).* has 999"):
        load(tmp_path, text)
    assert not load(tmp_path, text, "search.proxy_tokens=[0, 1000]").student.full.rope
    assert load(tmp_path, text, "student.full.rope=true").student.full.rope
    at_once = load(tmp_path, text, "student.full.rope_fade_tokens=0").student.full
    assert full_switches(at_once)["rope_share"] == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("student.full.gates=true", "student.full.gates: unknown key; did you mean"),
        ("student.full.rope=0.5", r"student\.full\.rope: .*true or false"),
        ("student.full.log_scale_tokens=1", r"student\.full\.log_scale_tokens: .*2"),
        ("student.full.log_scale_form=square", r"'square' is not allowed; allowed: 'shifted'"),
    ],
)
def test_wrong_values_are_one_clear_line(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, "", override)
