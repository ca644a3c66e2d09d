"""The teacher: a pretrained full-attention model, loaded as a hybrid model whose heads are all FA."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import TeacherConfig
from ..errors import ConfigError, EnvironmentFault
from ..headmap import ModelShape
from .adapters import count_parameters, shape_of
from .convert import random_hydrahead, to_hydrahead
from .gguf_cache import cached, convert, read_config
from .sources import Source, locate, reading, resolve_path

__all__ = ["Teacher", "TeacherInfo", "inspect_teacher", "load_teacher", "resolve_path"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Teacher:
    """A loaded teacher: eval mode, no gradients. fingerprint tells two teachers apart, whatever their dtype."""

    model: HydraHeadForCausalLM
    tokenizer: PreTrainedTokenizerBase
    shape: ModelShape
    fingerprint: str
    device: torch.device


@dataclass(frozen=True)
class TeacherInfo:
    """What is known of a teacher before its weights are read. max_context is in tokens."""

    shape: ModelShape
    hidden_size: int
    num_parameters: int
    vocab_size: int
    max_context: int


def inspect_teacher(config: TeacherConfig) -> TeacherInfo:
    """Reads a teacher's config alone.

    Raises ConfigError for a model that is not supported, EnvironmentFault for one that cannot be read.
    """
    with quiet_transformers():
        hf_config = read_config(cached(locate(config)))
    return TeacherInfo(
        shape=shape_of(hf_config, config.revision),
        hidden_size=hf_config.hidden_size,
        num_parameters=count_parameters(hf_config),
        vocab_size=hf_config.vocab_size,
        max_context=hf_config.max_position_embeddings,
    )


def load_teacher(config: TeacherConfig) -> Teacher:
    """Loads model and tokenizer onto the config's device.

    Raises ConfigError for a model that is not supported, EnvironmentFault for one that cannot be read or a
    device that is not there.
    """
    device, dtype = pick_device(config.device), getattr(torch, config.dtype)
    with quiet_transformers():
        source = locate(config)
        source = cached(source) if config.random_weights else convert(source)
        hf_config = read_config(source)
        shape = shape_of(hf_config, config.revision)
        tokenizer = load_tokenizer(source, config.random_weights)
        check_vocabulary(tokenizer, hf_config.vocab_size)
        if config.random_weights:
            model = random_hydrahead(hf_config, dtype=dtype, device=device, seed=0)
        else:
            model = _load_model(source, dtype)
            nn.Module.to(model, device)
    _fill_special_ids(model, tokenizer)
    model.train(False).requires_grad_(False)
    return Teacher(model, tokenizer, shape, fingerprint_of(model, shape), device)


def pick_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` names.

    Raises ConfigError for another name, EnvironmentFault for a GPU that the machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if name != "cpu" and not (kind == "cuda" and (index.isdigit() or name == "cuda")):
        raise ConfigError(f"teacher.device: {name!r}; allowed: auto, cpu, cuda, cuda:N")
    if kind == "cuda" and torch.cuda.device_count() <= int(index or 0):
        raise EnvironmentFault(
            f"teacher.device: {name}, but torch sees {torch.cuda.device_count()} GPUs"
        )
    return torch.device(name)


def fingerprint_of(model: HydraHeadForCausalLM, shape: ModelShape) -> str:
    """Hex digest of the geometry and of samples of the weights, equal for fp32 and bf16 copies of a model.

    Samples are rounded to bf16, so that the dtype a teacher was loaded in makes no difference.
    """
    config = model.config
    facts = asdict(shape) | {
        "revision": None,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "rope": dict(config.rope_parameters),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for layer in sorted({0, shape.num_layers // 2, shape.num_layers - 1}):
        block = model.model.layers[layer]
        full = block.self_attn.full
        for weight in (full.q_proj, full.k_proj, full.v_proj, block.mlp.down_proj):
            digest.update(_sample(weight.weight))
    digest.update(_sample(model.model.embed_tokens.weight))
    return digest.hexdigest()[:32]


def _sample(weight: torch.Tensor, count: int = 512) -> bytes:
    flat = weight.detach().flatten()
    picked = flat[:: max(1, flat.numel() // count)].to("cpu", torch.bfloat16)
    return picked.view(torch.int16).numpy().tobytes()


def _load_model(source: Source, dtype: torch.dtype) -> HydraHeadForCausalLM:
    with reading(source, "weights"):
        hf_model = AutoModelForCausalLM.from_pretrained(
            source.name, dtype=dtype, **source.arguments()
        )
    return to_hydrahead(hf_model)


def load_tokenizer(source: Source, may_be_missing: bool) -> PreTrainedTokenizerBase:
    """The model's tokenizer, padding on the left. Random weights may do without: they get one of bytes."""
    try:
        with reading(source, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(source.name, **source.arguments())
            # Without its files transformers makes some tokenizers up from the config, with no vocabulary.
            if not tokenizer.encode("Number 7", add_special_tokens=False):
                raise FileNotFoundError("its files are missing")
    except EnvironmentFault:
        if not may_be_missing:
            raise
        logger.warning("no tokenizer at %s: bytes are the tokens", source.name)
        tokenizer = byte_tokenizer()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            "teacher: its tokenizer has no pad, EOS, unknown or BOS token; "
            "set pad_token in its tokenizer_config.json"
        )
    tokenizer.padding_side = "left"
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes (258 tokens with BOS and EOS), for random weights."""
    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
        tokenizer_object=core, bos_token="<s>", eos_token="</s>"
    )
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raises ConfigError where ordinary text or padding could give ids that the embedding lacks.

    Added tokens beyond it are let pass: several published models have some that nothing ever produces.
    """
    needed = max(tokenizer.vocab_size, tokenizer.pad_token_id + 1)
    if needed > vocab_size:
        raise ConfigError(
            f"teacher: its tokenizer has {needed} tokens, its embedding only {vocab_size} rows"
        )


def _fill_special_ids(model: HydraHeadForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives config and generation config the special ids that only the tokenizer knows."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for config in (model.config, model.generation_config):
            if getattr(config, name, None) is None:
                setattr(config, name, getattr(tokenizer, name))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences progress bars and warnings of transformers: the caller shows one line a stage."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
