"""Which settings are in use now? Those of the start, with the knobs that were changed since: followed in the store.

Each changed knob stands there under its own key, so that two who change different knobs at once do not undo each other.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from penstock.adapters.seams import Store
from penstock.config.cluster import ClusterSettings
from penstock.config.live import Change, differences, with_values
from penstock.runtime.follow import follow
from penstock.runtime.wishes import SETTINGS, SettingWish, decode, put

log = logging.getLogger("penstock.tuning")

Apply = Callable[[ClusterSettings, Sequence[Change], str], None]
"""Told the settings as they are from now on, what changed, and by whom."""


class Tuning:
    """Follows the knobs that were changed.

    Args:
        started: the settings of the start.
        apply: makes other settings count.
    """

    def __init__(self, store: Store, started: ClusterSettings, apply: Apply) -> None:
        self.started = started
        self.settings = started
        self.wishes: dict[str, SettingWish] = {}
        self.read = asyncio.Event()
        """Set once what was changed before this process started counts here."""
        self._store = store
        self._apply = apply

    async def run(self) -> None:
        """Follow until cancelled."""
        await follow(
            self._store,
            SETTINGS,
            known=lambda: [SETTINGS + key for key in self.wishes],
            put=self._came,
            gone=self._gone,
            frozen=lambda error: None,
            read=self._settle,
        )

    async def _came(self, key: str, raw: bytes) -> None:
        wish = decode(SettingWish, raw)
        if wish is not None:
            self.wishes[key.removeprefix(SETTINGS)] = wish

    async def _gone(self, key: str) -> None:
        self.wishes.pop(key.removeprefix(SETTINGS), None)

    def _settle(self) -> None:
        """Make all that was read at once count at once."""
        new = self.started
        for key, wish in self.wishes.items():
            try:
                new = with_values(new, {key: wish.value})
            except msgspec.ValidationError as error:
                log.warning("what stands in the store for %s is not taken: %s", key, error)
        found = differences(self.settings, new)
        if found:
            self.settings = new
            by = ", ".join(sorted({self.wishes[c.key].by for c in found if c.key in self.wishes})) or "nobody"
            log.info("settings changed by %s: %s", by, ", ".join(f"{c.key}={c.new}" for c in found))
            self._apply(new, found, by)
        self.read.set()


async def wish_settings(store: Store, changes: Sequence[Change], by: str) -> None:
    """Let every process of the cluster take changed knobs."""
    for change in changes:
        await put(store, SETTINGS + change.key, SettingWish(value=change.new, by=by))
