"""A student's full-attention heads at their start, and the way from RoPE to NoPE."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from archsearch.headmap import HeadMap, Operator
from archsearch.models.cut import cut
from archsearch.models.full_heads import (
    FullBranch,
    full_branch,
    full_switches,
    measure_gamma,
    rope_fader,
    rope_share,
)
from archsearch.models.teacher import Teacher
from archsearch.studentconfig import FullConfig
from tests.random_models import random_supernet, random_teacher, random_tokens

IDS = random_tokens(3, 40)
EVERYTHING = {"rope": False, "log_scale": True, "norm": True, "gate": True}


@pytest.fixture
def teacher(request: pytest.FixtureRequest) -> Teacher:
    return random_teacher(getattr(request, "param", "qwen3"), tied=True)


def branch(teacher: Teacher, **options: object) -> FullBranch:
    return full_branch(teacher, FullConfig.model_validate(options), IDS)


def head_outputs(model: nn.Module, layer: int, dim: int) -> Tensor:
    """[B, T, H, D] before o_proj."""
    found = []
    projection = model.model.layers[layer].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    with torch.no_grad():
        model(IDS)
    handle.remove()
    output: Tensor = found[0].unflatten(-1, (-1, dim))
    return output


@pytest.mark.parametrize("teacher", ["llama", "qwen2", "qwen3"], indirect=True)
@pytest.mark.parametrize("copy", [True, False])
def test_an_all_full_student_with_a_gate_and_with_rope_to_lose_starts_as_the_teacher(
    teacher: Teacher, copy: bool
) -> None:
    """So does one whose queries are scaled beyond the window alone."""
    everywhere = HeadMap.uniform(teacher.shape, Operator.FULL)
    options = {"rope": False, "gate": True, "log_scale": True, "log_scale_form": "clipped"}
    student = cut(teacher, None, everywhere, copy=copy, full=branch(teacher, **options)).eval()
    with torch.no_grad():
        assert torch.equal(student(IDS).logits, teacher.model(IDS).logits)


def test_gamma_is_the_mean_rms_and_leaves_what_least_squares_leave(teacher: Teacher) -> None:
    """Head by head: the student differs from the teacher in the spread of its RMS over tokens alone."""
    dim, everywhere = teacher.shape.head_dim, HeadMap.uniform(teacher.shape, Operator.FULL)
    gamma_LH = measure_gamma(teacher, IDS)
    student = cut(teacher, None, everywhere, full=branch(teacher, norm=True))
    for layer in range(teacher.shape.num_layers):
        o_BTHD = head_outputs(teacher.model, layer, dim).double()
        rms_BTH = o_BTHD.square().mean(-1).sqrt()
        torch.testing.assert_close(gamma_LH[layer].double(), rms_BTH.mean((0, 1)))
        normed_BTHD = o_BTHD / rms_BTH[..., None]

        def left(scale_H: Tensor, normed: Tensor = normed_BTHD, o: Tensor = o_BTHD) -> Tensor:
            return (normed * scale_H[:, None] - o).square().sum((0, 1, 3))

        scale_H = gamma_LH[layer].double()
        share_H = left(scale_H) / o_BTHD.square().sum((0, 1, 3))
        expected_H = 1 - rms_BTH.mean((0, 1)) ** 2 / rms_BTH.square().mean((0, 1))
        torch.testing.assert_close(share_H, expected_H)
        assert bool((left(0.9 * scale_H) > left(scale_H)).all())
        assert bool((left(1.1 * scale_H) > left(scale_H)).all())
        if layer == 0:
            found_BTHD = head_outputs(student, 0, dim).double()
            torch.testing.assert_close(
                found_BTHD, normed_BTHD * scale_H[:, None], atol=1e-4, rtol=1e-4
            )


def test_gamma_does_not_depend_on_how_tokens_are_cut_into_batches(teacher: Teacher) -> None:
    apart = torch.stack([measure_gamma(teacher, ids_T[None]) for ids_T in IDS])
    torch.testing.assert_close(measure_gamma(teacher, IDS), apart.mean(0))
    assert not teacher.model.model.layers[0].self_attn.o_proj._forward_pre_hooks


def test_a_norm_without_gamma_is_refused(teacher: Teacher) -> None:
    everywhere = HeadMap.uniform(teacher.shape, Operator.FULL)
    assert branch(teacher, gate=True).gamma_LH is None
    with pytest.raises(ValueError, match=r"student\.full\.norm needs the gamma"):
        cut(teacher, None, everywhere, full=FullBranch(FullConfig(norm=True)))


def test_a_copy_has_the_new_parameters_as_its_own(teacher: Teacher) -> None:
    """Under names that the training of attention takes, and its files hold."""
    head_map = HeadMap(teacher.shape, ("FGGF", "GGGG", "FFFG"))
    full = branch(teacher, **EVERYTHING)
    student = cut(teacher, random_supernet(teacher), head_map, copy=True, full=full)
    dim = teacher.shape.head_dim
    trained = {name: x for name, x in student.named_parameters() if ".self_attn." in name}
    for layer, heads in ((0, [0, 3]), (2, [0, 1, 2])):
        prefix = f"model.layers.{layer}.self_attn.full."
        gate, gamma = trained[prefix + "gate_proj.weight"], trained[prefix + "gamma"]
        assert gate.shape == (len(heads) * dim, 32)
        assert not bool(gate.any())
        assert full.gamma_LH is not None
        assert torch.equal(gamma.detach(), full.gamma_LH[layer, heads, None].expand(-1, dim))
        assert gate.requires_grad
        assert gamma.requires_grad
        assert gamma.untyped_storage().data_ptr() != full.gamma_LH.untyped_storage().data_ptr()
    assert not any(".layers.1.self_attn.full." in name for name in trained)
    student(IDS, labels=IDS).loss.backward()
    for name, parameter in trained.items():
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()), name


@pytest.mark.parametrize("rows", [("FGGF", "GGGG", "FFFG"), ("FFFF", "NNFN", "GNGF")])
def test_heads_without_switches_are_cut_as_before(teacher: Teacher, rows: tuple[str, ...]) -> None:
    head_map = HeadMap(teacher.shape, rows, window=(8,) * 3, slots=(4,) * 3)
    supernet = random_supernet(teacher)
    plain, given = (
        cut(teacher, supernet, head_map, full=full) for full in (None, FullBranch(FullConfig()))
    )
    assert plain.config.to_dict() == given.config.to_dict()
    assert plain.state_dict().keys() == given.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(plain(IDS).logits, given(IDS).logits)


def test_switches_are_what_the_model_takes(teacher: Teacher) -> None:
    """Every option but the schedule's is one of the model's config, under the same name."""
    everywhere = HeadMap.uniform(teacher.shape, Operator.FULL)
    for values in itertools.product((False, True), repeat=4):
        options = dict(zip(EVERYTHING, values, strict=True))
        full = branch(teacher, rope_fade_tokens=100, log_scale_tokens=77, **options)
        config = cut(teacher, None, everywhere, full=full).config
        assert config.fa == full_switches(full.options)
        assert config.fa["rope_share"] == 1
        assert full_switches(full.options, 100)["rope_share"] == float(options["rope"])
        assert {name: config.fa[name] for name in ("log_scale", "norm", "gate")} == {
            name: value for name, value in options.items() if name != "rope"
        }
        assert config.fa["log_scale_tokens"] == 77


def test_the_share_falls_evenly_and_is_exact_at_both_ends() -> None:
    options = FullConfig(rope=False, rope_fade_tokens=700)
    found = [rope_share(options, tokens) for tokens in range(0, 1400, 7)]
    assert (found[0], found[99], set(found[100:])) == (1.0, pytest.approx(0.01), {0.0})
    steps = torch.tensor(found[:101]).diff()
    torch.testing.assert_close(steps, torch.full((100,), -0.01), atol=1e-6, rtol=1e-4)
    assert {rope_share(FullConfig(), tokens) for tokens in (0, 10**9)} == {1.0}
    assert rope_share(FullConfig(rope=False, rope_fade_tokens=0), 0) == 0.0


def test_the_hook_of_training_sets_the_share_of_the_model(teacher: Teacher) -> None:
    options = FullConfig(rope=False, rope_fade_tokens=400)
    everywhere = HeadMap.uniform(teacher.shape, Operator.FULL)
    student = cut(teacher, None, everywhere, copy=True, full=FullBranch(options)).eval()
    fade, logits = rope_fader(student, options, batch_tokens=100), []
    for step in (0, 1, 2, 3, 4, 9):
        fade(step, 10)
        assert student.config.fa["rope_share"] == [1, 0.75, 0.5, 0.25, 0, 0][min(step, 5)]
        with torch.no_grad():
            logits.append(student(IDS).logits)
    assert torch.equal(logits[0], teacher.model(IDS).logits)
    assert all(not torch.allclose(one, other) for one, other in itertools.pairwise(logits[:5]))
    at_once = FullConfig(rope=False, rope_fade_tokens=0)
    with torch.no_grad():
        without = cut(teacher, None, everywhere, full=FullBranch(at_once))(IDS).logits
    assert torch.equal(logits[4], logits[5])
    assert torch.equal(logits[5], without)
