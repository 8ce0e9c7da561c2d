"""Adapter registry: which LoRA adapters clients may name, and where they lie, by settings, folders and operators.

Operators' word stands in the store and wins over the settings. A folder is never listed for a request: a name is looked
up in it, so that thousands of adapters cost nothing until they are asked for.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.runtime.cluster_state.desired_state import (
    ADAPTER_WORKERS,
    ADAPTERS,
    AdapterSpec,
    AdapterWorkersSpec,
    DesiredRecord,
    decode,
)
from penstock.runtime.cluster_state.store_watch import follow

log = logging.getLogger("penstock.adapters")

R = TypeVar("R", bound=DesiredRecord)

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]{0,199}\Z")
"""Names of adapters: in a folder each is the name of a subfolder, and in the store the end of a key."""
CONFIG = "adapter_config.json"
"""File that makes a folder an adapter (PEFT)."""
LISTED_MAX = 10_000
"""Most adapters that are listed."""


class KnownAdapter(NamedTuple):
    """An adapter by name, its model, and where its engines find it."""

    name: str
    model: str
    path: str


class AdapterRegistry:
    """The adapters of one frontend."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.changes = 0
        """How often operators have changed something."""
        self._named = {
            name: KnownAdapter(name, model, path)
            for model, entry in settings.models.items()
            for name, path in entry.adapters.items()
        }
        self._folders = [
            (model, Path(entry.adapter_folder).expanduser().absolute())
            for model, entry in settings.models.items()
            if entry.adapter_folder is not None
        ]
        self._specs: dict[str, AdapterSpec] = {}
        self._workers = {
            name: count for entry in settings.models.values() for name, count in entry.adapter_workers.items()
        }
        self._worker_specs: dict[str, AdapterWorkersSpec] = {}
        self.on_changed: Callable[[], None] = lambda: None
        """Called when an operator has changed something."""
        self.on_dropped: Callable[[str, str], None] = lambda model, adapter: None
        """Called with the model and the name of an adapter that an operator took out of service."""

    def find(self, name: str) -> KnownAdapter | None:
        """Return an adapter; None where there is none of that name."""
        spec = self._specs.get(name)
        if spec is not None:
            return None if spec.path is None else KnownAdapter(name, spec.model, spec.path)
        named = self._named.get(name)
        if named is not None or not self._folders or not NAME.match(name):
            return named
        for model, folder in self._folders:
            if (folder / name / CONFIG).is_file():
                return KnownAdapter(name, model, str(folder / name))
        return None

    def workers_of(self, name: str) -> int:
        """Return how many workers are to hold an adapter at any time."""
        spec = self._worker_specs.get(name)
        return self._workers.get(name, 0) if spec is None else spec.workers

    def wanted(self) -> dict[str, dict[str, int]]:
        """Return, by model, how many workers are to hold each adapter; those on none, and unknown ones, are absent."""
        models: dict[str, dict[str, int]] = {}
        for name in sorted({*self._workers, *self._worker_specs}):
            count = self.workers_of(name)
            known = self.find(name) if count else None
            if known is not None:
                models.setdefault(known.model, {})[name] = count
        return models

    def dropped(self, name: str) -> bool:
        """Return whether an operator has taken a name out of service."""
        spec = self._specs.get(name)
        return spec is not None and spec.path is None

    def listed(self) -> Iterator[KnownAdapter]:
        """Yield the adapters, `LISTED_MAX` at most. Cost: lists the folders."""
        names = dict.fromkeys((*self._specs, *self._named))
        for _, folder in self._folders:
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if len(names) >= LISTED_MAX:
                            break
                        names.setdefault(entry.name)
            except OSError as error:
                log.warning("the adapters of %s can't be listed: %s", folder, error)
        for name in sorted(names)[:LISTED_MAX]:
            found = self.find(name)
            if found is not None:
                yield found

    def set(self, name: str, spec: AdapterSpec | None) -> None:
        """Take over what an operator said of a name; None: nothing any more."""
        if self._specs.get(name) == spec:
            return
        self.changes += 1
        if spec is None:
            self._specs.pop(name, None)
        else:
            self._specs[name] = spec
            if spec.path is None:
                self.on_dropped(spec.model, name)
        self.on_changed()

    def set_workers(self, name: str, spec: AdapterWorkersSpec | None) -> None:
        """Take over on how many workers an operator wants an adapter; None: as the settings say."""
        if self._worker_specs.get(name) == spec:
            return
        self.changes += 1
        if spec is None:
            self._worker_specs.pop(name, None)
        else:
            self._worker_specs[name] = spec
        self.on_changed()

    async def run(self, store: Store) -> None:
        """Follow the operators' word until cancelled."""
        await asyncio.gather(
            self._follow(store, ADAPTERS, AdapterSpec, self._specs, self.set),
            self._follow(store, ADAPTER_WORKERS, AdapterWorkersSpec, self._worker_specs, self.set_workers),
        )

    async def _follow(
        self,
        store: Store,
        prefix: str,
        kind: type[R],
        specs: Mapping[str, R],
        take: Callable[[str, R | None], None],
    ) -> None:
        async def put(key: str, raw: bytes) -> None:
            spec = decode(kind, raw)
            if spec is not None:
                take(key.removeprefix(prefix), spec)

        async def deleted(key: str) -> None:
            take(key.removeprefix(prefix), None)

        await follow(
            store,
            prefix,
            known=lambda: [prefix + name for name in specs],
            put=put,
            deleted=deleted,
            frozen=_keep_last_adapters,
        )


def _keep_last_adapters(error: StoreUnavailable | None) -> None:
    """A store that can't be read changes nothing: the last word still counts."""
