"""How does a command wait for what it wished? Asks the cluster again and again, and says what changes on the way."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from penstock.cli.client import Client, Refused, Unreachable
from penstock.kernel.errors import PenstockError

F = TypeVar("F", bound=Callable[..., Any])

EVERY = 0.2
"""Seconds between looks."""
MISSES_MAX = 50
"""Looks in a row without an answer after which it gives up: a frontend may just be replaced."""


class NotDone(PenstockError):
    """What was wished is not so, or not yet."""


def wait_options(command: F) -> F:
    """Add ``--wait/--no-wait`` and ``--wait-max``."""
    command = click.option(
        "--wait-max",
        type=click.FloatRange(0, min_open=True),
        default=900.0,
        show_default=True,
        metavar="SECONDS",
        help="Give up waiting after so long; the wish stays.",
    )(command)
    return click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is so.")(command)


def wait_for(
    client: Client, path: str, wait_max: float, look: Callable[[Mapping[str, Any]], str | None]
) -> Mapping[str, Any]:
    """Ask for ``path`` until a look at the answer is content; return that answer.

    Args:
        look: given an answer, returns what is still missing, or None where nothing is. It raises where it can't be.
    Raises:
        NotDone: it took too long; the message says what was missing.
    """
    end = time.monotonic() + wait_max
    misses, missing, said = 0, "an answer", ""
    while time.monotonic() < end:
        try:
            found = client.get(path)
        except (Unreachable, Refused):
            misses += 1
            if misses >= MISSES_MAX:
                raise
        else:
            misses = 0
            still = look(found)
            if still is None:
                return dict(found)
            missing = still
            if missing != said:
                said = missing
                click.echo(click.style(f"... {missing}", dim=True), err=True)
        time.sleep(EVERY)
    raise NotDone(f"after {wait_max:g} s: {missing}", hint="the wish stays, and 'penstock status' shows how it goes")
