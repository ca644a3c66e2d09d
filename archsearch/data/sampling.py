"""Text drawn from the teacher itself: training and held-out tokens without any corpus.

Shapes: B sequences drawn together, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..progress import Progress, ignore_progress

Tokens = NDArray[np.unsignedinteger]
"""Token ids, as uint16 where the vocabulary allows it and uint32 otherwise."""

CPU_BATCH = 64
MOST_ON_GPU = 2048
"""Most sequences that are drawn together on a GPU."""
CACHE_SHARE = 0.35
"""Of a GPU's memory, for the keys and values of what is drawn."""

# transformers renamed past_key_values, as an argument and as an output.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest unsigned type that holds every token id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


@torch.no_grad()
def draw_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int,
    length: int,
    temperature: float = 1.0,
    seed: int,
    batch: int | None = None,
    progress: Progress = ignore_progress,
) -> Tokens:
    """Samples sequences of length tokens from a causal LM, token by token with its cache.

    Each starts at BOS or, where the tokenizer has none, at a random ordinary token. An end of text
    does not stop a sequence, the model goes on after it. The result depends on seed, batch, temperature
    and the kind of device; without batch, on a GPU also on its memory. progress counts tokens.
    Returns [sequences, length]. Raises FloatingPointError where the model's logits are not finite.
    """
    device = model.device
    vocab_size = int(model.config.vocab_size)
    batch = batch or _fitting_batch(model, length)
    drawn = np.empty((sequences, length), dtype=token_dtype(vocab_size))
    was_training = model.training
    model.train(False)
    for start in range(0, sequences, batch):
        stop = min(start + batch, sequences)
        generator = torch.Generator(device).manual_seed(_batch_seed(seed, start))
        first_B1 = _first_tokens(tokenizer, stop - start, vocab_size, generator)
        tokens_BT = _draw_on(model, first_B1, length, temperature, generator)
        drawn[start:stop] = tokens_BT.cpu().numpy()
        progress(stop * length, sequences * length)
    model.train(was_training)
    return drawn


def _fitting_batch(model: PreTrainedModel, length: int) -> int:
    """Sequences to draw together. A step's launches take as long for few: on a GPU as many as CACHE_SHARE of it holds."""
    if model.device.type != "cuda":
        return CPU_BATCH
    config = model.config
    heads, dim = config.num_attention_heads, getattr(config, "head_dim", None)
    elements = 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", 0) or heads)
    sequence_bytes: int = (
        elements * (dim or config.hidden_size // heads) * length * model.dtype.itemsize
    )
    memory: int = torch.cuda.get_device_properties(model.device).total_memory
    fitting = int(CACHE_SHARE * memory) // sequence_bytes
    return min(MOST_ON_GPU, 1 << max(0, fitting.bit_length() - 1))


def _batch_seed(seed: int, start: int) -> int:
    return int(np.random.SeedSequence([seed, start]).generate_state(1, np.uint64)[0] >> 1)


def _first_tokens(
    tokenizer: PreTrainedTokenizerBase, count: int, vocab_size: int, generator: torch.Generator
) -> Tensor:
    """The first column [count, 1]: BOS, or ordinary tokens at random."""
    device = generator.device
    if tokenizer.bos_token_id is not None:
        return torch.full((count, 1), int(tokenizer.bos_token_id), device=device)
    # The embedding may have more rows than the tokenizer has tokens.
    known = set(range(min(vocab_size, len(tokenizer))))
    ordinary = torch.tensor(sorted(known - set(tokenizer.all_special_ids)), device=device)
    draw = torch.randint(len(ordinary), (count, 1), generator=generator, device=device)
    return ordinary[draw]


def _draw_on(
    model: PreTrainedModel,
    first_B1: Tensor,
    length: int,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """Samples from the first column on, up to [B, length]."""
    columns = [first_B1]
    cache: Any = None
    # Looked at once a batch: a look a token would wait for the device each time.
    finite = torch.ones((), dtype=torch.bool, device=first_B1.device)
    for _ in range(length - 1):
        out = model(input_ids=columns[-1], use_cache=True, **{_CACHE: cache})
        cache = out[_CACHE]
        logits_BV = out.logits[:, -1].float()
        finite &= logits_BV.isfinite().all()
        probs_BV = torch.softmax(logits_BV.nan_to_num() / temperature, dim=-1)
        columns.append(torch.multinomial(probs_BV, 1, generator=generator))
    if not finite:
        raise FloatingPointError("the model's logits are not finite: no text can be drawn from it")
    return torch.cat(columns, dim=1)
