"""State file of a namespace: a supervisor records its engines there, so that the next supervisor adopts them.

    {namespace}.json    {"{namespace}_{component}": {"command", "lease", "pid", "resources", ...},
                         "{namespace}_{component}_1": ...}
    {namespace}.lock    its owner; held by a lock of the kernel, which ends with the owner however that ends

The unsuffixed entry of a component stays when its last engine goes, without lease, pid and resources: it has the
command that starts another. docs/guides/operating.md describes both files.
"""

import errno
import fcntl
import json
import logging
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.kernel.errors import ConfigError, write_hint

log = logging.getLogger("penstock.connector")

_SAFE = re.compile(r"[^A-Za-z0-9._-]+")
_PASSING = re.compile(r".+-run-[0-9a-f]{8}\Z")
"""Namespaces that no later run can return to: `passing_namespace`."""
OWNER_MAX = 8192
"""Bytes of a lock file that are read."""
STALE_AFTER = 3600.0
"""Seconds after which the files of such a namespace, whose owner was killed, are removed by the next start."""


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of this machine that one engine has."""

    gpus: tuple[int, ...] = ()
    port: int = 0


class StateEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine, or the command of a component that has none.

    ``lease``: name of its shim's socket; the holder of a connection to it holds the engine. ``replicas``: how many were
    desired when ``configured`` stood in the config; only in the unsuffixed entry.
    """

    command: list[str]
    lease: str | None = None
    pid: int | None = None
    resources: Resources | None = None
    worker: str | None = None
    url: str | None = None
    card: dict[str, Any] = {}
    asleep: bool = False
    """It serves nobody until it is woken: no later supervisor adopts it."""
    log: str | None = None
    replicas: int | None = None
    configured: int | None = None


class StateFile:
    """The state file of a namespace, owned until `close`.

    Writing never raises: a full disk costs adoption after a crash, not the cluster.
    """

    def __init__(self, folder: Path, namespace: str, lock: int) -> None:
        self.namespace = namespace
        self.path = folder / f"{namespace}.json"
        self.entries: dict[str, StateEntry] = _read_state_entries(self.path)
        self.before = _owner_of(os.pread(lock, OWNER_MAX, 0))
        """The last owner's record of itself; empty after a clean end."""
        self.failing = False
        self._lock_path = folder / f"{namespace}.lock"
        self._lock = lock

    @classmethod
    def open(cls, folder: Path, namespace: str) -> "StateFile":
        """Take a namespace; its ``entries`` are those that a killed owner left behind.

        Raises:
            ConfigError: a live supervisor owns it, or the folder can't be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            sweep(folder)
            lock = _lock_namespace(folder, namespace)
        except OSError as error:
            raise ConfigError(
                f"the state folder {folder} can't be written: {error.strerror or error}",
                hint=write_hint(error, "set PENSTOCK_STATE_DIR to another folder"),
            ) from error
        return cls(folder, namespace, lock)

    def own(self, run: Path) -> None:
        """Record the owner, for processes that find the namespace taken and for the next owner."""
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, json.dumps({"pid": os.getpid(), "run": str(run)}).encode() + b"\n", 0)
        except OSError as error:
            log.warning("%s can't be written: %s", self._lock_path, error)

    def name(self, component: str, number: int) -> str:
        """Return the name of a component's engine: suffixed but for number 0."""
        return f"{self.namespace}_{component}" + (f"_{number}" if number else "")

    def put(self, component: str, number: int, entry: StateEntry) -> None:
        """Record an engine."""
        if number == 0:
            known = self.entries.get(self.name(component, 0))
            if known is not None:
                entry = msgspec.structs.replace(entry, replicas=known.replicas, configured=known.configured)
        self.entries[self.name(component, number)] = entry
        self.write()

    def remove(self, component: str, number: int) -> None:
        """Remove an engine that is gone; the unsuffixed entry keeps its command."""
        name = self.name(component, number)
        known = self.entries.pop(name, None)
        if known is None:
            return
        if number == 0:
            self.entries[name] = StateEntry(
                command=known.command, card=known.card, replicas=known.replicas, configured=known.configured
            )
        self.write()

    def record_replicas(self, component: str, replicas: int, configured: int) -> None:
        """Record how many engines a component should have."""
        name = self.name(component, 0)
        known = self.entries.get(name, StateEntry(command=[]))
        self.entries[name] = msgspec.structs.replace(known, replicas=replicas, configured=configured)
        self.write()

    def write(self) -> None:
        """Replace the file, whole or not at all."""
        draft = self.path.with_suffix(".draft")
        try:
            raw = msgspec.json.format(msgspec.json.encode(self.entries), indent=2) + b"\n"
            draft.touch(mode=0o600)
            draft.write_bytes(raw)
            draft.replace(self.path)
        except OSError as error:
            if not self.failing:
                log.warning(
                    "the state file %s can't be written, so a crash would lose its engines: %s", self.path, error
                )
            self.failing = True
            return
        if self.failing:
            log.warning("the state file %s can be written again", self.path)
        self.failing = False

    def close(self) -> None:
        """Release the namespace. Its files stay only where engines still run, for the next owner."""
        for path in () if any(living(self.entries)) else (self.path, self._lock_path):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s can't be removed: %s", path, error)
        os.close(self._lock)


