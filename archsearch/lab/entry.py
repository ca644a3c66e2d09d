"""What scripts of the lab share: options that many of them have, and how a fault or a time limit ends one."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ..errors import INTERRUPTED, ArchsearchError


def script_parser(doc: str | None, *, figures: bool = True) -> argparse.ArgumentParser:
    """A parser that shows a script's docstring as it is written, with --figures where it writes such."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=shown)
    if figures:
        parser.add_argument(
            "--figures", type=Path, required=True, metavar="FILE", help="JSON that they go to"
        )
    return parser


def add_config(parser: argparse.ArgumentParser) -> None:
    """The arguments of a script that reads a config: `config` and `overrides`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
    add_overrides(parser, "config")


def add_run(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """The argument of a script that reads a run: `run`, or `runs`."""
    name, number = ("runs", "+") if several else ("run", None)
    parser.add_argument(name, type=Path, nargs=number, metavar="RUN", help="a run directory")


def add_overrides(parser: argparse.ArgumentParser, of: str) -> None:
    """--set as `overrides`, of a config or of that of a run."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        help=f"overrides one value of the {of}; may be given again",
    )


def run_script(main: Callable[[], None]) -> None:
    """Calls a script's main. A user's fault is one line and its exit status; SIGTERM ends it as Ctrl-C does, so that
    `finally` blocks write what there is."""
    signal.signal(signal.SIGTERM, _interrupt)
    name = Path(sys.argv[0]).stem
    try:
        main()
    except ArchsearchError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
