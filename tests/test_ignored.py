"""Options without effect are named."""

from __future__ import annotations

from typing import Any

import pytest

from archsearch.ignored import ignored_options
from tests.test_preflight import SHIPPED, config_with


def test_contexts_that_nothing_reads_are_named() -> None:
    probes = {"kinds": ["copying"], "contexts": [4096]}
    scoring = {"retrieval": [], "contexts": [4096], "general": ["copying"]}
    assert ignored_options(config_with(probes=probes, scoring=scoring)) == [
        "scoring.contexts is ignored: scoring.retrieval is empty",
        "probes.contexts is ignored: probes.kinds has no retrieval prompts",
    ]


LONG = {"search": {"proxy_tokens": [0, 9_000]}}
FADE = {"rope_fade": "angles", "rope_fade_tokens": 9_000}
OWN = {"retrieval": [], "general": [], "pairs_file": "own.jsonl"}


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"data": {"train": {"path": "a.txt"}}}, "data.train.path is ignored"),
        ({"data": {"heldout": {"temperature": 0.5, "source": "file", "path": "a"}}}, "temperature"),
        ({"execution": {"executor": "serial", "workers": 2}}, "execution: the serial executor"),
        ({"supernet": {"source": SHIPPED, "rank": 8}}, "supernet.rank is ignored"),
        ({"harness": {"limit": 3}}, "harness is ignored: harness.tasks is empty"),
        ({"data": {"niah_share": 0, "niah_text_share": 0.5}}, "data.niah_text_share is ignored"),
        (
            {"data": {"extra_heldout": [{"label": "a", "source": "docstrings", "path": "x"}]}},
            "data.extra_heldout[0].path is ignored: data.extra_heldout[0].source is docstrings",
        ),
        ({"scoring": {"sender_pairs": 0, "sender_rounds": 2}}, "scoring.sender_rounds is ignored"),
        ({"scoring": {"sender_pairs": 0, "receiver_share": 0.1}}, "scoring.receiver_share is"),
        ({"scoring": {"gate_steps": 9}}, "scoring.gate_steps is ignored: duo_gates is not among"),
        ({"scoring": OWN | {"pairs": 9}}, "scoring.pairs is ignored"),
        ({"scoring": OWN | {"max_draws": 9}}, "scoring.max_draws is ignored"),
        (
            {
                "search": {
                    "seeds": {"methods": ["causal"], "random_maps": 3, "every_selector": False}
                }
            },
            "search.seeds.random_maps is ignored: search.seeds.methods has no random",
        ),
        ({"data": {"overlap": "drop"}}, "data.overlap is ignored: data.train.source is teacher"),
        ({"supernet": {"source": SHIPPED, "init": {"bias": "fitted"}}}, "supernet.init is ignored"),
        ({"supernet": {"source": SHIPPED, "stop_below": 0.1}}, "supernet.stop_below is ignored"),
        ({"supernet": {"source": SHIPPED, "stop_gain": 0.1}}, "supernet.stop_gain is ignored"),
        ({"supernet": {"source": SHIPPED, "replay": True}}, "supernet.replay is ignored"),
        (
            {"supernet": {"gdn": {"bias": False}, "init": {"bias": "fitted"}}},
            "supernet.init.bias is ignored: supernet.gdn.bias is false",
        ),
        ({"student": {"full": {"rope_fade": "angles"}}, **LONG}, "student.full.rope_fade is"),
        (
            {"student": {"full": {"rope_fade_tokens": 9}}, **LONG},
            "student.full.rope_fade_tokens is",
        ),
        ({"student": {"full": {"log_scale_tokens": 9}}, **LONG}, "log_scale_tokens is ignored"),
        ({"student": {"full": {"log_scale_form": "clipped"}}, **LONG}, "log_scale_form is ignored"),
        ({"student": {"full": {"log_scale_training": False}}, **LONG}, "log_scale_training is"),
        ({"distill": {"top_k": 9}, **LONG}, "distill.top_k is ignored: distill.teacher_logits is"),
        (
            {"distill": {"cache_gib": 9.0, "teacher_logits": "exact"}, **LONG},
            "distill.cache_gib is ignored: distill.teacher_logits is exact",
        ),
        ({"distill": {"top_k": 9}}, "distill is ignored: no candidate is distilled"),
        ({"search": {"retention": {"fa_share": 0.2}}}, "search.retention is ignored"),
        (
            {"supernet": {"replay": True}},
            "supernet.replay is ignored: the teacher is on the CPU",
        ),
        ({"distill": {"replay": True}, **LONG}, "distill.replay is"),
        (
            {"supernet": {"batch_tokens": 9}},
            "supernet.batch_tokens: 9 is less than a sequence of data.sequence_length 1024 tokens: a batch is one",
        ),
        ({"distill": {"batch_tokens": 1023}, **LONG}, "distill.batch_tokens: 1023 is less than"),
        (
            {"distill": {"packed": True}, **LONG},
            "distill.packed: text from the teacher does not mark its documents: they end at end-of-text",
        ),
        (
            {
                "distill": {"packed": True},
                "data": {"train": {"source": "file", "path": "a.npy"}},
                **LONG,
            },
            "distill.packed: text from a.npy does not mark",
        ),
        (
            {"long_context": {"tokens": 9}},
            "long_context is ignored: archsearch train alone reads it",
        ),
    ],
)
def test_options_without_effect_are_named(sections: dict[str, Any], field: str) -> None:
    (found,) = ignored_options(config_with(**sections))
    assert field in found


