"""The config of a run: pydantic models that forbid unknown keys and say what each value may be.

Reading YAML with line numbers, `--set` and the one-line errors lives in configfile.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .metrics import GeneralKind, Metric, MetricName, ProbeKind, RetrievalKind
from .searchconfig import FinalConfig, HalvingConfig
from .studentconfig import FullConfig, StudentConfig
from .textconfig import (
    DataConfig,
    HarnessConfig,
    HeldoutConfig,
    NonNegative,
    Positive,
    ProbeConfig,
    ProbeFile,
    Rate,
    Section,
    TextConfig,
)
from .trainconfig import DistillConfig, LongContextConfig
from .twinconfig import (
    GdnConfig,
    HalfLifeName,
    ScaleName,
    SupernetConfig,
    TwinInitConfig,
    WriteName,
)

# Every section can be had from here, wherever it is written down.
__all__ = [
    "DataConfig",
    "DistillConfig",
    "FinalConfig",
    "FullConfig",
    "GdnConfig",
    "GeneralKind",
    "HalfLifeName",
    "HalvingConfig",
    "HarnessConfig",
    "HeldoutConfig",
    "LongContextConfig",
    "Metric",
    "ProbeConfig",
    "ProbeFile",
    "ProbeKind",
    "RetrievalKind",
    "ScaleName",
    "Section",
    "StudentConfig",
    "SupernetConfig",
    "TextConfig",
    "TwinInitConfig",
    "WriteName",
]

SCHEMA = 1

ScoreMethod = Literal[
    "causal",
    "attribution",
    "retrieval_heads",
    "duo_gates",
    "replacement_kl",
    "replacement_nll",
    "leave_one_in",
    "restoration",
]
"""What heads are scored by; scoring.methods.METHODS has what each does."""
SeedMethod = Literal[
    "all_full",
    "all_gdn",
    "causal",
    "causal_per_layer",
    "causal_per_layer_groups",
    "causal_groups",
    "attribution",
    "attribution_groups",
    "retrieval_heads",
    "retrieval_heads_groups",
    "duo_gates",
    "replacement_kl",
    "replacement_kl_groups",
    "replacement_nll",
    "replacement_nll_groups",
    "leave_one_in",
    "leave_one_in_groups",
    "restoration",
    "blend",
    "blend_groups",
    "program",
    "program_groups",
    "program_bytes",
    "program_both",
    "program_both_groups",
    "program_both_bytes",
    "even_layers",
    "random",
    "random_groups",
]
"""Head maps to start from; NAME_groups keeps whole KV groups, restoration and even_layers whole layers. program is an integer
program over the damages of single replacements, KL alone or (both) KL and retrieval NLL; NAME_bytes has the cache of
even_layers at the share as its budget."""


class TeacherConfig(Section):
    """The pretrained full-attention model that is searched over."""

    source: Annotated[str, Field(min_length=1)]
    """Hub id, folder, .gguf file, or `package:NAME/PATH` inside an installed Python package."""
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    trust_remote_code: bool = False
    random_weights: bool = False
    """Take the architecture only and draw the weights at random: for dry runs of the machinery."""


class ScoringConfig(Section):
    """Head scores that seed and guide the search."""

    methods: tuple[ScoreMethod, ...] = ()
    """Scores to compute beside causal and those that search.seeds.methods and the search itself need."""
    retrieval: tuple[RetrievalKind, ...] = (
        "single",
        "multikey",
        "multivalue",
        "multiquery",
        "tracking",
    )
    """Sub-probes of the capability "retrieval"; none leaves it out."""
    general: tuple[GeneralKind, ...] = ("copying", "labels", "arithmetic", "lookup", "agreement")
    """Sub-probes of the capability "general"; none leaves it out."""
    pairs_file: str | None = None
    """JSONL of own pairs, a line {clean, corrupt, answer, distractor} each, optionally capability ("user" where not
    given) and probe (its sub-probe, "pairs" where not given); `package:` works."""
    pairs: Positive = 8
    """Clean and corrupt pairs of each sub-probe, counting only those that the teacher answers."""
    max_draws: Annotated[int, Field(ge=1)] = 4
    """Most pairs drawn for each one wanted, before a sub-probe makes do with fewer."""
    min_pairs: Positive = 4
    """Least pairs a capability, all its sub-probes together; with fewer the run ends."""
    contexts: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1024,)
    """Lengths in tokens of retrieval pairs, by turns."""
    min_gap: Annotated[float, Field(ge=0)] = 1.0
    """Least difference, in logits, between what the teacher thinks of the answer on the clean and on the corrupt
    prompt; pairs with less are dropped, since effects are shares of it."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Weight of answer token j is decay**j."""
    threshold: Annotated[float, Field(ge=0)] = 0.01
    """Effect above which a sub-probe counts towards a head's consistency."""
    sender_pairs: NonNegative = 8
    """Pairs a capability on which sender effects are measured, spread over its sub-probes; 0 leaves them out."""
    receiver_share: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Most heads, as a share of all, that a round of path patching takes as receivers."""
    sender_rounds: Positive = 3
    """Most rounds of path patching; fewer where no round finds a new receiver."""
    memory_gib: Rate = 4.0
    """Working memory that scores may take beside the model; work is cut into pieces that fit."""
    replacement_sequences: Positive = 1
    """Held-out sequences on which each head alone is replaced by its twin."""
    replacement_length: Annotated[int, Field(ge=4)] = 512
    """Tokens of each such sequence."""
    gate_steps: Positive = 200
    """Optimiser steps of the learned gates (duo_gates)."""

    @model_validator(mode="after")
    def _probed(self) -> ScoringConfig:
        for name in ("retrieval", "general", "methods", "contexts"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names a value twice")
        if not (self.retrieval or self.general or self.pairs_file):
            raise ValueError(
                "retrieval, general and pairs_file are all empty: nothing to score heads by"
            )
        return self


class ObjectiveConfig(Section):
    """One objective of the search."""

    metric: MetricName
    direction: Literal["minimize", "maximize"]


class ConstraintConfig(Section):
    """A hard bound on one metric."""

    metric: MetricName
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _bounded(self) -> ConstraintConfig:
        if self.min is None and self.max is None:
            raise ValueError("a constraint needs min, max or both")
        return self

    @property
    def text(self) -> str:
        """The bound in words."""
        ends = (("at least", self.min), ("at most", self.max))
        return f"{self.metric} {' and '.join(f'{word} {end:.10g}' for word, end in ends if end is not None)}"


class SeedConfig(Section):
    """Baselines evaluated before the sampler proposes anything; each is tagged with its method."""

    methods: tuple[SeedMethod, ...] = (
        "all_full",
        "all_gdn",
        "causal",
        "causal_per_layer",
        "replacement_kl",
        "even_layers",
        "random",
    )
    fa_shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.5, 0.25, 0.125)
    random_maps: Positive = 1
    """Random maps at each share, of random and of random_groups."""
    every_selector: bool = True
    """After methods also every other selector whose scores the run has, program at all shares first, then share by share,
    while there are fewer seeds than half of the trials."""


class RetentionConfig(Section):
    """After the last proxy: what the best found map of few FA heads keeps of the teacher's accuracy, beside baselines."""

    prompts: NonNegative = 0
    """Prompts of each kind (and context), none of them a trial's; 0 leaves it out."""
    fa_share: Annotated[float, Field(gt=0, lt=1)] = 0.125
    """Most FA heads, as a share of all."""
    kinds: Annotated[tuple[RetrievalKind, ...], Field(min_length=1)] = ("multikey",)
    methods: tuple[SeedMethod, ...] = ("random", "even_layers")
    """Baselines of that share, trained on as many tokens."""
    random_maps: Positive = 1


