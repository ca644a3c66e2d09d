"""What the final stage is measured on: text behind that of trials, and prompts drawn anew. No torch."""

from __future__ import annotations

from ..config import RunConfig

FINAL_SEED = 300_007
"""Offset of the final prompts' seed from the run's, so that they are no trial's and none of search.retention."""


def final_config(config: RunConfig) -> RunConfig | None:
    """The config with as much held-out text and as many prompts as the final stage has, and its seed; None without one."""
    final, data, probes = config.search.final, config.data, config.probes
    if final.tokens is None:
        return None
    extra = tuple(
        text.model_copy(update={"sequences": final.sequences or text.sequences})
        for text in data.extra_heldout
    )
    rows = {
        "heldout_sequences": final.sequences or data.heldout_sequences,
        "extra_heldout": extra,
    }
    prompts = {"prompts": final.prompts or probes.prompts}
    return config.model_copy(
        update={
            "data": data.model_copy(update=rows),
            "probes": probes.model_copy(update=prompts),
            "seed": config.seed + FINAL_SEED,
        }
    )


def final_file(name: str) -> str:
    """The final stage's counterpart of a file of held-out text."""
    return f"final-{name}"
