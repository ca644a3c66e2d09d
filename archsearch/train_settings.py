"""The settings of one student's training: the run's config with what an option changes, and all that its result depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from .config import RunConfig
from .configfile import load_config
from .errors import ConfigError
from .fidelity_plan import FACTOR
from .headmap import HeadMap
from .rundir import RunDir
from .search.trial import SUPERNET_FILE

SETTABLE = ("distill", "long_context", "student", "probes", "harness", "kernels", "teacher.device")
"""Sections and fields of the run's config that --set may change: what they say is for the student alone."""
BY_THE_WAY = ("cache_gib", "checkpointing", "replay", "teacher_logits")
"""Fields of a training section that its result does not depend on, but for teacher_logits topk."""
MANY_TOKENS = 10**15


def read_settings(run_dir: RunDir, tokens: int | None, overrides: Sequence[str]) -> RunConfig:
    """The run's config as a training reads it, its tokens of distillation as the one proxy.

    Raises ConfigError for overrides of other sections, and tokens that are too few.
    """
    own = run_dir.load_config()
    for override in overrides:
        name = field_of(override)
        if name != "teacher.device" and name.partition(".")[0] not in SETTABLE:
            raise ConfigError(f"--set {override}: not allowed here; allowed: {', '.join(SETTABLE)}")
    if tokens is None:
        tokens = FACTOR * max(own.search.proxy_tokens)
        if not tokens:
            raise ConfigError("--tokens: the run has no proxy with tokens to go by; name a number")
    if tokens < 0:
        raise ConfigError(f"--tokens {tokens}: allowed: 0 or more")
    # Nothing is asked of what only a search reads, and whether the tokens suffice is said below.
    implied = [f"search={{proxy_tokens: [{MANY_TOKENS}]}}"]
    if own.distill.teacher_logits != "topk":
        # One form is as good as another where nothing is kept, and this one goes with every other field.
        implied.append("distill.teacher_logits=exact")
    config = load_config(run_dir / "config.json", [*implied, *overrides])
    config, full = with_tokens(config, tokens), config.student.full
    if not full.rope and whole_batches(config) < full.rope_fade_tokens:
        raise ConfigError(
            f"--tokens {tokens}: student.full.rope: false takes rope_fade_tokens ({full.rope_fade_tokens}) of "
            "distillation, in whole batches; allowed: as many or more"
        )
    return config


def with_tokens(config: RunConfig, tokens: int) -> RunConfig:
    """The config with so many tokens as its one proxy."""
    search = config.search.model_copy(update={"proxy_tokens": (tokens,)})
    return config.model_copy(update={"search": search})


def whole_batches(config: RunConfig) -> int:
    """The tokens of distillation in whole batches, one at least; none where none are asked for."""
    (tokens,) = config.search.proxy_tokens
    size = batch_tokens(config.distill.batch_tokens, config.data.sequence_length)
    return size * max(1, round(tokens / size)) if tokens else 0


def batch_tokens(most: int, length: int) -> int:
    """Tokens of a batch of whole rows, one at least."""
    return length * max(1, most // length)


def field_of(override: str) -> str:
    """The dotted path that `a.b=value` is about."""
    return override.partition("=")[0].strip()


def settings_of(
    run_dir: RunDir, config: RunConfig, head_map: HeadMap, tokens: int
) -> dict[str, Any]:
    """All that a training's result depends on, beside the run's text and the machine, as plain JSON data."""
    distill, long = config.distill, config.long_context
    with (run_dir / SUPERNET_FILE).open("rb") as file:
        supernet = hashlib.file_digest(file, "sha256").hexdigest()
    by_layer = ("layers", "window", "slots")
    return {
        "run": config.name,
        "seed": config.seed,
        "teacher": {"source": config.teacher.source, "dtype": config.teacher.dtype},
        "supernet_sha256": supernet,
        "head_map": {name: head_map.to_json()[name] for name in by_layer},
        "tokens": tokens,
        "niah_share": config.data.niah_share,
        "distill": distill.model_dump(mode="json", exclude={*BY_THE_WAY})
        | {"top_k": distill.top_k if distill.teacher_logits == "topk" else None},
        "full": config.student.full.model_dump(mode="json"),
        "long_context": long.model_dump(mode="json", exclude={*BY_THE_WAY})
        if long.tokens
        else None,
        "probes": config.probes.model_dump(mode="json"),
        "harness": config.harness.model_dump(mode="json"),
    }


def digest_of(settings: dict[str, Any]) -> str:
    """Twelve hex digits that tell trainings apart."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