class SearchConfig(Section):
    """What is searched, by what, and for how long."""

    operators: tuple[Literal["F", "G"], ...] = ("F", "G")
    trials: Positive = 64
    """Head maps evaluated, seeds included."""
    representation: Literal["ranked", "groups", "free"] = "ranked"
    """ranked: a few numbers that pick the top of a blend of scores; groups: one bit a KV group; free: one bit a head."""
    sampler: Literal["tpe", "nsga2", "nsga3", "gp", "random", "guided"] = "tpe"
    """guided and random choose bits; all but guided choose the numbers of ranked."""
    objectives: Annotated[tuple[ObjectiveConfig, ...], Field(min_length=1, max_length=3)] = (
        ObjectiveConfig(metric="kl", direction="minimize"),
        ObjectiveConfig(metric="cache_bytes", direction="minimize"),
    )
    constraints: tuple[ConstraintConfig, ...] = ()
    proxy_tokens: Annotated[tuple[NonNegative, ...], Field(min_length=1, max_length=3)] = (0,)
    """Distillation tokens before evaluation: the first for every candidate, each later one for the
    fronts of the one before (the front, the seeds' and the random control's), or for those that halving takes."""
    halving: HalvingConfig | None = None
    max_promoted: Positive | None = None
    """Most points of each of these fronts that go on, those that add most hypervolume; all where not given."""
    max_minutes: Rate | None = None
    """Minutes after which nothing more is begun, over all calls of a run; shared by the proxies, so that each has time."""
    max_tokens: Positive | None = None
    """Tokens of distillation in all, shared by the proxies in the same way; the random control counts."""
    patience: Positive | None = None
    """Head maps in a row, after the seeds, that add no hypervolume to the first proxy's front before no more are chosen."""
    min_gain: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Hypervolume that these must add together, as a share of the box, to count as a gain."""
    seeds: SeedConfig = SeedConfig()
    final: FinalConfig = FinalConfig()
    retention: RetentionConfig = RetentionConfig()
    random_control: bool = True
    """Also evaluate as many random head maps, to print what the search gains over them."""
    storage: str | None = None
    """Optuna storage URL; SQLite in the run directory where it is not given."""
    max_retries: NonNegative = 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of distillation of each rung: the proxies, and the final stage where there is one."""
        return (
            self.proxy_tokens
            if self.final.tokens is None
            else (*self.proxy_tokens, self.final.tokens)
        )

    def is_final(self, rung: int) -> bool:
        """Whether a rung, an index into lengths, is the final stage."""
        return rung == len(self.proxy_tokens)

    @model_validator(mode="after")
    def _consistent(self) -> SearchConfig:
        if len(set(self.operators)) < 2:
            raise ValueError("operators needs at least two different operators")
        if list(self.proxy_tokens) != sorted(set(self.proxy_tokens)):
            raise ValueError("proxy_tokens must ascend without repeats")
        if self.final.tokens is not None and self.final.tokens <= self.proxy_tokens[-1]:
            raise ValueError(
                f"final.tokens: {self.final.tokens} is no more than the last proxy's; allowed: above "
                f"{self.proxy_tokens[-1]}"
            )
        if self.halving is not None and self.max_promoted is not None:
            raise ValueError("max_promoted and halving both say who goes on; allowed: one of them")
        bits = self.representation != "ranked"
        if bits and self.sampler not in ("guided", "random"):
            raise ValueError(
                f"sampler {self.sampler} has no bits to choose; allowed with representation "
                f"{self.representation}: guided, random"
            )
        if not bits and self.sampler == "guided":
            raise ValueError("sampler guided chooses bits; allowed: representation groups or free")
        metrics = [objective.metric for objective in self.objectives]
        if len(set(metrics)) != len(metrics):
            raise ValueError("objectives name a metric twice")
        return self


