"""The `archsearch` command, also as `python -m archsearch`. It imports nothing before Ctrl-C is looked after."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Imports the command line and calls it. Ctrl-C before that is one line and status 130, as it is later."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # A job in the background of a shell ignores it.
        signal.signal(signal.SIGINT, _leave)
    from .cli import main as call

    signal.signal(signal.SIGINT, before)
    call()


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the process at once: an exception out of the midst of an import may be swallowed or turned into another."""
    os.write(2, b"archsearch: interrupted; nothing was begun\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
