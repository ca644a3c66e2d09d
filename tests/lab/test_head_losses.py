"""Losses without heads against forwards of single pairs, written out step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.data.niah import Probe
from archsearch.headmap import Head
from archsearch.lab.head_losses import ALL, Bench, answers, from_corrupt
from archsearch.models.teacher import Teacher
from tests.random_models import random_probes, random_supernet, random_teacher

HEADS = frozenset({(0, 1), (0, 3), (1, 0), (2, 2)})


@contextmanager
def changed_inputs(
    teacher: Teacher, change: Callable[[int, Tensor], Tensor]
) -> Iterator[list[Tensor]]:
    """Lets change(layer, what o_proj reads [1, T, H, D]) take its place; keeps what was read before."""
    seen: list[Tensor] = []
    handles = []
    for index, layer in enumerate(teacher.model.model.layers):

        def hook(_: Any, args: tuple[Tensor, ...], index: int = index) -> tuple[Tensor]:
            heads_1THD = args[0].unflatten(-1, (-1, teacher.shape.head_dim)).clone()
            seen.append(heads_1THD.clone())
            return (change(index, heads_1THD).flatten(-2),)

        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(hook))
    yield seen
    for handle in handles:
        handle.remove()


def scored(teacher: Teacher, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[float]:
    """Mean NLL of the answer's tokens and whether each is the argmax, one token after the other."""
    logits_TV = teacher.model(input_ids=torch.tensor([prompt + answer])).logits[0]
    nll, right = 0.0, True
    for j, token in enumerate(answer):
        row_V = logits_TV[len(prompt) - 1 + j].double()
        nll -= float(row_V[token] - row_V.logsumexp(0)) / len(answer)
        right = right and int(row_V.argmax()) == token
    return [nll, float(right)]


def knocked_out(teacher: Teacher, probe: Probe, heads: frozenset[Head]) -> list[float]:
    """The clean prompt with those heads' recorded outputs of the corrupt one."""
    with changed_inputs(teacher, lambda _, x: x) as corrupt:
        scored(teacher, probe.corrupt_prompt, probe.answer)

    def change(layer: int, heads_1THD: Tensor) -> Tensor:
        for other, head in heads:
            if other == layer:
                heads_1THD[:, :, head] = corrupt[layer][:, :, head]
        return heads_1THD

    with changed_inputs(teacher, change):
        return scored(teacher, probe.prompt, probe.answer)


def mixed_probes(teacher: Teacher) -> list[Probe]:
    """Probes of two lengths; the first is answered as the teacher does, so that it matches."""
    probes = [*random_probes(3, length=24), *random_probes(3, length=31, answer=2, seed=1)]
    first, ids = probes[0], list(probes[0].prompt)
    for _ in first.answer:
        ids.append(int(teacher.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    answer = tuple(ids[len(first.prompt) :])
    probes[0] = Probe(
        first.kind, first.context, first.prompt, answer, first.corrupt_prompt, first.distractor
    )
    return probes


def bench_of(teacher: Teacher, probes: list[Probe]) -> tuple[Bench, list[Probe]]:
    """A bench of two capabilities whose batches hold several lengths, and the probes in its order."""
    pairs = {"retrieval": probes[::2], "general": probes[1::2]}
    bench = Bench.of(teacher, random_supernet(teacher), pairs, decay=0.9, memory_bytes=2**30)
    labelled = [*probes[::2], *probes[1::2]]
    return bench, sorted(labelled, key=lambda probe: len(probe.prompt))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_corrupt_knock_out_equals_patched_forwards_of_single_pairs(family: str) -> None:
    teacher = random_teacher(family)
    bench, probes = bench_of(teacher, mixed_probes(teacher))
    assert len(bench.batches) == 1
    expected = torch.tensor([knocked_out(teacher, probe, HEADS) for probe in probes])
    torch.testing.assert_close(
        bench.without(HEADS, "corrupt").float(), expected.T, atol=1e-4, rtol=0
    )
    base = torch.tensor([scored(teacher, probe.prompt, probe.answer) for probe in probes])
    torch.testing.assert_close(bench.base_2P.float(), base.T, atol=1e-4, rtol=0)
    assert base[:, 1].sum() == 1
    assert (expected[:, 0] - base[:, 0]).abs().max() > 0.1


def test_all_heads_from_the_corrupt_prompt_answer_as_if_it_were_asked() -> None:
    """With every head's output from the corrupt run, answer positions differ from it by nothing."""
    teacher = random_teacher()
    bench, probes = bench_of(teacher, random_probes(4))
    expected = [scored(teacher, probe.corrupt_prompt, probe.answer)[0] for probe in probes]
    found_2P = bench.without(frozenset(teacher.shape.heads()), "corrupt")
    assert found_2P[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_twins_take_the_place_of_heads_alone() -> None:
    teacher = random_teacher()
    bench, probes = bench_of(teacher, mixed_probes(teacher))
    inputs: list[tuple[Any, ...]] = []
    handles = [
        layer.self_attn.register_forward_pre_hook(lambda _, args: inputs.append(args))
        for layer in teacher.model.model.layers
    ]

    def change(layer: int, heads_1THD: Tensor) -> Tensor:
        twins_1THD = bench.supernet.twins[layer](*inputs[-1][:2])
        for other, head in HEADS:
            if other == layer:
                heads_1THD[:, :, head] = twins_1THD[:, :, head]
        return heads_1THD

    with changed_inputs(teacher, change):
        expected = [scored(teacher, probe.prompt, probe.answer)[0] for probe in probes]
    for handle in handles:
        handle.remove()
    found_2P = bench.without(HEADS, "twin")
    assert found_2P[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_losses_are_means_over_the_pairs_of_a_scope_and_over_sets() -> None:
    teacher = random_teacher()
    bench, probes = bench_of(teacher, mixed_probes(teacher))
    sets = [HEADS, frozenset({(1, 1)})]
    found = bench.losses("some", sets)
    nll, match = "answer NLL rise", "exact match fall"
    base_2P = bench.base_2P
    per_pair = [
        sum(float(bench.without(heads, "corrupt")[0, i] - base_2P[0, i]) for heads in sets) / 2
        for i in range(len(probes))
    ]
    assert found["some", "corrupt", ALL, nll] == pytest.approx(sum(per_pair) / len(per_pair))
    own = [
        value for value, name in zip(per_pair, bench.capabilities, strict=True) if name == "general"
    ]
    assert len(own) == 3
    assert found["some", "corrupt", "general", nll] == pytest.approx(sum(own) / 3)
    lost = [float(base_2P[1].sum() - bench.without(h, "corrupt")[1].sum()) for h in sets]
    assert found["some", "corrupt", ALL, match] == pytest.approx(sum(lost) / 2 / len(probes))


def test_hooks_are_gone_after_a_forward_that_failed() -> None:
    teacher = random_teacher()
    bench, _ = bench_of(teacher, random_probes(2))
    with pytest.raises(RuntimeError, match="stop"), from_corrupt(teacher.model, HEADS):
        raise RuntimeError("stop")
    assert torch.equal(answers(teacher.model, bench.batches), bench.base_2P)
