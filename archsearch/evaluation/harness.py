"""Tasks of lm-eval (EleutherAI's evaluation harness) as metrics, through its Python API.

lm-eval is optional (`pip install archsearch[eval]`) and imported only where a config names tasks. Data sets come from where a task file
says: local files, the cache of the hub, or the hub itself.
"""

from __future__ import annotations

import difflib
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import HarnessConfig, RunConfig
from ..errors import ArchsearchError, ConfigError, EnvironmentFault
from ..metrics import HARNESS
from ..models.sources import resolve_path
from ..models.teacher import Teacher

FIELD = "harness.tasks"
SEED = 0
"""Of the order of solved examples: the same for every candidate."""


class Harness:
    """The tasks of a config, ready to measure models with the teacher's tokenizer.

    Raises EnvironmentFault where lm-eval is not installed, ConfigError for a task that it does not know.
    """

    def __init__(self, config: HarnessConfig, teacher: Teacher) -> None:
        self.config = config
        self.tokenizer = teacher.tokenizer
        self._manager = _task_manager(config)

    def measure(self, model: HydraHeadForCausalLM) -> dict[str, float]:
        """`lm_TASK_METRIC` for every figure of every task, `lm_TASK_METRIC_FILTER` where the task filters answers.

        The model runs in evaluation mode. Raises EnvironmentFault where a task cannot be loaded or run.
        """
        config, was_training = self.config, model.training
        with _quiet(), _running(config, self._manager):
            from lm_eval import simple_evaluate
            from lm_eval.models.huggingface import HFLM

            wrapped = HFLM(
                pretrained=model,
                tokenizer=self.tokenizer,
                backend="causal",
                batch_size=config.batch_size,
                max_length=config.max_length,
                trust_remote_code=config.trust_remote_code,
            )
            found = simple_evaluate(
                model=wrapped,
                tasks=list(config.tasks),
                num_fewshot=config.num_fewshot,
                limit=config.limit,
                bootstrap_iters=0,
                log_samples=False,
                task_manager=self._manager,
                confirm_run_unsafe_code=config.trust_remote_code,
                random_seed=SEED,
                numpy_random_seed=SEED,
                torch_random_seed=SEED,
                fewshot_random_seed=SEED,
            )
        model.train(was_training)
        return _named(found["results"])


def open_harness(config: RunConfig, teacher: Teacher) -> Harness | None:
    """The harness of a config that names tasks."""
    return Harness(config.harness, teacher) if config.harness.tasks else None


def check_harness_package(config: HarnessConfig) -> None:
    """Raises EnvironmentFault where tasks are asked for and lm-eval is not installed."""
    if config.tasks and find_spec("lm_eval") is None:
        raise EnvironmentFault(f"{FIELD}: needs the Python package lm-eval (pip install lm-eval)")


def check_tasks(config: HarnessConfig, wanted: Mapping[str, str]) -> None:
    """Loads the tasks with their data sets, and checks that they have the metrics wanted, by the field that wants them.

    Raises ConfigError for a task, metric or file that there is not, EnvironmentFault for a task that cannot be loaded.
    """
    if not config.tasks:
        return
    manager = _task_manager(config)
    with _quiet(), _running(config, manager):
        loaded = manager.load(list(config.tasks))
    known = {_metric(name, key) for name, found in loaded["tasks"].items() for key in _keys(found)}
    known |= {
        _metric(name, key) for name, group in loaded["groups"].items() for key in _group_keys(group)
    }
    for field, metric in wanted.items():
        if metric.startswith(HARNESS) and metric not in known:
            raise ConfigError(
                f"{field}: {metric} is no figure of the tasks; allowed: {', '.join(sorted(known))}"
            )


def _keys(task: Any) -> Iterator[str]:
    """What lm-eval calls the figures of a task."""
    filters = [one.name for one in getattr(task, "_filters", ())] or ["none"]
    for metric in task.aggregation():
        for name in filters:
            yield f"{metric},{name}"


