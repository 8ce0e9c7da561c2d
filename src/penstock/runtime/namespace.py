"""Under which name does a supervisor write down its engines, and what does it take over under that name?"""

import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.adapters.connectors.state_file import (
    StateFile,
    left_behind,
    living,
    namespace_of,
    passing_namespace,
    safe,
    state_folder,
)
from penstock.config.cluster import ClusterSettings
from penstock.config.secret import kept_secret
from penstock.kernel.errors import ConfigError
from penstock.runtime.ports import bind_error

log = logging.getLogger("penstock.supervisor")

PORT_PATIENCE = 10.0
"""Seconds that the frontends of a supervisor that was killed have to let go of the port."""


class Namespace(msgspec.Struct, frozen=True):
    """A state file that was taken. ``grace``: seconds that engines outlive this process where it is killed."""

    state: StateFile
    grace: float


def take_namespace(settings: ClusterSettings, env: Mapping[str, str]) -> Namespace:
    """Take the cluster's namespace; see that the port is free before.

    A cluster is named by its name and port, since there is one of them at a time and it comes back under the same. A
    port of the system's choice is no name: nobody could come back to such a cluster, so its engines end with it.

    Raises:
        ConfigError: the port is taken, or another cluster that lives has the namespace.
    """
    port, wished = settings.frontend.port, settings.supervise.namespace
    if wished is not None and safe(wished) != wished:
        raise ConfigError(f"supervise.namespace {wished!r} is no name of a file", hint=f"{safe(wished)} would be one")
    named = wished is not None or port != 0
    name = wished or (namespace_of(settings.name, port) if port else passing_namespace(settings.name, _token()))
    folder, chosen = state_folder(env)
    _check_port(settings, PORT_PATIENCE if named and left_behind(folder, name) else 0.0)
    try:
        state = StateFile.open(folder, name)
    except ConfigError:
        if chosen or os.access(_existing(folder), os.W_OK):
            raise
        # A user without a home, as in many containers: the cluster works, only nobody takes its engines over.
        log.warning("%s can't be written: engines will end with this process; set PENSTOCK_STATE_DIR", folder)
        folder = Path(settings.runs.dir).resolve() / ".state"
        return Namespace(StateFile.open(folder, passing_namespace(settings.name, _token())), 0.0)
    return Namespace(state, settings.supervise.orphan_grace if named else 0.0)


def earlier_secret(state: StateFile) -> str | None:
    """Return the secret of the cluster whose engines may be taken over: they know no other one."""
    if not state.before or not any(living(state.entries)):
        return None
    try:
        return kept_secret(Path(state.before["run"]))
    except ConfigError as error:
        log.warning("the engines of the earlier run keep a secret of their own: %s", error)
        return None


def _check_port(settings: ClusterSettings, patience: float) -> None:
    host, port = settings.frontend.host, settings.frontend.port
    end = time.monotonic() + patience
    while port and (reason := bind_error(host, port)) is not None:
        if time.monotonic() >= end:
            raise ConfigError(
                f"frontend.port {port} on {host} can't be bound: {reason}",
                hint="another server has it; choose one with --frontend.port, 0 takes any free one",
            )
        time.sleep(0.05)


def _token() -> str:
    return secrets.token_hex(4)


def _existing(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())
