"""optuna-dashboard on the studies of a run, on the loopback interface. No torch."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .errors import ConfigError, EnvironmentFault
from .rundir import RunDir
from .search.storage import check_storage, sqlite_file, storage_url

HOST = "127.0.0.1"
MOST_PORT = 65_535
_STORAGE = "ARCHSEARCH_STORAGE"
# Every user of a machine sees the arguments of a process, and an URL may hold a password.
_SERVE = f"""
import os, sys
from optuna_dashboard._cli import main
sys.argv[:1] = ["optuna-dashboard", os.environ.pop("{_STORAGE}")]
main()
"""


def serve(run_dir: RunDir, port: str, say: Callable[[str], None]) -> None:
    """Serves until Ctrl-C, and says at which address.

    Raises ConfigError where there is no study yet or the port is none, EnvironmentFault where the port, the storage or
    the dashboard cannot be had.
    """
    number, storage = _number(port), storage_url(run_dir.load_config(), run_dir)
    if (file := sqlite_file(storage)) is not None:
        # The dashboard would make an empty database.
        run_dir.require_search(str(file.absolute()))
        run_dir.require_writable()
    check_storage(storage)
    _require_free(number)
    program = Path(sys.executable).with_name("optuna-dashboard")
    if not program.exists():
        raise EnvironmentFault("dashboard: the Python package optuna-dashboard is not installed")
    say(f"http://{HOST}:{number}/ (Ctrl-C stops it)")
    command = [sys.executable, "-P", "-c", _SERVE, "--host", HOST, "--port", str(number)]
    with contextlib.suppress(KeyboardInterrupt):
        # Ctrl-C reaches it too, where it would print a traceback: it leaves its end to us.
        status = subprocess.run(
            command,
            check=False,
            env={**os.environ, _STORAGE: storage},
            preexec_fn=_ignore_interrupt,
        ).returncode
        if status:
            raise EnvironmentFault(f"dashboard: optuna-dashboard ended with status {status}")


def _number(port: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= MOST_PORT:
        raise ConfigError(f"--port {port}: is no port; allowed: 1 to {MOST_PORT}")
    return int(port)


def _require_free(port: int) -> None:
    try:
        with socket.socket() as place:
            # As the server will: a port that was just let go of is free.
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.bind((HOST, port))
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise EnvironmentFault(
            f"--port {port}: {said}; allowed: a port that is free, such as {_any_port()}"
        ) from error


def _any_port() -> int:
    with socket.create_server((HOST, 0)) as place:
        port: int = place.getsockname()[1]
    return port


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