def state_folder(env: Mapping[str, str]) -> tuple[Path, bool]:
    """Return the folder of state files, and whether the operator chose it."""
    for name in ("PENSTOCK_STATE_DIR", "DYN_LOCAL_STATE_DIR"):
        if env.get(name):
            return Path(env[name]).expanduser().resolve(), True
    base = env.get("XDG_STATE_HOME") or str(Path(env.get("HOME") or "/nonexistent") / ".local" / "state")
    return Path(base) / "penstock", False


def namespace_of(name: str, port: int) -> str:
    """Name the cluster after its name and port: there is one at a time, and it comes back under the same."""
    return f"{safe(name)}-{port}"


def passing_namespace(name: str, token: str) -> str:
    """Name a cluster that no later run can return to, since its port was the system's choice."""
    return f"{safe(name)}-run-{token}"


def safe(name: str) -> str:
    """Return a name that is safe as a file name."""
    return _SAFE.sub("-", name).strip("-.") or "penstock"


def left_behind(folder: Path, namespace: str) -> bool:
    """Return whether a namespace's owner was killed, so that its engines may still be ending.

    Raises:
        ConfigError: it lives.
    """
    if not (folder / f"{namespace}.json").exists():
        return False
    try:
        os.close(_lock_namespace(folder, namespace))
    except OSError:
        return False
    return True


def sweep(folder: Path) -> None:
    """Remove the files of passing namespaces whose owners were killed long ago."""
    for path in folder.glob("*-run-*.lock"):
        if not _PASSING.match(path.stem) or time.time() - path.stat().st_mtime < STALE_AFTER:
            continue
        try:
            lock = _lock_namespace(folder, path.stem)
        except (ConfigError, OSError):
            continue
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        os.close(lock)


def _lock_namespace(folder: Path, namespace: str) -> int:
    """Lock a namespace and return the lock's descriptor; it lasts as long as this process, and forks do not have it.

    Raises:
        ConfigError: another process holds the lock.
    """
    path = folder / f"{namespace}.lock"
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # An open file description lock: it ends with our descriptor, not with any other of the same file.
            fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _flock())
            if os.fstat(lock).st_ino == path.stat().st_ino:
                return lock
            os.close(lock)  # its owner removed it between our open and our lock
        except FileNotFoundError:
            os.close(lock)
        except OSError as error:
            owner = _owner_of(os.pread(lock, OWNER_MAX, 0))
            os.close(lock)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            holder = f"process {owner['pid']} with the run folder {owner['run']}" if owner else "which is just starting"
            raise ConfigError(
                f"the namespace {namespace} belongs to another cluster, {holder}",
                hint="stop that one, or give this one another --frontend.port or --supervise.namespace",
            ) from None


def _flock() -> bytes:
    """Return a struct flock that locks a whole file for writing."""
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def _owner_of(raw: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(raw)
        return owner if isinstance(owner, dict) and {"pid", "run"} <= set(owner) else {}
    except ValueError:
        return {}


def _read_state_entries(path: Path) -> dict[str, StateEntry]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, StateEntry])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("the state file %s can't be read, so no engine is taken over: %s", path, error)
        return {}


def living(entries: Mapping[str, StateEntry]) -> Iterator[tuple[str, StateEntry]]:
    """Yield the entries that have an engine."""
    return ((name, entry) for name, entry in entries.items() if entry.lease is not None)
