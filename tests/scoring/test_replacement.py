"""Single replacement, KL and NLL, against whole models cut with exactly those twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from archsearch.config import ScoringConfig
from archsearch.data.niah import Probe
from archsearch.evaluation.divergence import TeacherReference, divergence
from archsearch.headmap import HeadMap, ModelShape, Operator
from archsearch.models.cut import cut
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import Teacher
from archsearch.progress import ignore_progress
from archsearch.scoring.head_scores import HeadScores
from archsearch.scoring.inputs import GIB, ScoreInputs, SubProbe
from archsearch.scoring.replacement import kl_damage, nll_damage, replacement_kl, replacement_nll
from archsearch.scoring.swaps import Swap, heads_and_groups
from tests.random_models import random_probes, random_supernet, random_teacher, random_tokens

FAMILIES = ["llama", "qwen2", "qwen3"]


def brute_force_kl(
    teacher: Teacher, supernet: Supernet, tokens_NT: torch.Tensor, swaps: list[Swap]
) -> torch.Tensor:
    """KL of each sequence under the model cut with the swap's heads as twins, [S, N]."""
    full = HeadMap.uniform(teacher.shape, Operator.FULL)
    references = [TeacherReference(teacher, row_1T) for row_1T in tokens_NT.split(1)]
    rows = []
    for swap in swaps:
        student = cut(teacher, supernet, full.with_operator(swap, Operator.GDN))
        rows.append([divergence(student, reference)["kl"] for reference in references])
    return torch.tensor(rows, dtype=torch.float64)


def answer_nll(model: torch.nn.Module, probe: Probe) -> float:
    """Mean NLL of a probe's answer tokens from one forward over the prompt and the whole answer."""
    ids = torch.tensor([probe.prompt + probe.answer])
    with torch.no_grad():
        log_p_TV = model(ids).logits[0].double().log_softmax(-1)
    at = range(len(probe.prompt) - 1, ids.shape[1] - 1)
    return -sum(float(log_p_TV[t, token]) for t, token in zip(at, probe.answer, strict=True)) / len(
        probe.answer
    )


def brute_force_nll(
    teacher: Teacher, supernet: Supernet, probes: list[Probe], swaps: list[Swap]
) -> torch.Tensor:
    """Rise of each answer's NLL under the model cut with the swap's heads as twins, [S, P]."""
    full = HeadMap.uniform(teacher.shape, Operator.FULL)
    before = torch.tensor([answer_nll(teacher.model, p) for p in probes], dtype=torch.float64)
    rows = []
    for swap in swaps:
        student = cut(teacher, supernet, full.with_operator(swap, Operator.GDN))
        rows.append([answer_nll(student, probe) for probe in probes])
    return torch.tensor(rows, dtype=torch.float64) - before


def mixed_probes() -> list[Probe]:
    """Probes of several lengths of prompt and answer, not sorted by them."""
    shapes = [(24, 3), (9, 1), (31, 5), (24, 2)]
    return [
        random_probes(1, length=length, answer=answer, seed=seed)[0]
        for seed, (length, answer) in enumerate(shapes)
    ]


def score_inputs(
    teacher: Teacher,
    supernet: Supernet,
    probes: dict[str, list[Probe]],
    tokens_NT: torch.Tensor,
) -> ScoreInputs:
    capabilities = {
        name: {"probe": SubProbe(tuple(pairs), len(pairs))} for name, pairs in probes.items()
    }
    return ScoreInputs(teacher, capabilities, tokens_NT, lambda: supernet, ScoringConfig(), seed=0)


