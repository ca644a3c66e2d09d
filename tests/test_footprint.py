"""What distillation takes of memory and disk, by what is kept of the teacher and of a candidate's layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from archsearch.configfile import load_config
from archsearch.footprint import GIB, answer_bytes, footprint
from archsearch.headmap import ModelShape
from archsearch.models.teacher import TeacherInfo

SMOLLM2 = TeacherInfo(
    shape=ModelShape("llama", 30, 9, 3, 64),
    hidden_size=576,
    num_parameters=134_515_008,
    vocab_size=49_152,
    max_context=8192,
)
BASE = ["teacher.dtype=bfloat16", "search.proxy_tokens=[0, 4000000]", "distill.batch_tokens=16384"]


@pytest.mark.parametrize(
    ("form", "a_token"), [("exact", 0), ("hidden", 1152), ("mean_row", 2308), ("topk", 388)]
)
def test_answers_are_priced_by_their_form(run_config: Path, form: str, a_token: int) -> None:
    config = load_config(run_config, [*BASE, f"distill.teacher_logits={form}"])
    assert answer_bytes(config, SMOLLM2) == 4_000_000 * a_token


def test_what_memory_does_not_take_the_disk_does(run_config: Path) -> None:
    needs = {}
    for gib in (100, 2):
        config = load_config(run_config, [*BASE, f"distill.cache_gib={gib}"])
        needs[gib] = footprint(config, SMOLLM2, "cuda")
    moved = 4_000_000 * 1152 - 2 * GIB
    assert needs[100].gpu - needs[2].gpu == moved
    assert needs[2].disk - needs[100].disk == moved


def test_layers_computed_twice_take_less(run_config: Path) -> None:
    found = [
        footprint(
            load_config(run_config, [*BASE, f"distill.checkpointing={flag}"]), SMOLLM2, "cuda"
        )
        for flag in ("false", "true")
    ]
    assert found[1].gpu < 0.6 * found[0].gpu


def test_weights_to_go_on_from_are_stored_too(run_config: Path) -> None:
    rungs = [*BASE[:1], "search.proxy_tokens=[0, 500000, 2000000]", "distill.cache_gib=100"]
    found = [
        footprint(load_config(run_config, [*rungs, f"distill.decay_share={share}"]), SMOLLM2, "cpu")
        for share in (1.0, 0.2)
    ]
    # A third of ten trials, q, k, v and gate of every head in half precision.
    assert found[1].disk - found[0].disk == 3 * 2 * 4 * 576 * 576 * 30
