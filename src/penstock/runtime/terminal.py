"""How does a supervisor speak with the person who started it, and how does it hear them? Lines and signals."""

import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("penstock.supervisor")

Say = Callable[[str], None]


def unless_gone(say: Say) -> Say:
    """Return what prints a line as long as somebody reads it: a closed terminal must not end a cluster."""

    def told(line: str) -> None:
        try:
            say(line)
        except OSError as error:
            log.warning("nobody reads this any more (%s): %s", error, line)

    return told


def on_signals(stopping: asyncio.Event, hurry: asyncio.Event, reread: Callable[[], None] | None = None) -> None:
    """Hear SIGINT and SIGTERM: the first one sets ``stopping``, the next one ``hurry``.

    Args:
        reread: called at SIGHUP, unless it says that the terminal was closed; that stops, but not under nohup. None
            takes every SIGHUP for a stop.
    """
    had_terminal = _has_terminal()
    stays = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    def asked() -> None:
        (hurry if stopping.is_set() else stopping).set()

    def hung_up() -> None:
        if reread is None or (had_terminal and not stays and not _has_terminal()):
            asked()
        else:
            reread()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked)
    loop.add_signal_handler(signal.SIGHUP, hung_up)


def this_command() -> str:
    """Return how this person calls penstock: by name where that is found, else by the path beside this Python."""
    if shutil.which("penstock"):
        return "penstock"
    beside = Path(sys.executable).parent / "penstock"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def _has_terminal() -> bool:
    """Tell whether this process has a terminal that controls it."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
