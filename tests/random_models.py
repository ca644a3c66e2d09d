"""Small teachers and supernets with random weights, for tests of what runs on top of models."""

from __future__ import annotations

import random

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from archsearch.config import GdnConfig
from archsearch.data.niah import Probe
from archsearch.models.adapters import shape_of
from archsearch.models.convert import random_hydrahead
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import Teacher, byte_tokenizer

VOCABULARY = 300

CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def random_teacher(
    family: str = "llama",
    *,
    num_layers: int = 3,
    head_dim: int = 8,
    tied: bool = False,
    seed: int = 0,
) -> Teacher:
    """A teacher of 4 query and 2 KV heads whose heads matter: weights are far larger than at an init."""
    hf_config = CONFIGS[family](
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    cpu = torch.device("cpu")
    model = random_hydrahead(hf_config, dtype=torch.float32, device=cpu, seed=seed)
    _randomise(model, seed)
    model.eval().requires_grad_(False)
    return Teacher(model, byte_tokenizer(), shape_of(hf_config), f"random-{seed}", cpu)


def random_supernet(teacher: Teacher, *, seed: int = 1) -> Supernet:
    """Twins migrated from a teacher, then moved at random so that every parameter matters."""
    supernet = Supernet.migrated(teacher, GdnConfig())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in supernet.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * drawn.to(parameter.device))
    return supernet.eval().requires_grad_(False)


def random_probes(
    count: int, *, kind: str = "single", length: int = 24, answer: int = 3, seed: int = 0
) -> list[Probe]:
    """Probes of random tokens: clean and corrupt prompts differ in the tokens of the value."""
    rng = random.Random(seed)
    probes = []
    for _ in range(count):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(length))
        value, distractor = (
            tuple(rng.randrange(VOCABULARY) for _ in range(answer)) for _ in range(2)
        )
        at = rng.randrange(2, length - answer - 2)
        clean = prompt[:at] + value + prompt[at + answer :]
        corrupt = prompt[:at] + distractor + prompt[at + answer :]
        probes.append(Probe(kind, length + answer, clean, value, corrupt, distractor))
    return probes


def random_tokens(sequences: int, length: int, *, seed: int = 0) -> torch.Tensor:
    """Token ids [sequences, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (sequences, length), generator=generator)


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and "bias" not in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