class CostConfig(Section):
    """Where the analytic costs are read off."""

    context: Positive = 32_768
    """Tokens of context at which cache_bytes is counted."""
    element_bytes: Literal[1, 2, 4] = 2


class ExecutionConfig(Section):
    """How trials run in parallel."""

    executor: Literal["ray", "serial"] = "ray"
    workers: Positive = 1
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0
    threads_per_worker: NonNegative = 0
    """Torch threads a worker; 0 shares the cores evenly."""


class KernelsConfig(Section):
    """Who computes the heads: auto takes the first backend in order that can, or what the environment variables
    HYDRAHEAD_GDN_BACKEND, _FULL_, _PROLOGUE_ and _FUSION_BACKEND ask for."""

    gdn: Literal["auto", "triton", "flashqla", "fla", "torch"] = "auto"
    full: Literal["auto", "cudnn", "flash_attn", "sdpa", "torch"] = "auto"
    prologue: Literal["auto", "triton", "torch"] = "auto"
    """Norm and RoPE of q and k before the heads."""
    fusion: Literal["auto", "triton", "torch"] = "auto"
    """Norm, gamma, bias and gate of GDN heads after them, and the way back to the order of heads."""


class RunConfig(Section):
    """A whole config file."""

    schema_: Literal[1] = Field(alias="schema")
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    seed: NonNegative = 0
    teacher: TeacherConfig
    data: DataConfig = DataConfig()
    probes: ProbeConfig = ProbeConfig()
    harness: HarnessConfig = HarnessConfig()
    scoring: ScoringConfig = ScoringConfig()
    supernet: SupernetConfig = SupernetConfig()
    search: SearchConfig = SearchConfig()
    cost: CostConfig = CostConfig()
    student: StudentConfig = StudentConfig()
    distill: DistillConfig = DistillConfig()
    long_context: LongContextConfig = LongContextConfig()
    kernels: KernelsConfig = KernelsConfig()
    execution: ExecutionConfig = ExecutionConfig()

    @model_validator(mode="after")
    def _fitting(self) -> RunConfig:
        missing = set(self.search.retention.kinds) - set(self.probes.kinds)
        if self.search.retention.prompts and missing:
            raise ValueError(
                f"search.retention.kinds: {min(missing)} is not among probes.kinds; allowed: one of them"
            )
        full, tokens = self.student.full, max(self.search.proxy_tokens)
        if not full.rope and tokens < full.rope_fade_tokens:
            raise ValueError(
                f"student.full.rope: false takes rope_fade_tokens ({full.rope_fade_tokens}) of distillation; "
                f"search.proxy_tokens has {tokens} at most"
            )
        return self
