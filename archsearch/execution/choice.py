"""The executor that a config asks for."""

from __future__ import annotations

from collections.abc import Callable

from ..config import ExecutionConfig
from .base import Executor, MakeWorker, Payload
from .serial import SerialExecutor


def open_executor(config: ExecutionConfig, make_worker: MakeWorker, payload: Payload) -> Executor:
    """Starts the executor of config.executor. Raises EnvironmentFault where the machine cannot."""
    return EXECUTORS[config.executor](config, make_worker, payload)


def _serial(config: ExecutionConfig, make_worker: MakeWorker, payload: Payload) -> Executor:
    return SerialExecutor(make_worker, payload)


def _ray(config: ExecutionConfig, make_worker: MakeWorker, payload: Payload) -> Executor:
    from .ray_executor import RayExecutor  # Ray takes seconds to import.

    return RayExecutor(
        make_worker,
        payload,
        workers=config.workers,
        gpus_per_worker=config.gpus_per_worker,
        threads=config.threads_per_worker,
    )


EXECUTORS: dict[str, Callable[[ExecutionConfig, MakeWorker, Payload], Executor]] = {
    "serial": _serial,
    "ray": _ray,
}
