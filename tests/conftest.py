"""Fixtures that more than one package's tests share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of Ray come first and together: of the processes that share the tests one alone starts it."""

    def needs_ray(item: pytest.Item) -> bool:
        fixtures = getattr(item, "fixturenames", ())
        return "shared_ray" in fixtures or item.get_closest_marker("ray") is not None

    items.sort(key=lambda item: not needs_ray(item))


def pytest_collection_finish() -> None:
    """What the imports have left stays: collections of garbage, one after each trial, need not go through it all."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws depends on itself alone, wherever and after whatever it runs."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    """One Ray for all tests of a process: each start costs seconds."""
    from archsearch.execution import ray_executor

    ray_executor.start_ray(2)
    yield
    ray_executor.ray.shutdown()


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a Qwen3 model with random weights, 2 layers of 4 heads over 2 KV heads."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.data.tokenizers_for_tests import word_tokenizer

    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = word_tokenizer()
    tokenizer.pad_token = "<eos>"
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def answered_pairs(teacher_folder: Path) -> Path:
    """A file of pairs that teacher_folder's random model answers: what it says itself after made-up prompts."""
    import json
    from random import Random

    import torch

    from archsearch.config import TeacherConfig
    from archsearch.data.prompts import vocabulary
    from archsearch.models.teacher import load_teacher

    teacher = load_teacher(TeacherConfig(source=str(teacher_folder), device="cpu"))
    words = sorted(word for word in vocabulary() if word.isalpha())
    rng, rows = Random(0), []
    while len(rows) < 6:
        clean = rng.choices(words, k=rng.randrange(12, 16))
        corrupt = [*clean[:-2], *rng.choices(words, k=2)]
        ids = teacher.tokenizer([" ".join(clean), " ".join(corrupt)], add_special_tokens=False)
        rows_2T = torch.tensor([[0, *row] for row in ids["input_ids"]])
        said = teacher.model(input_ids=rows_2T).logits[:, -1].argmax(-1)
        answer, distractor = (teacher.tokenizer.decode(token) for token in said)
        if answer != distractor and {answer, distractor} <= set(words):
            row = {"clean": " ".join(clean), "corrupt": " ".join(corrupt)}
            name = "even" if len(rows) % 2 else "odd"
            rows.append(row | {"answer": answer, "distractor": distractor, "probe": name})
    path = teacher_folder.with_name("pairs.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


TINY_RUN = """\
schema: 1
name: check
seed: 3
teacher: {{source: {teacher}, device: cpu}}
data: {{sequence_length: 96, heldout_sequences: 2, niah_share: 0.5}}
probes: {{contexts: [96], multi_keys: 2, digits: 2, prompts: 2}}
scoring: {{retrieval: [], general: [], pairs_file: {pairs}, sender_pairs: 2, replacement_length: 32}}
supernet: {{tokens: 1024, batch_tokens: 128}}
search:
  trials: 10
  proxy_tokens: [0, 256]
  seeds: {{methods: [all_full, all_gdn, causal, even_layers], fa_shares: [0.5]}}
cost: {{context: 256}}
distill: {{batch_tokens: 128}}
execution: {{executor: serial}}
"""


@pytest.fixture
def run_config(teacher_folder: Path, answered_pairs: Path, tmp_path: Path) -> Path:
    """A config file of the smallest run that has every part: two rungs, seeds, control, training."""
    path = tmp_path / "check.yaml"
    path.write_text(TINY_RUN.format(teacher=teacher_folder, pairs=answered_pairs))
    return path
