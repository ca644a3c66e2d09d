"""Retrieval metrics: exact match is greedy decoding, and padding is invisible."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from archsearch.config import ProbeConfig
from archsearch.data.niah import Probe
from archsearch.errors import ConfigError
from archsearch.evaluation.retrieval import batches, check_names, retrieval
from archsearch.models.teacher import Teacher
from archsearch.search.records import prompt_metrics
from tests.random_models import random_probes, random_teacher


def greedy(teacher: Teacher, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(length):
            logits = teacher.model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def mixed_probes(teacher: Teacher) -> list[Probe]:
    """Probes of both kinds, several lengths; every second answer is what the teacher decodes."""
    probes = []
    for index, length in enumerate((20, 31, 24, 20, 27, 20)):
        kind = "single" if index % 3 else "multikey"
        [probe] = random_probes(1, kind=kind, length=length, seed=index)
        if index % 2:
            probe = replace(probe, answer=greedy(teacher, probe.prompt, len(probe.answer)))
        probes.append(probe)
    return probes


def nll(teacher: Teacher, probe: Probe) -> list[float]:
    """Nats of each answer token, one probe at a time without padding."""
    ids = torch.tensor([probe.prompt + probe.answer])
    with torch.no_grad():
        log_p = teacher.model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    start = len(probe.prompt) - 1
    return [-float(log_p[start + j, token]) for j, token in enumerate(probe.answer)]


@pytest.mark.parametrize("batch_tokens", [1, 70, 10**6])
def test_match_is_greedy_decoding_and_nll_is_unpadded(batch_tokens: int) -> None:
    teacher = random_teacher("qwen3")
    probes = mixed_probes(teacher)
    found = retrieval(teacher.model, probes, batch_tokens=batch_tokens)
    for kind in ("single", "multikey"):
        own = [probe for probe in probes if probe.kind == kind]
        hits = [greedy(teacher, p.prompt, len(p.answer)) == p.answer for p in own]
        nats = [value for probe in own for value in nll(teacher, probe)]
        assert 0 < sum(hits) < len(hits)
        assert found[f"niah_{kind}_match"] == sum(hits) / len(hits)
        assert found[f"niah_{kind}_nll"] == pytest.approx(sum(nats) / len(nats), abs=1e-4)


def test_generate_agrees_with_match() -> None:
    teacher = random_teacher()
    [probe] = random_probes(1)
    ids = torch.tensor([probe.prompt])
    out = teacher.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0
    )
    decoded = replace(probe, answer=tuple(out[0, len(probe.prompt) :].tolist()))
    assert retrieval(teacher.model, [decoded])["niah_single_match"] == 1.0


def test_answers_of_unequal_length_share_a_batch() -> None:
    teacher = random_teacher()
    probes = [*random_probes(1, answer=2), *random_probes(1, answer=5, seed=1)]
    found = retrieval(teacher.model, probes)
    nats = [value for probe in probes for value in nll(teacher, probe)]
    assert len(nats) == 7
    assert found["niah_single_nll"] == pytest.approx(sum(nats) / 7, abs=1e-4)


def test_only_kinds_that_are_there_are_reported() -> None:
    teacher = random_teacher()
    assert set(retrieval(teacher.model, random_probes(1))) == {
        "niah_single_nll",
        "niah_single_match",
    }
    assert retrieval(teacher.model, []) == {}


def test_general_kinds_have_their_names_and_a_mean() -> None:
    teacher = random_teacher()
    probes = [
        probe
        for index, (kind, count) in enumerate((("copying", 1), ("labels", 3), ("tracking", 2)))
        for probe in random_probes(count, kind=kind, seed=index)
    ]
    probes[0] = replace(probes[0], answer=greedy(teacher, probes[0].prompt, 3))
    found = retrieval(teacher.model, probes)
    names = ("copying", "labels", "tracking", "general")
    assert set(found) == {f"{name}_{figure}" for name in names for figure in ("nll", "match")}
    # Each kind counts the same, however many probes it has.
    assert found["general_match"] == (found["copying_match"] + found["labels_match"]) / 2 == 0.5
    for name, own in (("copying", probes[:1]), ("labels", probes[1:4]), ("tracking", probes[4:])):
        nats = [value for probe in own for value in nll(teacher, probe)]
        assert found[f"{name}_nll"] == pytest.approx(sum(nats) / len(nats), abs=1e-4)
    mean = (found["copying_nll"] + found["labels_nll"]) / 2
    assert found["general_nll"] == pytest.approx(mean, abs=1e-6)


def test_retrieval_alone_gives_no_general_mean() -> None:
    found = retrieval(random_teacher().model, random_probes(2, kind="tracking"))
    assert set(found) == {"tracking_nll", "tracking_match"}


def test_a_broken_model_has_nan_likelihood_and_no_match() -> None:
    teacher = random_teacher()
    with torch.no_grad():
        teacher.model.model.norm.weight.fill_(math.nan)
    found = retrieval(teacher.model, random_probes(2))
    assert math.isnan(found["niah_single_nll"])
    assert found["niah_single_match"] == 0.0


def test_batches_stay_within_the_tokens() -> None:
    probes = [p for length in (10, 30, 20, 11) for p in random_probes(1, length=length)]
    groups = list(batches(probes, 50))
    assert [[len(p.prompt) for p in group] for group in groups] == [[10, 11], [20], [30]]


def test_several_contexts_and_groups_have_figures_of_their_own() -> None:
    teacher = random_teacher()
    probes = [
        replace(probe, context=context, group=group)
        for index, (context, group) in enumerate(((32, "a"), (32, "b"), (64, "a"), (64, "a")))
        for probe in random_probes(2, kind="stations", seed=index)
    ]
    probes[0] = replace(probes[0], answer=greedy(teacher, probes[0].prompt, 3))
    found = retrieval(teacher.model, probes)
    places = ("", "@32", "@64")
    names = ("stations", "stations_a", "stations_b")
    expected = {f"{n}_{f}{p}" for n in names for f in ("nll", "match") for p in places}
    assert set(found) == expected - {"stations_b_nll@64", "stations_b_match@64"}
    for name, group in zip(names, ("ab", "a", "b"), strict=True):
        for place, contexts in zip(places, ((32, 64), (32,), (64,)), strict=True):
            own = [p for p in probes if p.group in group and p.context in contexts]
            if f"{name}_nll{place}" not in found:
                assert not own
                continue
            nats = [value for probe in own for value in nll(teacher, probe)]
            assert found[f"{name}_nll{place}"] == pytest.approx(sum(nats) / len(nats), abs=1e-4)
    assert found["stations_match@32"] == 1 / 4
    assert found["stations_a_match@32"] == 1 / 2
    assert found["stations_match"] == 1 / 8


def test_a_context_or_group_alone_goes_without_a_name() -> None:
    probes = [replace(probe, group="multikey2") for probe in random_probes(2, kind="stations")]
    found = retrieval(random_teacher().model, probes)
    assert set(found) == {"stations_nll", "stations_match"}


def test_prompts_without_a_group_count_once() -> None:
    teacher = random_teacher()
    probes = [
        replace(probe, group=group)
        for index, group in enumerate(("", "a"))
        for probe in random_probes(1, kind="stations", seed=index)
    ]
    probes[0] = replace(probes[0], answer=greedy(teacher, probes[0].prompt, 3))
    found = retrieval(teacher.model, probes)
    assert set(found) == {f"{n}_{f}" for n in ("stations", "stations_a") for f in ("nll", "match")}
    assert (found["stations_match"], found["stations_a_match"]) == (1 / 2, 0)


def test_groups_do_not_overwrite_the_figures_of_other_prompts() -> None:
    probes = [
        replace(probe, group=group)
        for kind, group in (("a", "b"), ("a", "c"), ("a_b", ""))
        for probe in random_probes(1, kind=kind)
    ]
    message = r"^probes\.files: a_b_match would be the metric of two groups of prompts; allowed"
    for ask in (check_names, lambda found: retrieval(random_teacher().model, found)):
        with pytest.raises(ConfigError, match=message):
            ask(probes)
        ask(probes[1:])


def test_general_prompts_have_no_contexts() -> None:
    probes = [p for size in (20, 30) for p in random_probes(1, kind="labels", length=size)]
    found = retrieval(random_teacher().model, probes)
    assert set(found) == {"labels_nll", "labels_match", "general_nll", "general_match"}


def test_metrics_are_those_that_the_config_promises() -> None:
    """The names that the search waits for are made apart from the ones that a trial reports."""
    config = ProbeConfig(
        kinds=("single", "copying", "tracking"), unseen=("single",), contexts=(16, 24)
    )
    probes = [
        replace(probe, context=context)
        for kind in ("single", "tracking", "unseen_single")
        for context in (16, 24)
        for probe in random_probes(1, kind=kind)
    ]
    probes += random_probes(1, kind="copying")
    found = retrieval(random_teacher().model, probes)
    assert sorted(found) == sorted(prompt_metrics(config))


def test_padded_batches_need_no_mask_over_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of T x T a row would take 256 MB at 16,384 tokens."""
    teacher = random_teacher()
    seen = []
    inner = teacher.model.model.forward

    def forward(**given: object) -> object:
        seen.append(given.get("attention_mask"))
        return inner(**given)

    monkeypatch.setattr(teacher.model.model, "forward", forward)
    probes = [p for size in (20, 30) for p in random_probes(1, length=size)]
    retrieval(teacher.model, probes, batch_tokens=1000)
    assert seen == [None]


def test_prompts_may_go_beyond_the_window() -> None:
    teacher = random_teacher()
    window = teacher.model.config.max_position_embeddings
    [probe] = random_probes(1, length=window + 100)
    found = retrieval(teacher.model, [probe])
    nats = nll(teacher, probe)
    assert found["niah_single_nll"] == pytest.approx(sum(nats) / len(nats), abs=1e-4)
