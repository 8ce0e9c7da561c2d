"""Terminal of a supervisor: prints lines for the operator, and handles SIGINT, SIGTERM and SIGHUP."""

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


def ignore_closed_terminal(say: Say) -> Say:
    """Return a printer of lines that ignores a closed terminal, which must not end a cluster."""

    def guarded(line: str) -> None:
        try:
            say(line)
        except OSError as error:
            log.warning("the terminal is closed (%s): %s", error, line)

    return guarded


def on_signals(stopping: asyncio.Event, hurry: asyncio.Event, reread: Callable[[], None] | None = None) -> None:
    """Handle SIGINT and SIGTERM: the first one sets ``stopping``, the next one ``hurry``.

    Args:
        reread: called at SIGHUP, unless that means a closed terminal; that stops, but not under nohup. None
            takes every SIGHUP for a stop.
    """
    had_terminal = _has_terminal()
    stays = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    def stop() -> None:
        (hurry if stopping.is_set() else stopping).set()

    def hung_up() -> None:
        if reread is None or (had_terminal and not stays and not _has_terminal()):
            stop()
        else:
            reread()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, hung_up)


USUAL_URL = "http://127.0.0.1:8000"
"""URL at which commands look for a cluster by default."""


def at_url(url: str) -> str:
    """Return the option that a printed command needs to find a cluster: empty where the default finds it."""
    return "" if url == os.environ.get("PENSTOCK_URL", USUAL_URL) else f" --url {url}"


def this_command() -> str:
    """Return how the operator calls penstock: by name where it is on the PATH, else by the path beside this Python."""
    if shutil.which("penstock"):
        return "penstock"
    beside = Path(sys.executable).parent / "penstock"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
