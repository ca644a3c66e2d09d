"""The sections of a config that say how a candidate is trained; config.py has the others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .textconfig import NonNegative, Positive, Rate, Section, Share

Weight = Annotated[float, Field(ge=0)]

FORK_SHARE = 0.2
"""Share of a reading's tokens, the last ones, over which its rate falls, where a config lets it fall from the start."""


class DistillConfig(Section):
    """How a candidate is distilled for a proxy with tokens: its loss, its rates, and what is kept of the teacher."""

    learning_rate: Rate = 3e-4
    batch_tokens: Positive = 4_096
    warmup_steps: NonNegative = 2
    decay_share: Share = 1.0
    """Share of a proxy's tokens, the last ones, over which the rate falls. With less than 1 a longer proxy goes on from
    where the rate was still whole; with 1, from the end."""
    trainable: Literal["attention", "all"] = "attention"
    kl_weight: Weight = 1.0
    """Weight of KL(teacher || student), mean nats a token."""
    ce_weight: Weight = 0.0
    """Weight of the cross-entropy with the text's own next token."""
    hidden_weight: Weight = 0.0
    """Weight of the squared error of the final hidden states, over the teacher's mean square."""
    teacher_logits: Literal["exact", "hidden", "mean_row", "topk"] = "hidden"
    """What is kept of the teacher's answer to a batch, which all candidates see. exact: nothing, it runs each time.
    hidden: its final hidden states, which give the same logits. mean_row: the row of the head that it expects; exact
    too, cheapest, and only while the head is not trained. topk: its top_k likeliest tokens, the rest taken as one."""
    top_k: Positive = 64
    cache_gib: Weight = 4.0
    """Memory of a worker for that; what is beyond goes to the run directory."""
    checkpointing: bool = False
    """Compute each layer a second time in the backward pass instead of keeping what it made."""
    replay: bool = False
    """On a GPU, record the student's part of a step as a CUDA graph and replay it: fewer launches, for small batches."""
    packed: bool = False
    """Keep the documents of a row apart, attention and memory alike: as the training text marks them, else they end at
    each end-of-text token."""

    @model_validator(mode="after")
    def _possible(self) -> DistillConfig:
        if not (self.kl_weight or self.ce_weight):
            raise ValueError("kl_weight and ce_weight are both 0: nothing to learn from")
        if self.teacher_logits == "mean_row" and self.trainable != "attention":
            raise ValueError(
                f"teacher_logits: mean_row needs trainable: attention, not {self.trainable}"
            )
        if self.replay and (self.checkpointing or self.packed):
            raise ValueError("replay goes with neither checkpointing nor packed")
        if self.hidden_weight and self.teacher_logits not in ("exact", "hidden"):
            raise ValueError(
                f"hidden_weight needs teacher_logits: exact or hidden, not {self.teacher_logits}"
            )
        return self


class LongContextConfig(Section):
    """Tuning of a chosen hybrid on long sequences, after distillation; the search does not do that to its candidates."""

    tokens: NonNegative = 0
    sequence_length: Positive = 16_384
    batch_tokens: Positive = 65_536
    learning_rate: Rate = 1e-5
    warmup_steps: NonNegative = 20
    decay_share: Share = 1.0
    """Share of the tokens, the last ones, over which the rate falls."""
    loss: Literal["next_token", "kl"] = "next_token"
    """Cross-entropy with the text, or KL from the teacher, which has to reach that far itself."""
    trainable: Literal["attention", "all"] = "all"
    checkpointing: bool = True
    packed: bool = False
