"""How a command ends where it cannot go on: a user's fault, or Ctrl-C, is one line on stderr and an exit status."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import typer

from .configfile import blamed
from .errors import INTERRUPTED, ArchsearchError, ConfigError, FieldFault
from .passwords import hide_passwords

_signals: list[int] = []
"""Signals that have asked this process to end."""


@contextlib.contextmanager
def naming(config: Path, overrides: list[str] | None) -> Iterator[None]:
    """Puts where the value was written, the config's path and line or a --set, before an error that names only the field."""
    try:
        yield
    except (ConfigError, FieldFault) as error:
        raise type(error)(f"{blamed(config, overrides or [], str(error))}: {error}") from error


@contextlib.contextmanager
def faults(debug: bool, *, resumes: bool = False) -> Iterator[None]:
    """Turns a user's fault into one line on stderr and its exit status; --debug adds the traceback.

    resumes: whether the command goes on after Ctrl-C where it was.
    """
    try:
        yield
    except ArchsearchError as error:
        if debug:
            typer.echo(hide_passwords(traceback.format_exc()), err=True, nl=False)
        typer.echo(hide_passwords(f"archsearch: {error}"), err=True)
        raise typer.Exit(error.exit_status) from error
    except (KeyboardInterrupt, ImportError) as error:
        # Packages that are interrupted in their import raise errors of their own.
        if not (isinstance(error, KeyboardInterrupt) or _signals):
            raise
        if debug:
            traceback.print_exc()
        then = "goes on from here" if resumes else "starts over"
        typer.echo(f"archsearch: interrupted; the same command {then}", err=True)
        raise typer.Exit(INTERRUPTED) from error


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler of signals that ask this process to end. Raises KeyboardInterrupt."""
    _signals.append(number)
    raise KeyboardInterrupt