def assert_scores(scores: HeadScores, expected: dict[str, torch.Tensor]) -> None:
    for name, values in expected.items():
        found = torch.tensor(getattr(scores, name), dtype=torch.float64)
        torch.testing.assert_close(found, values, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("memory_bytes", [1, GIB])
def test_kl_equals_the_divergence_of_the_cut_model(family: str, memory_bytes: int) -> None:
    teacher = random_teacher(family)
    supernet, tokens_NT = random_supernet(teacher), random_tokens(2, 33)
    swaps = heads_and_groups(teacher.shape)
    assert len(swaps) == 3 * (4 + 2)
    found_SN = kl_damage(teacher, supernet, tokens_NT, swaps, memory_bytes=memory_bytes)
    expected_SN = brute_force_kl(teacher, supernet, tokens_NT, swaps)
    assert expected_SN.min() > 1e-4
    torch.testing.assert_close(found_SN, expected_SN, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("memory_bytes", [1, 2_000_000, GIB])
def test_nll_equals_that_of_the_cut_model(family: str, memory_bytes: int) -> None:
    teacher = random_teacher(family)
    supernet, probes = random_supernet(teacher), mixed_probes()
    swaps = heads_and_groups(teacher.shape)
    found_SP = nll_damage(teacher, supernet, probes, swaps, memory_bytes=memory_bytes)
    expected_SP = brute_force_nll(teacher, supernet, probes, swaps)
    assert expected_SP.abs().max() > 0.1
    torch.testing.assert_close(found_SP, expected_SP, atol=1e-5, rtol=1e-4)


def test_any_heads_of_a_layer_can_be_a_swap() -> None:
    teacher = random_teacher()
    supernet, tokens_NT = random_supernet(teacher), random_tokens(1, 20)
    swaps: list[Swap] = [((2, 0), (2, 3)), tuple((0, head) for head in range(4))]
    found_SN = kl_damage(teacher, supernet, tokens_NT, swaps)
    expected_SN = brute_force_kl(teacher, supernet, tokens_NT, swaps)
    torch.testing.assert_close(found_SN, expected_SN, atol=1e-5, rtol=1e-4)
    for wrong in [((0, 1), (1, 1)), ()]:
        with pytest.raises(ValueError, match="one layer"):
            kl_damage(teacher, supernet, tokens_NT, [wrong])


@pytest.mark.parametrize(("memory_bytes", "most"), [(200_000, 5), (400_000, 6), (GIB, 12)])
def test_memory_bounds_the_streams_at_once(memory_bytes: int, most: int) -> None:
    """A stream of 16 tokens takes 4 bytes of 6 * 32 + 3 * 48 + 6 * 32 = 528 numbers a token, so 34 KB."""
    teacher = random_teacher()
    swaps = heads_and_groups(teacher.shape)
    sizes: list[int] = []
    last = teacher.model.model.layers[-1].mlp
    last.register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel() // 32 // 16))
    kl_damage(
        teacher, random_supernet(teacher), random_tokens(2, 16), swaps, memory_bytes=memory_bytes
    )
    assert max(sizes) <= memory_bytes // (16 * 4 * 528)
    assert max(sizes) == most


def test_a_group_of_one_head_is_swapped_once() -> None:
    shape = ModelShape("llama", 2, 3, 3, 8)
    assert heads_and_groups(shape) == [(head,) for head in shape.heads()]


def test_kl_scores_are_means_over_sequences_with_their_standard_error() -> None:
    teacher = random_teacher("qwen3")
    supernet, tokens_NT = random_supernet(teacher), random_tokens(3, 24)
    calls: list[tuple[int, int]] = []
    inputs = score_inputs(teacher, supernet, {}, tokens_NT)
    inputs = replace(inputs, progress=lambda done, total: calls.append((done, total)))
    scores = replacement_kl(inputs)
    heads: list[Swap] = [(head,) for head in teacher.shape.heads()]
    heads_SN = brute_force_kl(teacher, supernet, tokens_NT, heads)
    groups_SN = brute_force_kl(teacher, supernet, tokens_NT, teacher.shape.groups())
    expected = {
        "composite": heads_SN.mean(1).view(3, 4),
        "spread": heads_SN.std(1).view(3, 4) / 3**0.5,
        "groups": groups_SN.mean(1).view(3, 2),
    }
    assert_scores(scores, expected)
    assert scores.method == "replacement_kl"
    assert calls[-1] == (3 * 18, 3 * 18)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_one_sequence_has_no_spread() -> None:
    teacher = random_teacher()
    inputs = score_inputs(teacher, random_supernet(teacher), {}, random_tokens(1, 12))
    assert replacement_kl(inputs).spread == [[0.0] * 4] * 3


@pytest.mark.parametrize(
    ("capabilities", "used"),
    [
        (["general", "retrieval", "user"], ["retrieval"]),
        (["general", "user"], ["user"]),
        (["general", "mine"], ["general", "mine"]),
    ],
)
def test_nll_scores_read_the_pairs_of_retrieval_first(
    capabilities: list[str], used: list[str]
) -> None:
    teacher = random_teacher()
    supernet = random_supernet(teacher)
    probes = {
        name: random_probes(2, length=20 + at, seed=at) for at, name in enumerate(capabilities)
    }
    scores = replacement_nll(score_inputs(teacher, supernet, probes, random_tokens(1, 8)))
    swaps = heads_and_groups(teacher.shape)
    chosen = [probe for name in used for probe in probes[name]]
    expected_SP = brute_force_nll(teacher, supernet, chosen, swaps)
    heads_SP, groups_SP = expected_SP[:12], expected_SP[12:]
    expected = {
        "composite": heads_SP.mean(1).view(3, 4),
        "spread": heads_SP.std(1).view(3, 4) / len(chosen) ** 0.5,
        "groups": groups_SP.mean(1).view(3, 2),
    }
    assert_scores(scores, expected)
    assert scores.method == "replacement_nll"


def test_a_bf16_teacher_ranks_heads_as_its_fp32_self_does() -> None:
    teacher = random_teacher()
    supernet, tokens_NT = random_supernet(teacher), random_tokens(2, 33)
    swaps = heads_and_groups(teacher.shape)
    exact_S = kl_damage(teacher, supernet, tokens_NT, swaps).mean(1)
    teacher.model.bfloat16()
    rough_S = kl_damage(teacher, supernet, tokens_NT, swaps).mean(1)
    assert torch.corrcoef(torch.stack([exact_S, rough_S]))[0, 1] > 0.98


def test_nothing_to_measure_on_is_refused() -> None:
    teacher = random_teacher()
    supernet, swaps = random_supernet(teacher), heads_and_groups(teacher.shape)
    for tokens in (torch.zeros(5, dtype=torch.long), torch.zeros(0, 5, dtype=torch.long)):
        with pytest.raises(ValueError, match="not \\[N, T\\]"):
            kl_damage(teacher, supernet, tokens, swaps, progress=ignore_progress)
    with pytest.raises(ValueError, match="need probes"):
        nll_damage(teacher, supernet, [], swaps)
