"""Cluster secret: kept in the environment of our processes, and for `join` in a file of the run folder.

The supervisor makes it at its start, unless one is given. Children get it in their environment, never as an
argument; no config.yaml, log or page has it. Only this user can read the file, which goes with the run.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from penstock.config.derived.knobs import derive, env_name
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.secret import ClusterSecret

SECRET_ENV = env_name(("cluster_secret",))
"""``PENSTOCK_CLUSTER_SECRET``."""
SECRET_FILE = "cluster.secret"
"""Name of the secret's file in a run folder."""
_OTHERS = 0o077
_CLIENT_KEYS = ("PENSTOCK_ADMIN_KEY", "PENSTOCK_API_KEY")
"""What our commands send to a cluster; the environment of the process that starts a cluster may hold them."""


def secret_text(settings: ClusterSettings) -> str:
    """Return the secret that was given, or make a new one.

    Raises:
        ConfigError: the file that is named can't be read, or others can read it.
    """
    if settings.cluster_secret is not None:
        return settings.cluster_secret
    if settings.cluster_secret_file is not None:
        return _read_secret(Path(settings.cluster_secret_file))
    return secrets.token_urlsafe(32)


def keep_secret(folder: Path, text: str) -> Path:
    """Write the secret into a run folder, readable by this user alone; return the file.

    Raises:
        ConfigError: the folder can't be written.
    """
    path = folder / SECRET_FILE
    try:
        # Made with its mode at once: between making the file and changing its mode any user could open it.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
    except OSError as error:
        raise ConfigError(f"the cluster's secret can't be kept in {path}: {error.strerror}") from error
    return path


def drop_secret(folder: Path) -> None:
    """Delete the secret's file from a run folder at the run's end; an absent file is no error."""
    (folder / SECRET_FILE).unlink(missing_ok=True)


def stored_secret(folder: Path) -> str | None:
    """Return the secret of a running cluster from its run folder; None where there is none.

    Raises:
        ConfigError: the file belongs to another user, or others can read it.
    """
    path = folder / SECRET_FILE
    return _read_secret(path) if path.exists() else None


def secret_of_process(settings: ClusterSettings, run: Path) -> ClusterSecret | None:
    """Return the secret of a process that the supervisor started: from its settings, else from the run folder."""
    text = settings.cluster_secret or stored_secret(run)
    return None if text is None else ClusterSecret(text)


def secret_of_env(env: Mapping[str, str]) -> ClusterSecret | None:
    """Return the secret that an engine of ours was started with, or None."""
    text = env.get(SECRET_ENV)
    return ClusterSecret(text) if text else None


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without any secret of ours, for starting a stock engine."""
    hidden = {knob.env for knob in derive(ClusterSettings) if knob.knob.secret} | {*_CLIENT_KEYS}
    return {name: value for name, value in env.items() if name not in hidden}


def private_text(path: Path, name: str, hint: str | None = None) -> str:
    """Return the text of a file that only this user, or root, may own and read.

    Args:
        name: of the file, for messages.
        hint: for a user who may not read it.
    Raises:
        ConfigError: it can't be read, other users can read it, or it holds no text.
    """
    try:
        with path.open() as file:
            stat = os.fstat(file.fileno())
            if stat.st_mode & _OTHERS or stat.st_uid not in (os.geteuid(), 0):
                raise ConfigError(
                    f"{name} can be read by others, or belongs to another user", hint=f"chmod 600 {path}, as its owner"
                )
            return file.read()
    except OSError as error:
        denied = hint if isinstance(error, PermissionError) else None
        raise ConfigError(f"{name} can't be read: {error.strerror}", hint=denied) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not text") from error


def _read_secret(path: Path) -> str:
    name, hint = f"the cluster's secret in {path}", "join runs as the user who started the cluster"
    text = private_text(path, name, hint).strip()
    try:
        ClusterSecret(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return text
