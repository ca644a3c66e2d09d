"""Text drawn from a model: starts, determinism, the right distribution, both kinds of models."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from archsearch.data import sampling
from archsearch.data.sampling import draw_tokens, token_dtype
from tests.random_models import VOCABULARY, random_teacher

from .tokenizers_for_tests import merging_tokenizer, word_tokenizer


def _llama(vocab_size: int = 40) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def test_draw_tokens_starts_at_bos_and_reports_progress() -> None:
    tokenizer, seen = word_tokenizer(), list[tuple[int, int]]()
    tokens = draw_tokens(
        _llama(),
        tokenizer,
        sequences=5,
        length=7,
        seed=0,
        batch=2,
        progress=lambda *at: seen.append(at),
    )
    assert tokens.shape == (5, 7)
    assert tokens.dtype == np.uint16
    assert (tokens[:, 0] == tokenizer.bos_token_id).all()
    assert tokens.max() < 40
    assert seen == [(14, 35), (28, 35), (35, 35)]


def test_draw_tokens_without_bos_starts_at_ordinary_tokens() -> None:
    tokenizer = word_tokenizer(bos=False)
    tokens = draw_tokens(_llama(len(tokenizer)), tokenizer, sequences=64, length=1, seed=0)
    assert not set(tokens[:, 0].tolist()) & set(tokenizer.all_special_ids)
    assert len(set(tokens[:, 0].tolist())) > 32
    assert merging_tokenizer().bos_token_id is None


def test_draw_tokens_depends_on_the_seed_and_draws_each_sequence_anew() -> None:
    def draw(seed: int) -> list[list[int]]:
        tokens = draw_tokens(_llama(), word_tokenizer(), sequences=6, length=12, seed=seed, batch=3)
        rows: list[list[int]] = tokens.tolist()
        return rows

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    assert len({tuple(row) for row in draw(0)}) == 6


@pytest.mark.parametrize("hybrid", [False, True])
def test_draw_tokens_near_temperature_zero_is_greedy(hybrid: bool) -> None:
    model = random_teacher().model if hybrid else _llama(VOCABULARY)
    tokens = draw_tokens(
        model, word_tokenizer(), sequences=2, length=20, temperature=1e-4, seed=0
    ).astype(np.int64)
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        greedy = model(input_ids=ids).logits.argmax(-1)
    assert torch.equal(greedy[:, :-1], ids[:, 1:])


def test_draw_tokens_follows_the_models_distribution() -> None:
    model, tokenizer = _llama(), word_tokenizer()
    tokens = draw_tokens(model, tokenizer, sequences=4000, length=2, seed=0, batch=4000)
    with torch.no_grad():
        probs = model(input_ids=torch.tensor([[tokenizer.bos_token_id]])).logits[0, 0].softmax(-1)
    counts = np.bincount(tokens[:, 1], minlength=40)
    error = np.abs(counts / 4000 - probs.numpy())
    assert (error < 4 * np.sqrt(probs.numpy() / 4000) + 1e-3).all()


def test_draw_tokens_leaves_the_mode_and_random_state_alone() -> None:
    model = _llama().train()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    draw_tokens(model, word_tokenizer(), sequences=1, length=3, seed=0)
    assert model.training
    assert torch.equal(torch.rand(1), expected)


def test_draw_tokens_refuses_logits_that_are_not_finite() -> None:
    model = _llama()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        draw_tokens(model, word_tokenizer(), sequences=1, length=3, seed=0)


@pytest.mark.parametrize(("size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_token_dtype_holds_every_id(size: int, dtype: type) -> None:
    assert token_dtype(size) == dtype
    assert np.iinfo(dtype).max >= size - 1


@pytest.mark.parametrize(
    ("gib", "length", "batch"),
    [(141, 1024, 2048), (80, 1024, 1024), (24, 1024, 256), (24, 8192, 32), (141, 64, 2048)],
)
def test_a_gpu_draws_as_many_sequences_together_as_a_third_of_its_memory_holds(
    monkeypatch: pytest.MonkeyPatch, gib: int, length: int, batch: int
) -> None:
    config = SimpleNamespace(  # SmolLM2-135M's
        num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576
    )
    model = SimpleNamespace(config=config, device=torch.device("cuda"), dtype=torch.bfloat16)
    memory = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    assert sampling._fitting_batch(model, length) == batch  # type: ignore[arg-type]
