"""Students one after the other: what is left, and why."""

from __future__ import annotations

from typing import Any

from archsearch.execution.serial import SerialExecutor
from archsearch.headmap import HeadMap, Operator
from archsearch.lab.ledger import FAILED
from archsearch.lab.student_jobs import Job, Left, run_jobs
from archsearch.lab.student_worker import DONE, STOPPED
from tests.search.fakes import SHAPE

MAP = HeadMap.uniform(SHAPE, Operator.GDN)


def make_worker(answers: dict[str, Any]) -> Any:
    """A worker that answers by the seed of its task; what is no answer is raised."""

    def work(task: dict[str, Any]) -> str:
        answer = answers[str(task["seed"])]
        if answer not in (DONE, STOPPED, FAILED):
            raise RuntimeError(answer)
        return str(answer)

    return work


def test_jobs_that_raised_are_told_from_those_that_came_too_late() -> None:
    jobs = [Job(f"map {seed}", MAP, seed, (0,)) for seed in range(4)]
    answers = {"0": DONE, "1": "broken", "2": STOPPED, "3": FAILED}
    executor = SerialExecutor(make_worker, answers)
    assert run_jobs(executor, jobs, float("inf")) == Left(1, ("map 1",))
    assert run_jobs(executor, jobs, 0.0) == Left(4)
    assert run_jobs(executor, jobs, 0.0).jobs == 4
