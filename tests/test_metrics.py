"""Names of metrics, and what can be told from them."""

from __future__ import annotations

from typing import get_args

import pytest

from archsearch.config import ConstraintConfig, ProbeConfig
from archsearch.configfile import load_config
from archsearch.errors import ConfigError
from archsearch.metrics import Metric, check_metric, is_loss, is_reserved, is_share

LOSSES = (
    "kl",
    "kl_docs",
    "niah_single_nll",
    "niah_single_nll@4096",
    "unseen_multikey_nll",
    "x_nll",
)
SHARES = ("top1_agreement", "top1_agreement_docs", "fa_share", "tracking_match@16384", "x_match")
OTHERS = ("cache_bytes", "lm_task_word_nll", "lm_task_exact_match")


@pytest.mark.parametrize("name", [*get_args(Metric), *LOSSES, *SHARES, *OTHERS])
def test_names_of_metrics_are_taken(name: str) -> None:
    assert check_metric(name) == name
    assert ConstraintConfig.model_validate({"metric": name, "max": 1.0}).metric == name


@pytest.mark.parametrize(
    "name",
    ["", "x", "kl_", "niah_single", "niah_single_nll@", "niah_single_nll@-4", "kl@4096", "lm_"],
)
def test_names_of_no_metric_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is no metric; allowed: kl, .*, NAME_nll@CONTEXT"):
        check_metric(name)


def test_what_a_value_is_follows_from_the_name() -> None:
    for name in (*LOSSES, *SHARES, *OTHERS):
        assert is_loss(name) == (name in LOSSES), name
        assert is_share(name) == (name in SHARES), name


@pytest.mark.parametrize(
    ("name", "reserved"),
    [
        *(
            (name, True)
            for name in ("general", "niah_x", "tracking", "single", "kl", "kl_x", "lm_x")
        ),
        *((name, True) for name in ("unseen_x", "labels", "niah", "unseen", "lm")),
        *((name, False) for name in ("stations", "labels2", "a_kl", "niahs")),
    ],
)
def test_names_of_files_do_not_hide_other_metrics(name: str, reserved: bool) -> None:
    assert is_reserved(name) == reserved
    data = {"files": [{"name": name, "path": "a.jsonl"}]}
    if reserved:
        with pytest.raises(ValueError, match=f"'{name}' is what other metrics are called"):
            ProbeConfig.model_validate(data)
    else:
        assert ProbeConfig.model_validate(data).files[0].name == name


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("search.objectives.0.metric=niah", r"'niah' is no metric; allowed: kl, "),
        ("probes.contexts=[512, 512]", "contexts names a length twice"),
        ("probes.unseen=[copying]", "'copying' is not allowed; allowed: 'single', "),
        ("data.extra_heldout=[{label: A}]", "'A' is not allowed; allowed: a text like"),
        (
            "data.extra_heldout=[{label: a}, {label: a}]",
            "extra_heldout gives two texts the same label",
        ),
        ("data.extra_heldout=[{label: a, source: file}]", "source: file needs path"),
        (
            "probes.files=[{name: a, path: x}, {name: a, path: y}]",
            "files gives two files the same name",
        ),
    ],
)
def test_faults_in_a_config_are_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("search_spaces/tiny.yaml", [override])
