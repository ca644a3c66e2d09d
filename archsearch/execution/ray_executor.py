"""Runs tasks on Ray actors of this machine: a process each, replaced when it dies."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

# Ray listens on every interface unless told that this machine forms no cluster; it reads this variable
# (despite its name, on every system) when it is imported.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# gpus_per_worker: 0 leaves the GPUs in sight, as newer versions of Ray do by themselves.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
import ray

from ..errors import ArchsearchError, EnvironmentFault
from .base import (
    HOST_MEMORY,
    WORKER_DIED,
    MakeWorker,
    Outcome,
    Payload,
    Worker,
    blame,
    breaks_device,
    describe,
)

_log = logging.getLogger(__name__)

_STORE_BYTES = 100 * 2**20
"""Ray's object store holds specs and results only, both tiny; Ray's minimum is 75 MiB."""
_TEMPORARY_BYTES = 2**30
"""Room that Ray needs for its sockets, logs and store where it keeps them."""


@dataclass(frozen=True)
class _Answer:
    """What an actor says of a task. is_broken: its process is of no more use."""

    result: Any = None
    error: str | None = None
    fault: type[ArchsearchError] | None = None
    is_broken: bool = False


class _Actor:
    """The process behind one actor. It gets names, not objects, so that threads are set before imports."""

    def __init__(self, module: str, name: str, payload: dict[str, Any], threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self._source = (module, name, payload)
        self._worker: Worker | None = None

    def ready(self) -> int:
        """Builds the worker if need be; the process id. Raises what the worker's start raises."""
        self._build()
        return os.getpid()

    def call(self, spec: Any) -> _Answer:
        """The worker's result, or what went wrong."""
        try:
            return _Answer(self._build()(spec))
        except Exception as error:
            _log.exception("task failed")
            if breaks_device(error):
                return _Answer(error=f"{WORKER_DIED}: {describe(error)}", is_broken=True)
            return _Answer(error=describe(error), fault=blame(error))

    def _build(self) -> Worker:
        # Not in __init__: an exception there reaches the driver without its type.
        if self._worker is None:
            module, name, payload = self._source
            make_worker: Any = importlib.import_module(module)
            for part in name.split("."):
                make_worker = getattr(make_worker, part)
            self._worker = make_worker(payload)
        return self._worker


