"""Recipes of a supernet that are worth comparing: what each changes in a config's section supernet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..config import SupernetConfig

Recipe = Mapping[str, Any]
"""Fields of section supernet, nested as there."""

RECIPES: dict[str, Recipe] = {
    "as configured": {},
    "random q, k, v": {"init": {"projections": "random"}},
    "q/k norms at 1": {"init": {"qk_norm": "ones"}},
    "half-life 1 x distance": {"init": {"half_life_share": 1.0}},
    "half-life 0.1 x distance": {"init": {"half_life_share": 0.1}},
    "half-life 64": {"init": {"half_life": "fixed", "half_life_tokens": 64.0}},
    "half-lives 4 to 1024": {"init": {"half_life": "spread"}},
    "write strength 0.5": {"init": {"write": "constant"}},
    "write strength 0.9": {"init": {"write": "constant", "write_strength": 0.9}},
    "scale a head": {"init": {"scale": "least_squares_by_head"}},
    "scale by RMS": {"init": {"scale": "rms"}},
    "scale 1": {"init": {"scale": "one"}},
    "bias from 0": {"init": {"bias": "zero"}},
    "no bias": {"gdn": {"bias": False}},
    "no gate": {"gdn": {"gate": False}},
    "no norm": {"gdn": {"norm": False}},
    "no RoPE": {"gdn": {"rope": False}},
    "convolution": {"gdn": {"conv": True}},
    "no norm, convolution": {"gdn": {"norm": False, "conv": True}},
    "norm and RMS scale alone": {
        "gdn": {"bias": False, "gate": False},
        "init": {"scale": "rms"},
    },
    "Taylor-Calibrate": {
        "gdn": {"bias": False},
        "init": {"half_life_share": 1.0, "scale": "least_squares_by_head"},
    },
    "nothing migrated or fitted": {
        "init": {
            "projections": "random",
            "half_life": "fixed",
            "write": "constant",
            "scale": "one",
            "bias": "zero",
        }
    },
    "rate 1e-3": {"learning_rate": 1e-3},
    "rate 2e-3": {"learning_rate": 2e-3},
    "rate 4e-3": {"learning_rate": 4e-3},
    "rate 8e-3": {"learning_rate": 8e-3},
    "batch 16384": {"batch_tokens": 16_384},
    "batch 8192": {"batch_tokens": 8_192},
    "batch 4096": {"batch_tokens": 4_096},
    "batch 4096, rate 4e-3": {"batch_tokens": 4_096, "learning_rate": 4e-3},
    "batch 4096, rate 8e-3": {"batch_tokens": 4_096, "learning_rate": 8e-3},
    "batch 2048, rate 4e-3": {"batch_tokens": 2_048, "learning_rate": 4e-3},
    "batch 1024, rate 4e-3": {"batch_tokens": 1_024, "learning_rate": 4e-3},
    "batch 4096, rate 4e-3, no norm": {
        "batch_tokens": 4_096,
        "learning_rate": 4e-3,
        "gdn": {"norm": False},
    },
}
"""Most differ from the config in one thing; rates and batches are compared at equal tokens."""


def distinct(base: SupernetConfig, names: Iterable[str]) -> dict[str, SupernetConfig]:
    """The configs of recipes by name; of those that come to the same the first alone."""
    found: dict[str, SupernetConfig] = {}
    for name in names:
        config = recipe_config(base, RECIPES[name])
        if config not in found.values():
            found[name] = config
    return found


def recipe_config(base: SupernetConfig, recipe: Recipe) -> SupernetConfig:
    """base with a recipe's fields in it. Raises ValidationError where the two contradict each other."""
    data = base.model_dump()
    for name, value in recipe.items():
        if isinstance(value, Mapping):
            data[name] |= value
        else:
            data[name] = value
    return SupernetConfig.model_validate(data)
