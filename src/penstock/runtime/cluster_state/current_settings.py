"""Current settings of a process: those of its start, with the knobs that operators changed since, from the store.

Each changed knob has its own key there, so that operators who change different knobs at once do not undo each other.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from penstock.adapters.seams import Store
from penstock.config.live_knobs import SettingChange, differences, with_values
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.runtime.cluster_state.desired_state import SETTINGS, SettingSpec, decode, put
from penstock.runtime.cluster_state.store_watch import follow

log = logging.getLogger("penstock.tuning")

Apply = Callable[[ClusterSettings, Sequence[SettingChange], str], None]
"""Called with the new settings, the changes, and the name of the writer."""


class CurrentSettings:
    """Follows the changed knobs.

    Args:
        started: the settings of the start.
        apply: makes new settings take effect.
    """

    def __init__(self, store: Store, started: ClusterSettings, apply: Apply) -> None:
        self.started = started
        self.settings = started
        self.changes: dict[str, SettingSpec] = {}
        self.read = asyncio.Event()
        """Set once the changes from before this process's start are applied here."""
        self._store = store
        self._apply = apply

    async def run(self) -> None:
        """Follow until cancelled."""
        await follow(
            self._store,
            SETTINGS,
            known=lambda: [SETTINGS + key for key in self.changes],
            put=self._put,
            deleted=self._deleted,
            frozen=lambda error: None,
            read=self._settle,
        )

    async def _put(self, key: str, raw: bytes) -> None:
        spec = decode(SettingSpec, raw)
        if spec is not None:
            self.changes[key.removeprefix(SETTINGS)] = spec

    async def _deleted(self, key: str) -> None:
        self.changes.pop(key.removeprefix(SETTINGS), None)

    def _settle(self) -> None:
        """Apply all changes that were read at once at once."""
        new = self.started
        for key, spec in self.changes.items():
            try:
                new = with_values(new, {key: spec.value})
            except msgspec.ValidationError as error:
                log.warning("what stands in the store for %s is not taken: %s", key, error)
        changes = differences(self.settings, new)
        if changes:
            self.settings = new
            by = ", ".join(sorted({self.changes[c.key].by for c in changes if c.key in self.changes})) or "nobody"
            log.info("settings changed by %s: %s", by, ", ".join(f"{c.key}={c.new}" for c in changes))
            self._apply(new, changes, by)
        self.read.set()


async def desire_settings(store: Store, changes: Sequence[SettingChange], by: str) -> None:
    """Write changed knobs for every process of the cluster."""
    for change in changes:
        await put(store, SETTINGS + change.key, SettingSpec(value=change.new, by=by))
