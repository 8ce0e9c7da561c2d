"""Shell completion with names of the running cluster; no names where no cluster answers within a second."""

from collections.abc import Callable
from typing import TypeVar

import click

from penstock.cli.shared.admin_client import AdminClient
from penstock.frontend.admin.cluster_status import ClusterStatus
from penstock.kernel.errors import PenstockError
from penstock.runtime.cluster_state.fleet_api import DesiredState
from penstock.runtime.supervision.terminal import USUAL_URL

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds; a user who presses Tab does not wait longer."""


def workers(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete a worker."""
    return _names(
        context, incomplete, ClusterStatus, "/admin/status", lambda answer: [each.id for each in answer.workers]
    )


def models(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete a model."""
    return _names(
        context, incomplete, ClusterStatus, "/admin/status", lambda answer: [each.name for each in answer.models]
    )


def pools(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the pool of POOL=N."""
    named = _names(
        context, incomplete, DesiredState, "/admin/desired", lambda answer: [each.name for each in answer.pools]
    )
    return [f"{name}=" for name in named]


def _names(
    context: click.Context, incomplete: str, kind: type[T], path: str, read: Callable[[T], list[str]]
) -> list[str]:
    given = context.params
    client = AdminClient(given.get("url") or USUAL_URL, given.get("admin_key"), timeout=PATIENCE)
    try:
        names = read(client.get(path, kind))
    except PenstockError:
        return []  # errors can't be shown while a line is being typed
    return sorted(name for name in names if name.startswith(incomplete))
