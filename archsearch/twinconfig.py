"""The sections of a config that say what twins are, what they start from and how they are aligned; config.py has the others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .textconfig import NonNegative, Positive, Rate, Section, Share

HalfLifeName = Literal["attention", "fixed", "spread"]
WriteName = Literal["entropy", "constant"]
ScaleName = Literal["least_squares", "least_squares_by_head", "rms", "one"]


class GdnConfig(Section):
    """Options of the Gated DeltaNet twin."""

    rope: bool = True
    norm: bool = True
    """RMSNorm of each head's output before gamma."""
    gate: bool = True
    """Output gate 2 * sigmoid(W_g x), which starts as the identity."""
    bias: bool = True
    """A constant vector a head, added after gamma."""
    conv: bool = False
    """Causal depthwise convolution (width 4) on q, k and v, started as the identity."""


class TwinInitConfig(Section):
    """What a twin is before any gradient step. A field that another one leaves unread is an error where it is given."""

    projections: Literal["migrated", "random"] = "migrated"
    """q, k and v: the teacher's, K and V repeated to every query head, or random."""
    qk_norm: Literal["teacher", "ones"] = "teacher"
    """Weights of the norms of q and k, where the teacher has such norms. With ones they change nothing, since q and k
    get unit length after them."""
    half_life: HalfLifeName = "attention"
    """Half-life of the memory: half_life_share of the distance that the head looks back, half_life_tokens, or over
    half_life_span, a layer's heads evenly in its logarithm."""
    half_life_share: Rate = 0.5
    """On SmolLM2-135M shares from 0.1 to 0.5 start equally close, 1 farther; of these the longest memory, which
    retrieval needs."""
    half_life_tokens: Rate = 64.0
    half_life_span: tuple[Rate, Rate] = (4.0, 1024.0)
    write: WriteName = "entropy"
    """Writing strength: 0.3 to 0.7 by how sharply the head looks, or write_strength."""
    write_strength: Annotated[float, Field(ge=0.01, le=0.99)] = 0.5
    scale: ScaleName = "least_squares"
    """gamma: the best number a channel or a head, the number a head that gives it its head's RMS, or 1."""
    bias: Literal["fitted", "zero"] = "fitted"
    """The constant vector, where twins have one: what is best beside gamma, or zero."""

    @model_validator(mode="after")
    def _read(self) -> TwinInitConfig:
        readers = {
            "half_life_share": ("half_life", "attention"),
            "half_life_tokens": ("half_life", "fixed"),
            "half_life_span": ("half_life", "spread"),
            "write_strength": ("write", "constant"),
        }
        for name, (reader, needed) in readers.items():
            if name in self.model_fields_set and getattr(self, reader) != needed:
                default = type(self).model_fields[name].default
                if getattr(self, name) != default:
                    raise ValueError(f"{name} is read with {reader}: {needed} only")
        return self


class SupernetConfig(Section):
    """The bank of trained twins that candidates are cut from."""

    source: str = "train"
    """`train`, or a supernet file (.safetensors; `package:` works)."""
    tokens: Positive = 4_000_000
    batch_tokens: Positive = 4_096
    """Many small steps go farther on the same tokens than few large ones, down to a single row."""
    learning_rate: Rate = 4e-3
    """At hidden sizes of 192 and 576 twice as much does still better, 1e-3 far worse; wider models may need less."""
    warmup_steps: NonNegative = 50
    checkpoint_minutes: Rate = 2.0
    rank: NonNegative = 0
    """Rank of the stored deltas from the teacher's weights; 0 keeps them whole."""
    replay: bool = False
    """On a GPU, record a step as a CUDA graph and replay it: the same work with fewer launches, for small batches."""
    stop_below: Rate | None = None
    """A layer whose training error, mean over its heads, is below this is trained no further."""
    stop_gain: Share | None = None
    """Nor is one whose error fell by less than this share over the last tenth of the steps."""
    gdn: GdnConfig = GdnConfig()
    init: TwinInitConfig = TwinInitConfig()