def _group_keys(group: Any) -> Iterator[str]:
    """The same of a group: means over those of its tasks that its file asks for."""
    keys = {key for task in group.get_all_tasks() for key in _keys(task)}
    for wanted in group.aggregate_metric_list or ():
        for key in sorted(keys):
            metric, _, name = key.partition(",")
            if metric == wanted.metric and name in (wanted.filter_list or [name]):
                yield key


def _metric(task: str, key: str) -> str:
    """The metric of a figure that lm-eval calls `METRIC,FILTER`."""
    metric, _, filtered = key.partition(",")
    suffix = "" if filtered in ("", "none") else f"_{filtered}"
    return f"{HARNESS}{task}_{metric}{suffix}"


def _named(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {
        _metric(task, key): float(value)
        for task, figures in results.items()
        for key, value in figures.items()
        if "," in key
        and "_stderr" not in key
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


def _task_manager(config: HarnessConfig) -> Any:
    """lm-eval's index of tasks, its own and those of include_path, in which all of the config's are."""
    check_harness_package(config)
    include = None
    if config.include_path is not None:
        include = resolve_path(config.include_path)
        if not include.is_dir():
            raise ConfigError(f"harness.include_path: {include}: a file; it needs a folder")
    with _quiet():
        from lm_eval.tasks import TaskManager

        # Reading all of lm-eval's own task files takes 10 s and more.
        manager = TaskManager(include_path=include and str(include), include_defaults=not include)
        if not {*config.tasks} <= {*manager.all_tasks}:
            manager = TaskManager(include_path=include and str(include))
    known = list(manager.all_tasks)
    for task in config.tasks:
        if task not in known:
            near = difflib.get_close_matches(task, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` lists them"
            hint = (_unreadable(include) if include is not None else "") or hint
            raise ConfigError(f"{FIELD}: lm-eval has no task {task!r}; {hint}")
    return manager


def _unreadable(folder: Path) -> str:
    """Says which task file in a folder is not YAML; lm-eval passes over such a file in silence. Empty where none is."""
    for path in sorted(folder.glob("**/*.yaml")):
        try:
            yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            return f"{path}:{line}: not YAML: {error.problem}"
        except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
            return f"{path}: not YAML: {' '.join(str(error).split())}"
    return ""


def _own_files(config: HarnessConfig, manager: Any) -> str:
    """The task files of the config's own folder that its tasks are from, in brackets; empty for tasks of lm-eval's."""
    if config.include_path is None:
        return ""
    folder, index = resolve_path(config.include_path), getattr(manager, "task_index", {})
    paths = (getattr(index.get(task), "yaml_path", None) for task in config.tasks)
    own = [str(path) for path in paths if path is not None and folder in Path(path).parents]
    return f" ({', '.join(own)})" if own else ""


@contextmanager
def _running(config: HarnessConfig, manager: Any) -> Iterator[None]:
    """Names the field, and task files of one's own, where a task fails to load or run: lm-eval and datasets raise many kinds.

    Raises ConfigError for a file that is not there, EnvironmentFault for anything else, such as a data set of the hub.
    """
    from datasets.exceptions import DatasetNotFoundError

    _allow_remote_code(config.trust_remote_code)
    try:
        yield
    except (ArchsearchError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "allocate memory" in str(error):  # How torch says that the host has too little.
            raise
        said = str(error).strip().partition("\n")[0]
        is_file = isinstance(error, FileNotFoundError)
        kind = (
            ConfigError
            if is_file and not isinstance(error, DatasetNotFoundError)
            else EnvironmentFault
        )
        files = _own_files(config, manager)
        raise kind(
            f"{FIELD}: {', '.join(config.tasks)}{files}: {type(error).__name__}: {said}"
        ) from error


def _allow_remote_code(allowed: bool) -> None:
    """Versions of datasets before 4 run scripts of data sets where this is set, and ask where it is not."""
    from datasets import config as settings

    if hasattr(settings, "HF_DATASETS_TRUST_REMOTE_CODE"):
        settings.HF_DATASETS_TRUST_REMOTE_CODE = allowed


@contextmanager
def _quiet() -> Iterator[None]:
    """Without lm-eval's progress bars and log: a trial is one line."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
