"""Tasks of lm-eval: a local task file with a small model, and what a config gets where something is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from archsearch.config import HarnessConfig
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.evaluation.harness import Harness, check_harness_package, check_tasks
from archsearch.models.teacher import Teacher
from tests.random_models import random_teacher

QUESTIONS = [
    {"question": f"{a} + {b} =", "choices": [str(a + b), str(a * b + 11)], "answer": index % 2}
    for index, (a, b) in enumerate((a, b) for a in range(4) for b in range(3))
]
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
SAID = {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3, "do_sample": False},
    "filter_list": [{"name": "all", "filter": [{"function": "take_first"}]}],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set and the tasks `sums` and `says` on it."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    for name, own in (("sums", CHOICE), ("says", SAID)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **shared, **own}))
    return folder


def harness(tasks: Path, *names: str, **options: int) -> tuple[Harness, Teacher]:
    teacher = random_teacher("qwen3")
    config = HarnessConfig(tasks=names, include_path=str(tasks), **options)
    return Harness(config, teacher), teacher


def likelihood(teacher: Teacher, prompt: str, answer: str) -> float:
    """Log-likelihood of the answer after the prompt, token by token without any batch."""
    before, after = (teacher.tokenizer(text)["input_ids"] for text in (prompt, prompt + answer))
    with torch.no_grad():
        log_p = teacher.model(input_ids=torch.tensor([after])).logits[0].log_softmax(-1)
    return sum(float(log_p[i - 1, after[i]]) for i in range(len(before), len(after)))


@pytest.mark.parametrize("batch_size", [1, 5])
def test_accuracy_is_that_of_the_likelier_choice(tasks: Path, batch_size: int) -> None:
    measured, teacher = harness(tasks, "sums", batch_size=batch_size)
    right = []
    for row in QUESTIONS:
        chances = [likelihood(teacher, str(row["question"]), f" {c}") for c in row["choices"]]
        right.append(chances.index(max(chances)) == row["answer"])
    assert 0 < sum(right) < len(right)
    teacher.model.train(True)
    assert measured.measure(teacher.model) == {
        "lm_sums_acc": pytest.approx(sum(right) / len(right))
    }
    assert teacher.model.training


def test_tasks_are_measured_again_and_in_part(tasks: Path) -> None:
    measured, teacher = harness(tasks, "sums", "says")
    found = measured.measure(teacher.model)
    assert set(found) == {"lm_sums_acc", "lm_says_exact_match_all"}
    assert measured.measure(teacher.model) == found
    few, _ = harness(tasks, "sums", limit=3)
    thirds = few.measure(teacher.model)["lm_sums_acc"] * 3
    assert thirds == pytest.approx(round(thirds))


def test_generated_answers_are_compared(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, teacher = harness(tasks, "says", batch_size=1)
    answer = teacher.tokenizer("0", add_special_tokens=False)["input_ids"][0]
    stop = teacher.tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    said = iter([answer, stop] * 100)

    def next_token(*_: object, **__: object) -> torch.Tensor:
        logits = torch.zeros(1, 1, teacher.model.config.vocab_size)
        logits[..., next(said)] = 9.0
        return logits

    monkeypatch.setattr(teacher.model.lm_head, "forward", next_token)
    # Of the right answers only 0 + 0 is "0".
    (value,) = measured.measure(teacher.model).values()
    rights = [row["choices"][row["answer"]] for row in QUESTIONS]  # type: ignore[index]
    assert value == pytest.approx(rights.count("0") / len(rights))
    assert value > 0


def test_metrics_that_the_search_wants_are_looked_for(tasks: Path) -> None:
    config = HarnessConfig(tasks=("sums", "says"), include_path=str(tasks))
    check_tasks(config, {"a": "lm_sums_acc", "b": "lm_says_exact_match_all", "c": "kl"})
    with pytest.raises(ConfigError) as caught:
        check_tasks(config, {"search.objectives[1].metric": "lm_sums_accuracy"})
    assert str(caught.value) == (
        "search.objectives[1].metric: lm_sums_accuracy is no figure of the tasks; allowed: "
        "lm_says_exact_match_all, lm_sums_acc"
    )


@pytest.mark.parametrize(
    ("aggregated", "figures"),
    [
        (None, set()),
        ([{"metric": "acc"}], {"lm_both_acc"}),
        (
            [{"metric": "acc"}, {"metric": "exact_match"}],
            {"lm_both_acc", "lm_both_exact_match_all"},
        ),
        ([{"metric": "acc"}, {"metric": "exact_match", "filter_list": "none"}], {"lm_both_acc"}),
    ],
)
def test_metrics_of_groups_are_looked_for_too(
    tasks: Path, aggregated: list[dict[str, str]] | None, figures: set[str]
) -> None:
    own = {} if aggregated is None else {"aggregate_metric_list": aggregated}
    group = {"group": "both", "task": ["sums", "says"], **own}
    (tasks / "both.yaml").write_text(yaml.safe_dump(group))
    measured, teacher = harness(tasks, "both", limit=2)
    known = {"lm_sums_acc", "lm_says_exact_match_all", *figures}
    assert set(measured.measure(teacher.model)) == known
    check_tasks(measured.config, {name: name for name in known})
    for other in ("lm_both_nonsense", "lm_sums_nonsense", "lm_both_exact_match"):
        with pytest.raises(ConfigError) as caught:
            check_tasks(measured.config, {"search.objectives[0].metric": other})
        assert str(caught.value) == (
            f"search.objectives[0].metric: {other} is no figure of the tasks; allowed: {', '.join(sorted(known))}"
        )


def test_tasks_and_folders_that_are_not_there_are_named(tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"harness\.tasks: lm-eval has no task 'summms'; did you"):
        harness(tasks, "sums", "summms")
    with pytest.raises(ConfigError, match=r"no such file"):
        harness(tmp_path / "none", "sums")
    with pytest.raises(ConfigError, match=r"harness\.include_path: .*a file; it needs a folder"):
        harness(tasks / "sums.yaml", "sums")


def test_a_data_set_that_is_not_there_is_named(tasks: Path, tmp_path: Path) -> None:
    broken = yaml.safe_load((tasks / "sums.yaml").read_text())
    broken["dataset_kwargs"]["data_files"]["test"] = str(tmp_path / "gone.jsonl")
    (tmp_path / "lost.yaml").write_text(yaml.safe_dump(broken | {"task": "lost"}))
    config = HarnessConfig(tasks=("lost",), include_path=str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"^harness\.tasks: lost \(.*/lost\.yaml\): \w+Error: .*gone\.jsonl"
    ):
        check_tasks(config, {})


def test_a_data_set_that_the_hub_does_not_give_is_no_fault_of_the_config(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets.exceptions import DatasetNotFoundError

    fail = _raising(DatasetNotFoundError("no/such"))
    monkeypatch.setattr("lm_eval.tasks.TaskManager.load", fail)
    config = HarnessConfig(tasks=("sums",), include_path=str(tasks))
    with pytest.raises(EnvironmentFault, match="DatasetNotFoundError: no/such"):
        check_tasks(config, {})


def test_a_task_file_that_is_broken_is_named(tasks: Path, tmp_path: Path) -> None:
    text = (tasks / "sums.yaml").read_text()
    (tmp_path / "own.yaml").write_text(text.replace("task: sums", "task: [own"))
    config = HarnessConfig(tasks=("own",), include_path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"no task 'own'; .*/own\.yaml:\d+: not YAML: "):
        check_tasks(config, {})
    odd = yaml.safe_load(text) | {"task": "own", "output_type": "nonsense"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(odd))
    with pytest.raises(
        EnvironmentFault, match=r"^harness\.tasks: own \(.*/own\.yaml\): ValueError: "
    ):
        check_tasks(config, {})


def test_memory_is_left_to_the_caller(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, teacher = harness(tasks, "sums")
    for error in (torch.OutOfMemoryError("full"), RuntimeError("can't allocate memory: 9 bytes")):
        with monkeypatch.context() as patch:
            patch.setattr(teacher.model, "forward", _raising(error))
            with pytest.raises(type(error), match=str(error)):
                measured.measure(teacher.model)
    monkeypatch.setattr(teacher.model, "forward", _raising(RuntimeError("odd")))
    with pytest.raises(EnvironmentFault, match=r"sums \(.*/sums\.yaml\): RuntimeError: odd"):
        measured.measure(teacher.model)


def _raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archsearch.evaluation.harness.find_spec", lambda _: None)
    config = HarnessConfig(tasks=("sums",))
    message = r"^harness\.tasks: needs the Python package lm-eval \(pip install lm-eval\)$"
    for ask in (check_harness_package, lambda c: check_tasks(c, {})):
        with pytest.raises(EnvironmentFault, match=message) as caught:
            ask(config)
        assert caught.value.exit_status == 3


def test_a_config_without_tasks_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archsearch.evaluation.harness.find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    check_harness_package(HarnessConfig())
    check_tasks(HarnessConfig(), {})
