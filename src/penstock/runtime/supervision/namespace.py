"""Namespace of a cluster: the name of a supervisor's state file, and the engines that it takes over with it."""

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
from penstock.adapters.listen_address import bind_error
from penstock.config.cluster_secret_file import stored_secret
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError, bind_hint

log = logging.getLogger("penstock.supervisor")

PORT_PATIENCE = 10.0
"""Seconds that the frontends of a killed supervisor have to free the port."""


class Namespace(msgspec.Struct, frozen=True):
    """A state file that was taken. ``grace``: seconds that engines outlive this process where it is killed."""

    state: StateFile
    grace: float


def take_namespace(settings: ClusterSettings, env: Mapping[str, str]) -> Namespace:
    """Take the cluster's namespace; check before that the port is free.

    A cluster is named by its name and port, since there is one of them at a time and it comes back under the same. A
    port of the system's choice is no name: no later run could return to such a cluster, so its engines end with it.

    Raises:
        ConfigError: the port is taken, or another live cluster has the namespace.
    """
    port, given = settings.frontend.port, settings.supervise.namespace
    if given is not None and safe(given) != given:
        raise ConfigError(f"supervise.namespace {given!r} is not a name for a file", hint=f"{safe(given)} would be one")
    named = given is not None or port != 0
    name = given or (namespace_of(settings.name, port) if port else passing_namespace(settings.name, _token()))
    folder, chosen = state_folder(env)
    _check_port(settings, PORT_PATIENCE if named and left_behind(folder, name) else 0.0)
    try:
        state = StateFile.open(folder, name)
    except ConfigError:
        if chosen or os.access(_existing(folder), os.W_OK):
            raise
        # A user without a home, as in many containers: the cluster works, but no supervisor adopts its engines.
        log.warning("%s can't be written: engines will end with this process; set PENSTOCK_STATE_DIR", folder)
        folder = Path(settings.runs.dir).resolve() / ".state"
        return Namespace(StateFile.open(folder, passing_namespace(settings.name, _token())), 0.0)
    return Namespace(state, settings.supervise.orphan_grace if named else 0.0)


def earlier_secret(state: StateFile) -> str | None:
    """Return the secret of the cluster whose engines may be adopted: they know no other one."""
    if not state.before or not any(living(state.entries)):
        return None
    try:
        return stored_secret(Path(state.before["run"]))
    except ConfigError as error:
        log.warning("the engines of the earlier run keep a secret of their own: %s", error)
        return None


def _check_port(settings: ClusterSettings, patience: float) -> None:
    host, port = settings.frontend.host, settings.frontend.port
    end = time.monotonic() + patience
    while port and (error := bind_error(host, port)) is not None:
        if time.monotonic() >= end:
            raise ConfigError(
                f"frontend.port {port} on {host} can't be bound: {error.strerror or error}",
                hint=bind_hint(error, "choose one with --frontend.port, 0 takes any free one"),
            )
        time.sleep(0.05)


def _token() -> str:
    return secrets.token_hex(4)


def _existing(folder: Path) -> Path:
    """Return a folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.parents) if path.exists())
