"""Peer exchange: supervisors of different machines tell each other through the store where their tier processes listen.

A tier process says that in a file beside its socket, and looks there for those of others. So a supervisor puts the
files of its own into the store, under its lease, and writes what others put there into the same folder.
"""

import asyncio
import contextlib
import logging
from pathlib import Path

import msgspec

from penstock.adapters.seams import Store, StoreUnavailable
from penstock_kv.tiers.peer_tiers import LOOK, SUFFIX, PeerPlace

log = logging.getLogger("penstock.supervisor")

PREFIX = "kv-peers/"
ELSEWHERE = f".elsewhere{SUFFIX}"
"""End of the names of files that came from the store."""


class PeerExchange:
    """Of one supervisor.

    Args:
        folder: of its tier processes' sockets.
        ttl: seconds after which its entries go when it no longer runs.
        prefix: of its keys in the store.
    """

    def __init__(self, store: Store, folder: Path, ttl: float, *, prefix: str = PREFIX) -> None:
        self._store = store
        self._folder = folder
        self._ttl = ttl
        self._prefix = prefix
        self._published: dict[str, bytes] = {}

    async def run(self) -> None:
        """Exchange until cancelled; then take back what was put."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._folder.glob(f"*{ELSEWHERE}"):
            path.unlink(missing_ok=True)  # of a supervisor before this one
        try:
            await asyncio.gather(self._publish(), self._follow())
        finally:
            with contextlib.suppress(StoreUnavailable):  # its lease ends, too
                for name in self._published:
                    await self._store.delete(self._prefix + name)

    async def _publish(self) -> None:
        while True:
            try:
                await self._publish_once()
            except StoreUnavailable as error:
                log.warning("other machines do not hear of our tier processes: %s", error)
            await asyncio.sleep(LOOK)

    async def _publish_once(self) -> None:
        own = {}
        for path in self._folder.glob(f"*{SUFFIX}"):
            if not path.name.endswith(ELSEWHERE):
                with contextlib.suppress(OSError):  # it went
                    own[path.name.removesuffix(SUFFIX)] = path.read_bytes()
        for name in [name for name in self._published if name not in own]:
            await self._store.delete(self._prefix + name)
            del self._published[name]
        for name, value in own.items():
            if self._published.get(name) != value:
                self._published[name] = value
                await self._store.put(self._prefix + name, value, ttl=self._ttl)

    async def _follow(self) -> None:
        while True:
            try:
                async for changes in self._store.watch(self._prefix):
                    for change in changes:
                        self._take(change.key.removeprefix(self._prefix), change.value)
            except StoreUnavailable as error:
                log.warning(
                    "tier processes of other machines can't be listed, so their last known state is kept: %s", error
                )
            await asyncio.sleep(LOOK)

    def _take(self, name: str, value: bytes | None) -> None:
        path = self._folder / f"{name}{ELSEWHERE}"
        if value is None:
            path.unlink(missing_ok=True)
            return
        if name in self._published or (self._folder / f"{name}{SUFFIX}").exists():
            return
        try:
            place = msgspec.json.decode(value, type=PeerPlace)
        except msgspec.DecodeError as error:
            log.warning("the store's entry %s%s is left out: %s", self._prefix, name, error)
            return
        if place.name != name or Path(name).name != name:
            log.warning("the store's entry %s%s is left out: it is that of %r", self._prefix, name, place.name)
            return
        draft = path.with_suffix(".draft")
        draft.write_bytes(value)
        draft.replace(path)
