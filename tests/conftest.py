"""Fixtures that more than one package's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    """One Ray for all tests: each start costs seconds."""
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


TINY_RUN = """\
schema: 1
name: check
seed: 3
teacher: {{source: {teacher}, device: cpu}}
data: {{sequence_length: 96, heldout_sequences: 2, niah_share: 0.5}}
probes: {{contexts: [96], multi_keys: 2, digits: 2, prompts: 2}}
scoring: {{pairs: 2, context: 96, replacement_length: 32}}
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
def run_config(teacher_folder: Path, tmp_path: Path) -> Path:
    """A config file of the smallest run that has every part: two rungs, seeds, control, training."""
    path = tmp_path / "check.yaml"
    path.write_text(TINY_RUN.format(teacher=teacher_folder))
    return path
