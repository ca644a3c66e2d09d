"""Config of a hybrid model: the geometry of the teacher plus one operator letter a query head."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from transformers import PretrainedConfig

LETTERS = "FGN"
"""F full attention, G Gated DeltaNet, N Native Hybrid Attention."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE variants whose frequencies do not change with the length of the input."""

GDN_DEFAULTS = {"rope": True, "norm": True, "gate": True, "bias": True, "conv": False}

FA_DEFAULTS: dict[str, Any] = {
    "rope_share": 1.0,
    "rope_fade": "slow_first",
    "log_scale": False,
    "log_scale_form": "shifted",
    "log_scale_tokens": None,
    "log_scale_training": True,
    "norm": False,
    "gate": False,
}
"""With these, full-attention heads are the teacher's."""

FA_CHOICES = {
    "rope_fade": ("slow_first", "angles", "mixed"),
    "log_scale_form": ("shifted", "clipped"),
}
"""Names of rotary.FADES and of positions.LOG_SCALES."""


class HydraHeadConfig(PretrainedConfig):
    """Geometry, head map and operator switches.

    head_map[l][h] is the letter of query head h of layer l; empty means full attention everywhere. window[l] and
    slots[l] size the NHA heads of layer l and are None where it has none. gdn holds the switches of the Gated
    DeltaNet heads (GDN_DEFAULTS); nha is reserved and must be empty. fa holds those of the full-attention heads
    (FA_DEFAULTS): rope_share 1 is RoPE, 0 none, between them rope_fade says what it is; log_scale multiplies queries by a factor of
    their position, with log_scale_tokens about the length trained at (max_position_embeddings where None), in training
    too if log_scale_training; norm is an RMSNorm of each head's output, times gamma; gate its output gate.

    Raises ValueError where a value is impossible; the message names the field.
    """

    model_type = "hydrahead"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    head_map: list[str] = field(default_factory=list)
    window: list[int | None] = field(default_factory=list)
    slots: list[int | None] = field(default_factory=list)
    gdn: dict[str, bool] = field(default_factory=dict)
    nha: dict[str, bool] = field(default_factory=dict)
    fa: dict[str, Any] = field(default_factory=dict)
    base_model_type: str | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.rope_parameters = dict(self.rope_parameters or {"rope_theta": 10000.0})
        self.rope_parameters.setdefault("rope_type", "default")
        layers = self.num_hidden_layers
        self.head_map = list(self.head_map or ["F" * self.num_attention_heads] * layers)
        self.window = list(self.window or [None] * layers)
        self.slots = list(self.slots or [None] * layers)
        self.gdn = {**GDN_DEFAULTS, **self.gdn}
        self.fa = {**FA_DEFAULTS, **self.fa}
        self._check()
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    def _check(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act {self.hidden_act!r}; allowed: 'silu'")
        if self.rope_parameters["rope_type"] not in ROPE_TYPES:
            raise ValueError(
                f"rope_parameters: {self.rope_parameters}; allowed rope_type: {ROPE_TYPES}"
            )
        unknown = set(self.gdn) - set(GDN_DEFAULTS), set(self.fa) - set(FA_DEFAULTS)
        if any(unknown) or self.nha:
            raise ValueError(
                f"unknown switches: gdn {sorted(unknown[0])}, nha {self.nha}, fa {sorted(unknown[1])}; "
                f"allowed: gdn {sorted(GDN_DEFAULTS)}, fa {sorted(FA_DEFAULTS)}"
            )
        self._check_fa()
        self._check_head_map()

    def _check_fa(self) -> None:
        share, tokens = self.fa["rope_share"], self.fa["log_scale_tokens"]
        if not 0 <= share <= 1:
            raise ValueError(f"fa.rope_share {share}; allowed: 0 to 1")
        for name, allowed in FA_CHOICES.items():
            if self.fa[name] not in allowed:
                raise ValueError(f"fa.{name} {self.fa[name]!r}; allowed: {', '.join(allowed)}")
        if tokens is not None and tokens < 2:
            raise ValueError(f"fa.log_scale_tokens {tokens}; allowed: 2 or more, or null")

    def _check_head_map(self) -> None:
        for name in ("head_map", "window", "slots"):
            if len(getattr(self, name)) != self.num_hidden_layers:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries, the model {self.num_hidden_layers} layers"
                )
        for layer, row in enumerate(self.head_map):
            if len(row) != self.num_attention_heads or set(row) - set(LETTERS):
                raise ValueError(
                    f"head_map[{layer}] is {row!r}; it needs {self.num_attention_heads} letters of {LETTERS}"
                )
            if "N" in row and not (self.window[layer] and self.slots[layer]):
                raise ValueError(
                    f"layer {layer} has NHA heads and needs a positive window and slots"
                )

    def heads(self, layer: int, letter: str) -> list[int]:
        """Query heads of a layer that run the operator of that letter, ascending."""
        return [head for head, own in enumerate(self.head_map[layer]) if own == letter]

    def kv_heads(self, layer: int, letter: str) -> list[int]:
        """KV heads of a layer that at least one query head of that letter reads, ascending."""
        group = self.num_attention_heads // self.num_key_value_heads
        return sorted({head // group for head in self.heads(layer, letter)})