@pytest.mark.parametrize(
    ("full", "field"),
    [
        ({"norm": True}, "norm"),
        ({"gate": True}, "gate"),
        ({"log_scale": True}, "log_scale"),
        ({"rope": False, "rope_fade_tokens": 0}, "rope"),
    ],
)
def test_what_begins_with_distillation_is_named_where_there_is_none(
    full: dict[str, Any], field: str
) -> None:
    found = ignored_options(config_with(student={"full": full}))
    reason = "no candidate is distilled with search.proxy_tokens [0]"
    assert found[0].startswith(f"student.full.{field} is ignored: {reason}")
    assert ignored_options(config_with(student={"full": full}, **LONG)) == []


def test_switches_that_ask_for_what_is_anyway_are_not_named() -> None:
    full = {"rope": True, "norm": False, "gate": False}
    supernet = {"source": SHIPPED, "rank": 0, "replay": False, "stop_below": None, "init": {}}
    retention = {"retention": {"prompts": 0}}
    config = config_with(student={"full": full}, supernet=supernet, search=retention)
    assert ignored_options(config) == []


def test_nothing_is_named_where_every_option_counts() -> None:
    train = {"source": "file", "path": "a.txt"}
    data = {"train": train, "heldout": {"temperature": 0.5}, "overlap": "drop"}
    scoring = {"methods": ["duo_gates"], "gate_steps": 9, "sender_rounds": 2, "max_draws": 2}
    config = config_with(
        data=data,
        supernet={"rank": 8, "stop_below": 0.1, "stop_gain": 0.1, "init": {"bias": "fitted"}},
        execution={"workers": 2},
        scoring=scoring | {"receiver_share": 0.1, "pairs": 5},
        search={"seeds": {"random_maps": 3}, **LONG["search"]},
        student={"full": {"log_scale": True, "log_scale_tokens": 9, "rope": False} | FADE},
        distill={"teacher_logits": "topk", "top_k": 9, "cache_gib": 1.0},
    )
    assert ignored_options(config) == []


@pytest.mark.parametrize(
    "train",
    [
        {"source": "docstrings"},
        {"source": "datasets", "name": "a"},
        {"source": "file", "path": "a.jsonl"},
        {"source": "file", "path": "a.parquet"},
    ],
)
def test_documents_that_are_marked_can_be_packed(train: dict[str, Any]) -> None:
    distill = {"packed": True, "batch_tokens": 1024}
    assert ignored_options(config_with(data={"train": train}, distill=distill, **LONG)) == []


def test_options_of_a_score_count_where_it_is_asked_for_alone() -> None:
    config = config_with(scoring={"gate_steps": 9})
    assert ignored_options(config, ["duo_gates"]) == []
    assert len(ignored_options(config, ["causal"])) == 1