class RayExecutor:
    """`workers` actors, each with its share of cores and GPUs, built before the first task.

    threads 0 shares the cores evenly. gpus_per_worker may be a fraction. Raises EnvironmentFault where
    the machine lacks the GPUs, the disk or the Ray set-up, and whatever a worker's own start raises.
    """

    def __init__(
        self,
        make_worker: MakeWorker,
        payload: Payload,
        *,
        workers: int = 1,
        gpus_per_worker: float = 0,
        threads: int = 0,
    ) -> None:
        self._threads = threads or max(1, (os.cpu_count() or 1) // workers)
        self._gpus = gpus_per_worker
        self._source = (make_worker.__module__, make_worker.__qualname__, dict(payload))
        self._open: dict[Any, tuple[int, Any]] = {}
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            start_ray(workers * self._threads)
        try:
            _check_gpus(workers, gpus_per_worker)
            self._idle = [self._spawn() for _ in range(workers)]
            self._capacity = workers
            self._wait_ready()
        except BaseException:
            self.shutdown()
            raise

    @property
    def capacity(self) -> int:
        """The number of actors."""
        return self._capacity

    def pids(self) -> list[int]:
        """Process ids of the idle actors."""
        found: list[int] = ray.get([actor.ready.remote() for actor in self._idle])
        return found

    def submit(self, task_id: int, spec: Any) -> None:
        """Gives the task to an idle actor. Raises RuntimeError where none is."""
        if not self._idle:
            raise RuntimeError("all workers are busy")
        actor = self._idle.pop(0)
        self._open[actor.call.remote(spec)] = (task_id, actor)

    def next_done(self) -> Outcome:
        """Waits for any open task. Raises RuntimeError where none is open."""
        if not self._open:
            raise RuntimeError("no task is open")
        done, _ = ray.wait(list(self._open), num_returns=1)
        task_id, actor = self._open.pop(done[0])
        try:
            answer: _Answer = ray.get(done[0])
        except ray.exceptions.RayError as fault:
            _log.debug("task %d lost its worker", task_id, exc_info=True)
            self._idle.append(self._replace(actor))
            return Outcome(task_id, error=_cause(fault))
        self._idle.append(self._replace(actor) if answer.is_broken else actor)
        return Outcome(task_id, answer.result, answer.error, answer.fault)

    def shutdown(self) -> None:
        """Kills the actors, and Ray too where this executor started it."""
        if ray.is_initialized():
            for actor in [*getattr(self, "_idle", []), *(a for _, a in self._open.values())]:
                ray.kill(actor)
            if self._owns_ray:
                ray.shutdown()
        self._idle = []
        self._open = {}

    def _spawn(self) -> Any:
        module, name, payload = self._source
        remote: Any = ray.remote(num_cpus=self._threads, num_gpus=self._gpus, max_restarts=0)(
            _Actor
        )
        return remote.remote(module, name, payload, self._threads)

    def _replace(self, actor: Any) -> Any:
        ray.kill(actor)  # An actor that Ray only lost touch with must not keep its GPU.
        return self._spawn()

    def _wait_ready(self) -> None:
        try:
            self.pids()
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise EnvironmentFault(f"a worker cannot start: {_first_lines(error)}") from error


def start_ray(num_cpus: int) -> None:
    """Starts Ray for this process alone, on the loopback interface, without a dashboard.

    Raises EnvironmentFault where its folder is full or Ray does not start.
    """
    temporary = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
    free = shutil.disk_usage(temporary).free
    if free < _TEMPORARY_BYTES:
        raise EnvironmentFault(
            f"{temporary}: {free / 1e9:.2f} GB of disk is free, Ray needs {_TEMPORARY_BYTES / 1e9:.2f} GB "
            "there; set RAY_TMPDIR to a roomier folder"
        )
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            # "local" keeps Ray from joining a cluster that RAY_ADDRESS names.
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except Exception as error:
        if type(error).__name__ == "AuthenticationError":
            # The message of the exception is left out: it may quote the token.
            raise EnvironmentFault(
                "Ray refuses to start: token authentication is on (RAY_AUTH_MODE) and its token is "
                "missing or wrong; run `ray get-auth-token --generate`, or set RAY_AUTH_MODE=disabled"
            ) from None
        raise EnvironmentFault(f"Ray cannot start: {_first_lines(error)}") from error
    if threading.current_thread() is threading.main_thread():
        # Ray puts its own handler in the place of the caller's, which ends the process on the spot.
        signal.signal(signal.SIGTERM, on_terminate)


def _check_gpus(workers: int, gpus_per_worker: float) -> None:
    """Raises EnvironmentFault where the workers' GPUs do not exist: Ray would wait for them for ever."""
    if not gpus_per_worker:
        return
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    found = int(resources.get("GPU", 0))
    if gpus_per_worker < 1:
        fitting = found * int(1 / gpus_per_worker + 1e-9)
    else:
        fitting = int(found / gpus_per_worker)
    if fitting < workers:
        raise EnvironmentFault(
            f"{workers} workers with {gpus_per_worker:g} GPUs each do not fit on {found} GPUs; "
            "lower execution.workers or execution.gpus_per_worker"
        )


def _cause(fault: Exception) -> str:
    """The label of a lost task."""
    text = str(fault)
    if isinstance(fault, ray.exceptions.OutOfMemoryError) or "memory pressure" in text:
        return HOST_MEMORY
    if isinstance(fault, ray.exceptions.RayActorError | ray.exceptions.WorkerCrashedError):
        return WORKER_DIED
    return f"{WORKER_DIED}: {_first_lines(fault)}"


def _first_lines(error: BaseException, limit: int = 300) -> str:
    return " ".join(str(error).split())[:limit]
