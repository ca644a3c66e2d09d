"""Supernets: migration from the teacher, storage whole and compact, and files that are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from archsearch.config import GdnConfig
from archsearch.errors import EnvironmentFault
from archsearch.models.supernet import METADATA_KEY, Supernet, read_meta
from tests.random_models import random_supernet, random_teacher


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_migrated_takes_the_teachers_projections(family: str) -> None:
    teacher = random_teacher(family)
    supernet = Supernet.migrated(teacher, GdnConfig())
    full, twin = teacher.model.model.layers[1].self_attn.full, supernet.twins[1]
    dim, group = teacher.shape.head_dim, teacher.shape.group_size
    assert torch.equal(twin.q_proj.weight, full.q_proj.weight)
    for head in range(teacher.shape.num_heads):
        rows, kv_head = slice(head * dim, (head + 1) * dim), head // group
        kv_rows = slice(kv_head * dim, (kv_head + 1) * dim)
        for name in ("k_proj", "v_proj"):
            mine, its = getattr(twin, name), getattr(full, name)
            assert torch.equal(mine.weight[rows], its.weight[kv_rows])
            if family == "qwen2":
                assert torch.equal(mine.bias[rows], its.bias[kv_rows])
    if family == "qwen3":
        assert torch.equal(twin.k_norm.weight, full.k_norm.weight)
    assert not any(parameter.requires_grad for parameter in supernet.parameters())


@pytest.mark.parametrize("conv", [True, False])
def test_save_whole_round_trip(tmp_path: Path, conv: bool) -> None:
    teacher, path = random_teacher("qwen3"), tmp_path / "supernet.safetensors"
    supernet = Supernet.migrated(teacher, GdnConfig(conv=conv, gate=False))
    supernet.meta = {"tokens": 12, "metrics": {"error": 0.5}}
    supernet.save(path, teacher)
    loaded = Supernet.load(path, teacher)
    assert loaded.options == supernet.options
    assert loaded.meta["tokens"] == 12
    assert loaded.meta["metrics"] == {"error": 0.5}
    for (name, a), (_, b) in zip(
        supernet.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("bits", [8, 4])
def test_save_low_rank_round_trip(tmp_path: Path, bits: int) -> None:
    teacher, path = random_teacher("qwen2"), tmp_path / "supernet.safetensors"
    migrated, supernet = Supernet.migrated(teacher, GdnConfig()), random_supernet(teacher)
    supernet.save(path, teacher, rank=12, bits=bits)
    loaded = Supernet.load(path, teacher)
    for name, start in migrated.named_parameters():
        wanted, found = supernet.get_parameter(name), loaded.get_parameter(name)
        change = (wanted - start).norm()
        large = name.endswith("_proj.weight") and wanted.shape[0] > 4
        limit = 0.75 if large else 0.01
        assert (found - wanted).norm() < limit * change, name


def test_save_low_rank_is_small(tmp_path: Path) -> None:
    teacher = random_teacher()
    supernet = random_supernet(teacher)
    whole, small = tmp_path / "whole.safetensors", tmp_path / "small.safetensors"
    supernet.save(whole, teacher)
    supernet.save(small, teacher, rank=2)
    assert small.stat().st_size < whole.stat().st_size / 4


def test_save_refuses_what_is_not_finite(tmp_path: Path) -> None:
    teacher, path = random_teacher(), tmp_path / "supernet.safetensors"
    supernet = random_supernet(teacher)
    with torch.no_grad():
        supernet.twins[0].gamma[0, 0] = float("nan")
    with pytest.raises(ValueError, match="gamma is not finite"):
        supernet.save(path, teacher)
    assert not path.exists()


def test_load_refuses_another_teacher(tmp_path: Path) -> None:
    teacher, other = random_teacher(seed=0), random_teacher(seed=1)
    path = tmp_path / "supernet.safetensors"
    random_supernet(teacher).save(path, teacher)
    with pytest.raises(EnvironmentFault, match="another teacher"):
        Supernet.load(path, other)
    assert Supernet.load(path, other, any_teacher=True)
    with pytest.raises(EnvironmentFault, match="model of shape"):
        Supernet.load(path, random_teacher(num_layers=2), any_teacher=True)


def test_load_refuses_damaged_files(tmp_path: Path) -> None:
    teacher, path = random_teacher(), tmp_path / "supernet.safetensors"
    with pytest.raises(EnvironmentFault, match="no such supernet"):
        read_meta(path)
    random_supernet(teacher).save(path, teacher)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EnvironmentFault, match="damaged"):
        Supernet.load(path, teacher)
    path.write_text("nothing of the kind")
    with pytest.raises(EnvironmentFault, match="damaged"):
        Supernet.load(path, teacher)


def test_load_refuses_facts_that_are_missing_or_unknown(tmp_path: Path) -> None:
    teacher, path = random_teacher(), tmp_path / "supernet.safetensors"
    supernet = random_supernet(teacher)
    supernet.save(path, teacher)
    tensors, meta = load_file(path), read_meta(path)
    for changed, message in (
        ({key: value for key, value in meta.items() if key != "gdn"}, "no gdn"),
        (meta | {"gdn": {"spin": True}}, "unknown here"),
    ):
        save_file(tensors, path, metadata={METADATA_KEY: json.dumps(changed)})
        with pytest.raises(EnvironmentFault, match=message):
            Supernet.load(path, teacher)
