"""Cutting candidates: all FA is the teacher, each head keeps its function, and copies share nothing."""

from dataclasses import replace

import pytest
import torch

from archsearch.headmap import HeadMap, Operator
from archsearch.models.cut import cut
from archsearch.models.teacher import Teacher
from tests.random_models import random_supernet, random_teacher, random_tokens


def head_outputs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Output of every head of the first layer before o_proj, [B, T, H * D]."""
    found = []
    projection = model.model.layers[0].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    with torch.no_grad():
        model(ids)
    handle.remove()
    return found[0]


def storages(model: torch.nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}


@pytest.fixture
def teacher(request: pytest.FixtureRequest) -> Teacher:
    return random_teacher(getattr(request, "param", "qwen3"), tied=True)


@pytest.mark.parametrize("teacher", ["llama", "qwen2", "qwen3"], indirect=True)
@pytest.mark.parametrize("copy", [True, False])
def test_cut_all_full_is_the_teacher(teacher: Teacher, copy: bool) -> None:
    ids = random_tokens(2, 40)
    student = cut(teacher, None, HeadMap.uniform(teacher.shape, Operator.FULL), copy=copy)
    with torch.no_grad():
        assert torch.equal(student.eval()(ids).logits, teacher.model(ids).logits)


@pytest.mark.parametrize("teacher", ["llama", "qwen2", "qwen3"], indirect=True)
def test_cut_mixes_teacher_and_twins(teacher: Teacher) -> None:
    """In the first layer each head's output equals that of the all-FA or the all-GDN model."""
    supernet, ids, dim = random_supernet(teacher), random_tokens(2, 33), teacher.shape.head_dim
    alone = {
        op.value: head_outputs(cut(teacher, supernet, HeadMap.uniform(teacher.shape, op)), ids)
        for op in (Operator.FULL, Operator.GDN)
    }
    for row in ("FGFG", "GGGF", "FFGF", "GFFG"):
        head_map = HeadMap(teacher.shape, (row, "GGGG", "FGGF"))
        found = head_outputs(cut(teacher, supernet, head_map), ids)
        for head, letter in enumerate(row):
            columns = slice(head * dim, (head + 1) * dim)
            torch.testing.assert_close(found[..., columns], alone[letter][..., columns])


def test_cut_wide_nha_window_is_the_teacher(teacher: Teacher) -> None:
    ids = random_tokens(2, 40)
    rows = ("NNFF", "NFNN", "FNFN")
    head_map = HeadMap(teacher.shape, rows, window=(64,) * 3, slots=(4, 8, 16))
    with torch.no_grad():
        difference = cut(teacher, None, head_map)(ids).logits - teacher.model(ids).logits
    assert difference.abs().max() < 1e-4


def test_cut_copy_shares_nothing(teacher: Teacher) -> None:
    supernet = random_supernet(teacher)
    head_map = HeadMap(teacher.shape, ("FFFF", "FFGG", "GGGG"))
    shared = cut(teacher, supernet, head_map, copy=False)
    copied = cut(teacher, supernet, head_map, copy=True)
    others = storages(teacher.model) | storages(supernet)
    assert not storages(copied) & others
    assert all(parameter.requires_grad for parameter in copied.parameters())
    assert copied.training
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert not any(parameter.requires_grad for parameter in shared.parameters())
    mlp, full = "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.full.k_proj.weight"
    for name in (mlp, full):
        assert (
            shared.get_parameter(name).untyped_storage().data_ptr()
            == teacher.model.get_parameter(name).untyped_storage().data_ptr()
        )
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())


def test_cut_refuses(teacher: Teacher) -> None:
    with pytest.raises(ValueError, match="need a supernet"):
        cut(teacher, None, HeadMap.uniform(teacher.shape, Operator.GDN))
    other = replace(teacher.shape, num_layers=5)
    with pytest.raises(ValueError, match="head map is for"):
        cut(teacher, None, HeadMap.uniform(other, Operator.FULL))
