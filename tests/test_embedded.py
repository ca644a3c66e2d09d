"""The models that ship with the package do what their configs rely on."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from archsearch.config import RunConfig, SeedConfig
from archsearch.configfile import load_config
from archsearch.data.tasks import make_probes
from archsearch.evaluation.retrieval import retrieval
from archsearch.models.cut import cut
from archsearch.models.sources import resolve_path
from archsearch.models.supernet import Supernet, read_meta
from archsearch.models.teacher import Teacher, load_teacher
from archsearch.search.seeds import seed_maps

SPACES = Path(__file__).parents[1] / "search_spaces"
BINARIES = (".safetensors", ".npy")


@pytest.fixture(scope="module")
def tiny() -> RunConfig:
    return load_config(SPACES / "tiny.yaml", [])


@pytest.fixture(scope="module")
def teacher(tiny: RunConfig) -> Teacher:
    return load_teacher(tiny.teacher)


@pytest.mark.parametrize(("context", "keys"), [(256, 8), (512, 24), (1024, 24)])
def test_the_tiny_teacher_retrieves_among_many_keys(
    tiny: RunConfig, teacher: Teacher, context: int, keys: int
) -> None:
    probes = make_probes(
        teacher.tokenizer, "multikey", 20, context, keys=keys, digits=tiny.probes.digits, seed=41
    )
    assert retrieval(teacher.model, probes, batch_tokens=4096)["niah_multikey_match"] >= 0.95


def test_random_maps_at_an_eighth_lose_at_least_half_of_the_retrieval(
    tiny: RunConfig, teacher: Teacher
) -> None:
    supernet = Supernet.load(resolve_path(tiny.supernet.source), teacher)
    probes = make_probes(
        teacher.tokenizer,
        "multikey",
        16,
        tiny.probes.contexts[0],
        keys=tiny.probes.multi_keys,
        digits=tiny.probes.digits,
        seed=42,
    )
    matches = []
    for seed in range(5):
        only = SeedConfig(methods=("random",), fa_shares=(0.125,))
        (found,) = seed_maps(teacher.shape, {}, only, seed)
        student = cut(teacher, supernet, found.head_map, copy=False)
        matches.append(retrieval(student, probes, batch_tokens=4096)["niah_multikey_match"])
    assert (
        mean(matches)
        <= 0.5 * retrieval(teacher.model, probes, batch_tokens=4096)["niah_multikey_match"]
    )


@pytest.mark.parametrize("name", ["tiny", "smollm2_135m"])
def test_training_text_and_held_out_text_are_disjoint(name: str) -> None:
    data = load_config(SPACES / f"{name}.yaml", []).data
    assert data.train.path is not None
    assert data.heldout.path is not None
    train, heldout = (np.load(resolve_path(path)) for path in (data.train.path, data.heldout.path))
    # A window of 32 tokens drawn twice by chance is out of the question after the first few.
    seen = {
        row[start : start + 32].tobytes() for row in train for start in range(64, len(row) - 32)
    }
    windows = [row[start : start + 32].tobytes() for row in heldout for start in (128, 256, 448)]
    assert not seen.intersection(windows)


def test_the_shipped_models_stay_small() -> None:
    assets = SPACES.parent / "archsearch" / "assets"
    sizes = {p: p.stat().st_size for p in assets.rglob("*") if p.suffix in BINARIES}
    assert sum(sizes.values()) <= 12e6
    models = [p for p in sizes if p.suffix == ".safetensors"]
    assert sum(sizes[p] for p in models if "tiny" in p.parts) <= 8e6
    assert sum(sizes[p] for p in models if "smollm2_135m" in p.parts) <= 4e6


def test_the_smollm2_supernet_saw_enough_tokens() -> None:
    config = load_config(SPACES / "smollm2_135m.yaml", [])
    assert read_meta(resolve_path(config.supernet.source))["tokens"] >= 4_000_000
