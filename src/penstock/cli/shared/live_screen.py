"""Live screen: a cluster's status, redrawn until q or Ctrl-C."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.cli.shared.admin_client import AdminClient, ClusterUnreachable
from penstock.cli.shared.output import painted
from penstock.frontend.admin.admin_answers import ClusterStatus
from penstock.router.status_rows import OUTCOMES, StatusCounts

TIMEOUT = 5.0
"""Seconds for one answer; with an older status on the screen it is better to ask again."""
MISSES_MAX = 30
"""Requests in a row without an answer before it gives up."""
Screen = Callable[[ClusterStatus, float | None, str | None], str]
"""Given a status, how many requests end per second, and what is wrong with the status: the text to show."""


def watch(client: AdminClient, every: float, looks: int | None, screen: Screen) -> None:
    """Show a cluster's status until q or Ctrl-C.

    Args:
        every: seconds between two looks.
        looks: end after so many; None is never.
    """
    client.timeout = TIMEOUT
    status = client.get("/admin/status", ClusterStatus)
    try:
        with _quit_key_listener() as left:
            _refresh_screen(client, status, every, looks, screen, left)
    except KeyboardInterrupt:
        return  # the usual way to leave it


@contextmanager
def _quit_key_listener() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits so many seconds, and returns at once when q is pressed.

    Without a terminal there are no keys, and the function only waits.
    """
    try:
        stdin = sys.stdin.fileno()
        before = termios.tcgetattr(stdin)
    except (OSError, ValueError, termios.error):
        yield _wait_without_keys
        return

    def left(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while select.select([stdin], [], [], max(0.0, end - time.monotonic()))[0]:
            pressed = os.read(stdin, 64)
            if b"q" in pressed.lower() or not pressed:  # nothing: the terminal is gone
                return True
        return False

    tty.setcbreak(stdin)
    try:
        yield left
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _wait_without_keys(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _refresh_screen(
    client: AdminClient,
    status: ClusterStatus,
    every: float,
    looks: int | None,
    screen: Screen,
    left: Callable[[float], bool],
) -> None:
    from rich.live import Live
    from rich.text import Text

    def drawn(status: ClusterStatus, rate: float | None, note: str | None) -> Text:
        text = screen(status, rate, note)
        plain = os.environ.get("NO_COLOR") or not sys.stdout.isatty()
        return Text(text) if plain else Text.from_ansi(painted(text))

    before, read_at, misses, done = status, time.monotonic(), 0, 1
    with Live(drawn(status, None, None), refresh_per_second=4, transient=False) as live:
        while looks is None or done < looks:
            if left(every):
                return
            done += 1
            try:
                status = client.get("/admin/status", ClusterStatus)
            except ClusterUnreachable as error:
                misses += 1
                if misses >= MISSES_MAX:
                    raise
                live.update(drawn(before, None, f"{error.message}; shown is the last answer"))
                continue
            now = time.monotonic()
            live.update(drawn(status, requests_per_second(before.requests, status.requests, now - read_at), None))
            before, read_at, misses = status, now, 0


def requests_per_second(before: StatusCounts, after: StatusCounts, seconds: float) -> float | None:
    """Return how many requests ended per second between two reports; None where the counts fell."""
    counts: list[int] = [sum(getattr(requests, outcome) for outcome in OUTCOMES) for requests in (before, after)]
    if seconds <= 0 or counts[1] < counts[0]:
        return None
    return (counts[1] - counts[0]) / seconds
