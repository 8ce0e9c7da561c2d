"""Shell completion with names of the running cluster; no names where no cluster answers within a second."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import click

from penstock.cli.shared.admin_client import AdminClient
from penstock.frontend.admin.admin_answers import ClusterStatus
from penstock.kernel.errors import PenstockError
from penstock.runtime.cluster_state.fleet_api import DesiredState
from penstock.runtime.supervision.terminal import USUAL_URL

T = TypeVar("T")
Complete = Callable[[click.Context, click.Parameter, str], list[str]]

PATIENCE = 1.0
"""Seconds; a user who presses Tab does not wait longer."""


def _completion(path: str, kind: type[T], names_of: Callable[[T], Iterable[str]]) -> Complete:
    """Return the completion with names from an admin route's answer."""

    def complete(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        given = context.params
        client = AdminClient(given.get("url") or USUAL_URL, given.get("admin_key"), timeout=PATIENCE)
        try:
            names = names_of(client.get(path, kind))
        except PenstockError:
            return []  # errors can't be shown while a line is being typed
        return sorted(name for name in names if name.startswith(incomplete))

    return complete


workers = _completion("/admin/status", ClusterStatus, lambda status: (each.id for each in status.workers))
models = _completion("/admin/status", ClusterStatus, lambda status: (each.name for each in status.models))
pools = _completion("/admin/desired", DesiredState, lambda state: (f"{each.name}=" for each in state.pools))
"""The pool of POOL=N."""
