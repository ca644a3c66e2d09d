"""Drawing pairs: how many, at which contexts, what is dropped, own pairs from a file, and what is said of too few."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archsearch.config import RunConfig
from archsearch.data.niah import Probe
from archsearch.errors import ConfigError
from archsearch.models.teacher import Teacher, load_teacher
from archsearch.scoring import pairs as module
from archsearch.scoring.pairs import Verdict, draw_pairs, judge, usable

TINY = "package:archsearch/assets/tiny/teacher"


def config_of(scoring: dict[str, Any], **teacher: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "schema": 1,
            "name": "test",
            "teacher": {"source": TINY} | teacher,
            "probes": {"digits": 4, "multi_keys": 4},
            "scoring": {"retrieval": ("single", "multikey"), "general": (), "contexts": (96,)}
            | scoring,
        }
    )


@pytest.fixture(scope="module")
def tiny() -> Teacher:
    return load_teacher(config_of({}).teacher)


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Probe, int], Any]], None]:
    """Replaces what the teacher says of a pair, given the pair and how many came before it; False is wrong."""

    def install(judge: Callable[[Probe, int], bool | Verdict]) -> None:
        seen: list[Probe] = []

        def fake(_: Teacher, probes: list[Probe], **__: Any) -> list[Verdict]:
            answers = []
            for probe in probes:
                found = judge(probe, len(seen))
                if not isinstance(found, Verdict):
                    found = Verdict.USABLE if found else Verdict.WRONG
                answers.append(found)
                seen.append(probe)
            return answers

        monkeypatch.setattr(module, "judge", fake)

    return install


def write_pairs(path: Path, lines: list[dict[str, str]]) -> str:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def own_pair(teacher: Teacher, index: int, **fields: str) -> dict[str, str]:
    """A pair that the tiny teacher answers, as a user would write it."""
    [probe] = module.make_probes(
        teacher.tokenizer, "single", 1, 64, keys=4, digits=4, seed=99, start=index
    )
    clean, corrupt = (teacher.tokenizer.decode(ids) for ids in (probe.prompt, probe.corrupt_prompt))
    answer, distractor = (
        teacher.tokenizer.decode(ids).strip() for ids in (probe.answer, probe.distractor)
    )
    return {"clean": clean, "corrupt": corrupt, "answer": answer, "distractor": distractor} | fields


def test_the_teacher_answers_what_is_kept(tiny: Teacher) -> None:
    found = draw_pairs(tiny, config_of({"pairs": 3}), seed=1)
    assert {name: len(p.pairs) for name, p in found["retrieval"].items()} == {
        "single": 3,
        "multikey": 3,
    }
    pairs = [pair for probe in found["retrieval"].values() for pair in probe.pairs]
    assert len(set(pairs)) == 6
    assert all(usable(tiny, pairs, decay=0.9, memory_bytes=1 << 28))


def test_a_wrong_answer_or_a_pair_without_a_gap_is_not_usable(tiny: Teacher) -> None:
    [pair] = draw_pairs(
        tiny, config_of({"retrieval": ("single",), "pairs": 1, "min_pairs": 1}), seed=1
    )["retrieval"]["single"].pairs
    asks_for_the_other = Probe(
        pair.kind, pair.context, pair.prompt, pair.distractor, pair.corrupt_prompt, pair.answer
    )
    no_difference = Probe(
        pair.kind, pair.context, pair.prompt, pair.answer, pair.prompt, pair.distractor
    )
    pairs = [pair, asks_for_the_other, no_difference]
    assert usable(tiny, pairs, decay=0.9, memory_bytes=1 << 28) == [True, False, False]
    found = judge(tiny, pairs, decay=0.9, memory_bytes=1 << 28)
    assert found == [Verdict.USABLE, Verdict.WRONG, Verdict.CLOSE]
    assert usable(tiny, [pair], decay=0.9, memory_bytes=1 << 28, min_gap=1e6) == [False]


def test_dropped_pairs_are_replaced_and_counted(tiny: Teacher, verdicts: Any) -> None:
    verdicts(lambda _, number: number % 2 == 1)
    found = draw_pairs(tiny, config_of({"retrieval": ("single",), "pairs": 4}), seed=1)
    probe = found["retrieval"]["single"]
    # 4 drawn, 2 kept; 2 drawn, 1 kept; then one by one: dropped, kept.
    assert (len(probe.pairs), probe.drawn) == (4, 8)


def test_drawing_ends_at_max_draws_and_an_empty_sub_probe_still_counts(
    tiny: Teacher, verdicts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    verdicts(lambda probe, _: probe.kind == "multikey")
    with caplog.at_level(logging.WARNING):
        found = draw_pairs(tiny, config_of({"pairs": 4, "max_draws": 3}), seed=1)["retrieval"]
    assert (found["single"].pairs, found["single"].drawn) == ((), 12)
    assert len(found["multikey"].pairs) == 4
    assert "no pair of single" in caplog.text


def test_too_few_pairs_name_the_field_and_the_counts(tiny: Teacher, verdicts: Any) -> None:
    verdicts(lambda *_: False)
    with pytest.raises(
        ConfigError,
        match=r"^scoring\.retrieval: .*single 0 of 4, multikey 0 of 4\); allowed: 3 or more",
    ):
        draw_pairs(tiny, config_of({"pairs": 2, "max_draws": 2, "min_pairs": 3}), seed=1)


def test_too_few_pairs_say_why_and_what_to_change(
    tiny: Teacher, verdicts: Any, tmp_path: Path
) -> None:
    def of(scoring: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as caught:
            draw_pairs(tiny, config_of(scoring), seed=1)
        assert "\n" not in str(caught.value)
        return str(caught.value).partition("(scoring.min_pairs). ")[2]

    ours = {"retrieval": ("single",), "pairs": 3, "max_draws": 1, "min_pairs": 3}
    verdicts(lambda _, number: Verdict.WRONG if number % 3 else Verdict.CLOSE)
    assert of(ours) == (
        "Dropped: 2 answered wrongly (leave sub-probes out or lower scoring.contexts), 1 with a gap of 1 logits at "
        "most (lower scoring.min_gap)"
    )
    path = write_pairs(tmp_path / "pairs.jsonl", [own_pair(tiny, 0), own_pair(tiny, 1)])
    verdicts(lambda *_: Verdict.WRONG)
    own = {"retrieval": (), "pairs_file": path, "min_pairs": 2}
    assert of(own) == "Dropped: 2 answered wrongly (ask what it knows)"
    verdicts(lambda *_: True)
    assert of(own | {"min_pairs": 3}) == "None was dropped"


def test_every_context_gets_its_share_of_the_kept_pairs(tiny: Teacher, verdicts: Any) -> None:
    verdicts(lambda _, number: number % 3 != 0)
    scoring = {"retrieval": ("single",), "pairs": 5, "contexts": (64, 96)}
    pairs = draw_pairs(tiny, config_of(scoring), seed=1)["retrieval"]["single"].pairs
    assert [pair.context for pair in pairs] == [64, 96, 64, 96, 64]
    assert all(abs(len(pair.prompt) + len(pair.answer) - pair.context) < 16 for pair in pairs)


def test_a_context_that_the_teacher_fails_at_is_warned_of(
    tiny: Teacher, verdicts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    verdicts(lambda probe, _: probe.context == 64)
    scoring = {"retrieval": ("single",), "pairs": 4, "contexts": (64, 96), "min_pairs": 2}
    with caplog.at_level(logging.WARNING):
        draw_pairs(tiny, config_of(scoring), seed=1)
    assert "no single pair of 96 tokens" in caplog.text


def test_random_weights_get_pairs_as_they_come(tiny: Teacher) -> None:
    found = draw_pairs(tiny, config_of({"pairs": 3}, random_weights=True), seed=1)["retrieval"]
    assert [(len(p.pairs), p.drawn) for p in found.values()] == [(3, 3), (3, 3)]


def test_own_pairs_join_a_capability_or_make_their_own(tiny: Teacher, tmp_path: Path) -> None:
    lines = [own_pair(tiny, 0), own_pair(tiny, 1, capability="retrieval", probe="mine")]
    path = write_pairs(tmp_path / "pairs.jsonl", lines)
    config = config_of({"pairs": 2, "min_pairs": 1, "pairs_file": path})
    found = draw_pairs(tiny, config, seed=1)
    assert set(found) == {"retrieval", "user"}
    assert set(found["retrieval"]) == {"single", "multikey", "mine"}
    assert len(found["retrieval"]["mine"].pairs) == 1
    assert found["user"]["pairs"].drawn == 1


def test_the_example_of_the_readme_is_usable(tiny: Teacher, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (line,) = (row for row in text.splitlines() if row.startswith('{"clean": '))
    path = tmp_path / "own.jsonl"
    path.write_text(line)
    config = config_of({"retrieval": (), "pairs_file": str(path), "min_pairs": 1})
    assert len(draw_pairs(tiny, config, seed=1)["user"]["pairs"].pairs) == 1


def test_own_pairs_may_not_take_our_names(tiny: Teacher, tmp_path: Path) -> None:
    path = write_pairs(
        tmp_path / "pairs.jsonl", [own_pair(tiny, 0, capability="retrieval", probe="single")]
    )
    with pytest.raises(ConfigError, match="probe single is one of ours"):
        draw_pairs(tiny, config_of({"pairs": 2, "pairs_file": path}), seed=1)


def test_min_pairs_counts_own_pairs_with_the_others(tiny: Teacher, tmp_path: Path) -> None:
    path = write_pairs(
        tmp_path / "pairs.jsonl", [own_pair(tiny, 0, capability="retrieval", probe="mine")]
    )
    config = config_of({"pairs": 2, "min_pairs": 5, "pairs_file": path})
    assert sum(len(p.pairs) for p in draw_pairs(tiny, config, seed=1)["retrieval"].values()) == 5
