"""Waits until the cluster has done what a command requested: polls an admin route and prints each change."""

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from penstock.cli.shared.admin_client import AdminClient, ClusterUnreachable, RequestRefused
from penstock.kernel.errors import PenstockError

T = TypeVar("T")

EVERY = 0.2
"""Seconds between two requests."""
MISSES_MAX = 50
"""Requests in a row without an answer before it gives up: a frontend may just be replaced."""


class NotDone(PenstockError):
    """The request is not carried out, or not yet."""


def wait_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add ``--wait/--no-wait`` and ``--wait-max``; the command gets ``patience`` in seconds, None for no waiting."""

    @functools.wraps(command)
    def with_patience(*, wait: bool, wait_max: float, **others: Any) -> int:
        return command(patience=wait_max if wait else None, **others)

    limited = click.option(
        "--wait-max",
        type=click.FloatRange(0, min_open=True),
        default=900.0,
        show_default=True,
        metavar="SECONDS",
        help="Give up waiting after so long; the desired state stays.",
    )(with_patience)
    return click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is so.")(limited)


def wait_for(client: AdminClient, path: str, kind: type[T], patience: float, look: Callable[[T], str | None]) -> T:
    """Request ``path`` until ``look`` is satisfied with the answer; return that answer.

    Args:
        look: given an answer, returns what is still missing, or None where nothing is; raises where it can't succeed.
    Raises:
        NotDone: it took too long; the message says what was missing.
    """
    end = time.monotonic() + patience
    misses, missing, shown = 0, "an answer", ""
    while time.monotonic() < end:
        try:
            answer = client.get(path, kind)
        except (ClusterUnreachable, RequestRefused):
            misses += 1
            if misses >= MISSES_MAX:
                raise
        else:
            misses = 0
            still = look(answer)
            if still is None:
                return answer
            missing = still
            if missing != shown:
                shown = missing
                click.echo(click.style(f"... {missing}", dim=True), err=True)
        time.sleep(EVERY)
    raise NotDone(
        f"after {patience:g} s: {missing}", hint="the desired state stays, and 'penstock status' shows the progress"
    )
