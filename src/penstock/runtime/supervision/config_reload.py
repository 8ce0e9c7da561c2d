"""Config reload at SIGHUP: reads the config again, applies changed live knobs, and names those that can't change."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.config.live_knobs import differences, live_knobs, refusal_of, unheard
from penstock.config.reading.load import Loaded
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock.runtime.cluster_state.current_settings import CurrentSettings, desire_settings
from penstock.runtime.records.change_log import FILE, change_of
from penstock.runtime.records.run_folder import RunFolder

log = logging.getLogger("penstock.supervisor")

BY = "SIGHUP"


class ConfigReload:
    """Waits for `ask`, and reads the config again.

    Args:
        loaded: the settings as they were read at the start.
        reload: reads them again, as at the start; None where there is no file to read.
        say: prints a line on the operator's terminal.
    """

    def __init__(
        self,
        store: Store,
        tuning: CurrentSettings,
        loaded: ClusterSettings,
        reload: Callable[[], Loaded] | None,
        run: Path,
        say: Callable[[str], None],
    ) -> None:
        self._store = store
        self._tuning = tuning
        self._loaded = loaded
        self._reload = reload
        self._lines = RunFolder(run).writer(FILE)
        self._say = say
        self._requested = asyncio.Event()

    def ask(self) -> None:
        """Request a reload."""
        self._requested.set()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            try:
                for line in await self._reread():
                    self._say(f"SIGHUP: {line}")
            except (ConfigError, StoreUnavailable) as error:
                self._say(f"SIGHUP: nothing was changed: {error}")
            except Exception:  # supervision boundary: the next SIGHUP must still work
                log.exception("the config could not be read again by a bug of ours")

    async def _reread(self) -> list[str]:
        if self._reload is None:
            return ["there is no config file to read again; 'penstock set KEY=VALUE' changes settings."]
        new = (await asyncio.to_thread(self._reload)).settings
        live = live_knobs(self._tuning.settings)
        changes = [change for change in differences(self._tuning.settings, new) if change.key in live]
        lines = [refusal_of(change.key) for change in differences(self._loaded, new) if change.key not in live]
        silent = unheard(new.router, self._tuning.started.router)
        if silent:
            lines += [str(problem) for problem in silent]
            changes = [change for change in changes if not change.key.startswith("router.cost.")]
        await desire_settings(self._store, changes, BY)
        for change in changes:
            self._lines.write(change_of(change.key, change.old, change.new, BY))
            lines.append(f"{change.key}: {change.old} -> {change.new}")
        await asyncio.to_thread(self._lines.flush)
        return lines or ["the config says what is in use already."]
