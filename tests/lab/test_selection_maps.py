"""Which maps a stage trains, which prompts decide, and how selectors are ranked."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest

from archsearch.config import CostConfig, ScoreMethod, SeedMethod
from archsearch.headmap import ModelShape
from archsearch.lab.selection_maps import (
    CONTROL,
    METHODS,
    STAGES,
    UNITS,
    Entry,
    deciding,
    entries_of,
    needed_scores,
    ranked,
    retrieval_columns,
)
from archsearch.search.seeds import SELECTORS, ScoreTables

SHAPE = ModelShape("llama", num_layers=6, num_heads=9, num_kv_heads=3, head_dim=8)


def draw(rng: random.Random, width: int) -> list[list[float]]:
    return [[rng.random() for _ in range(width)] for _ in range(SHAPE.num_layers)]


def tables() -> dict[str, ScoreTables]:
    rng = random.Random(0)
    return {name: ScoreTables(draw(rng, 9), draw(rng, 3)) for name in get_args(ScoreMethod)}


def entries(
    selectors: list[str], shares: tuple[float, ...] = (0.25,), units: Any = ("head", "kv")
) -> list[Entry]:
    cost = CostConfig(context=4096)
    return entries_of(SHAPE, tables(), selectors, shares, units, seed=0, cost=cost)


def test_every_selector_is_a_seed_method_of_its_unit() -> None:
    used = [method for units in METHODS.values() for method in units.values()]
    assert len(set(used)) == len(used)
    assert set(used) <= set(SELECTORS) & set(get_args(SeedMethod))
    # Attribution patching estimates causal scores, and is no selector of its own here.
    assert set(SELECTORS) - set(used) == {"attribution", "attribution_groups"}
    for units in METHODS.values():
        assert set(units) <= {unit for own in UNITS.values() for unit in own}


def test_stages_build_on_each_other() -> None:
    assert [stage.before for stage in STAGES.values()] == ["", "A", "B"]
    for stage in STAGES.values():
        assert list(stage.readings) == sorted(stage.readings)
        if stage.before:
            assert set(stage.shares) < set(STAGES[stage.before].shares)


def test_maps_are_named_by_all_that_chose_them_and_come_once() -> None:
    found = entries(list(METHODS), shares=(0.25, 0.125))
    assert found[0].names == [(CONTROL, "head", 1.0, 0)]
    assert len({entry.head_map for entry in found}) == len(found)
    names = [name for entry in found[1:] for name in entry.names]
    assert len(set(names)) == len(names)
    for share in (0.25, 0.125):
        for selector, units in METHODS.items():
            own = [name for name in names if name[0] == selector and name[2] == share]
            assert len(own) == sum(3 if "random" in method else 1 for method in units.values())


def test_units_leave_out_the_others() -> None:
    names = {name[1] for entry in entries(list(METHODS), units=("head",)) for name in entry.names}
    assert names == {"head", "layer"}
    names = {name[1] for entry in entries(["program"], units=("kv",))[1:] for name in entry.names}
    assert names == {"group", "bytes"}


def test_scores_that_selectors_need() -> None:
    assert needed_scores(["even_layers", "random"]) == set()
    assert needed_scores(["blend", "program_both"]) == {
        "causal",
        "replacement_kl",
        "replacement_nll",
    }


def test_the_finest_columns_of_prompts_are_found() -> None:
    names = ["kl", "top1_agreement", "general_nll", "copying_nll", "copying_match", "fa_share"]
    names += ["unseen_single_nll", "unseen_single_nll@1024", "unseen_single_nll@2048"]
    names += ["stations_nll", "stations_nll@512", "stations_keys2_nll", "stations_keys4_nll"]
    names += ["stations_keys2_nll@512", "stations_keys2_nll@1024", "tracking_nll"]
    assert retrieval_columns(names) == [
        "unseen_single@1024",
        "unseen_single@2048",
        "stations_keys4",
        "stations_keys2@512",
        "stations_keys2@1024",
        "tracking",
    ]


def test_columns_that_the_teacher_fails_at_decide_nothing() -> None:
    teacher = {"a_match@8": 0.9, "b_match@8": 0.89, "c_match": 1.0}
    assert deciding(["a@8", "b@8", "c", "d"], teacher) == ["a@8", "c"]


def values_of(kl: dict[str, float], nll: dict[str, float]) -> Any:
    def values(entry: Entry) -> dict[str, float] | None:
        selector = entry.names[0][0]
        return {"kl": kl[selector], "x_nll": nll[selector]} if selector in kl else None

    return values


def test_selectors_are_ranked_by_kl_and_by_prompts_that_decide() -> None:
    selectors = ["causal", "replacement_kl", "blend", "even_layers"]
    found = entries(selectors)
    kl = {"causal": 3.0, "replacement_kl": 1.0, "blend": 2.0, "even_layers": 4.0, CONTROL: 0.0}
    nll = {"causal": 1.0, "replacement_kl": 4.0, "blend": 2.0, "even_layers": 3.0, CONTROL: 0.0}
    by_kl = ranked(found, values_of(kl, nll), [], ["head", "kv"])
    assert by_kl == [
        ("replacement_kl", 0),
        ("blend", pytest.approx(1 / 3)),
        ("causal", pytest.approx(2 / 3)),
        ("even_layers", 1),
    ]
    both = ranked(found, values_of(kl, nll), ["x"], ["head"])
    # blend is second by either; causal first and third; replacement KL first and last.
    assert [name for name, _ in both] == ["blend", "causal", "replacement_kl", "even_layers"]


def test_selectors_without_figures_have_no_place() -> None:
    found = entries(["causal", "blend"])
    assert ranked(found, values_of({"causal": 1.0}, {"causal": 1.0}), ["x"], ["head"]) == [
        ("causal", 0)
    ]
