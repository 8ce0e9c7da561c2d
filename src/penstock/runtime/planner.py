"""How does a planner run live? The machine under the asyncio driver; looks, scalings and plugins are its carriers."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapters.connectors.scaling_seam import ScaleConnector
from penstock.adapters.plugins.host import PluginHost, wants_outside
from penstock.config.planner import PlanningSettings
from penstock.kernel.errors import PenstockError
from penstock.kernel.machine import Event, Nanos, Woken, seconds
from penstock.planner.events import Alarm, Ask, Look, Looked, LookFailed, Scale, Scaled, Ticked
from penstock.planner.planner import Planner
from penstock.runtime.live import Live
from penstock.runtime.planning.keeping import Keeping
from penstock.runtime.planning.observing import Observing
from penstock.runtime.planning.state import PlannerState, read_state, write_state

log = logging.getLogger("penstock.planner")

NAME = "planner"
STATE_SHARE = 50
"""How many times as long as it takes to write the memory down passes until the next time: a thousand workers are some
seconds of work, a few are done each tick. A successor that goes on from an older one reads again what came since."""


class PlannerDriver:
    """One planner, driven live: `start`, then `close`.

    Args:
        start: `time.monotonic_ns` of the start of the run, so that its seconds are those of all processes of the run.
        state: file from which a planner that takes over goes on; None keeps none.
        renewed: it takes over because of other settings, not because the one before failed.
    """

    def __init__(
        self,
        settings: PlanningSettings,
        planner: Planner,
        observing: Observing,
        connector: ScaleConnector,
        keeping: Keeping,
        *,
        start: int | None = None,
        state: Path | None = None,
        renewed: bool = False,
    ) -> None:
        self.planner = planner
        self.observing = observing
        self.keeping = keeping
        self.restarts = 0
        self.live = Live({NAME: planner}, start=start)
        self._settings = settings
        self._connector = connector
        self._state = state
        self._renewed = renewed
        self._state_due = 0.0
        self._host: PluginHost | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept = asyncio.Lock()
        self.live.on(Look, self._look)
        self.live.on(Scale, self._scale)
        self.live.on(Ask, self._ask)
        self.live.on(Ticked, self._ticked)
        self.live.on(Alarm, self._alarm)

    async def start(self) -> None:
        """Take up what the planner before left behind, and begin.

        Raises:
            ConfigError: nobody can listen where plugins should register.
        """
        await self._take_over()
        plugins = self._settings.plugins
        if wants_outside(plugins):
            self._host = PluginHost(
                plugins,
                self.post,
                tick=self._settings.base,
                refuses=self.planner.refuses,
                seats=lambda: self.planner.registry.seats,
                refused=self.keeping.metrics.refused,
            )
            await self._host.start()
        self.post(Woken())

    def post(self, event: Event) -> None:
        """Give the planner an event."""
        self.live.post(NAME, event)

    async def close(self) -> None:
        """End; what is wanted stays as it is."""
        self.live.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._host is not None:
            await self._host.close()
        await self.keeping.close()
        await self.observing.close()

    # --- carriers -----------------------------------------------------------------------------------------------------

    def _look(self, now: Nanos, sender: str, effect: Look) -> None:
        self._begin(self._looked(seconds(now), effect.id))

    async def _looked(self, at: float, id: int) -> None:
        try:
            seen = await self.observing.look(at)
        except PenstockError as error:
            self.post(LookFailed(id=id, why=str(error)))
        except (
            Exception
        ) as error:  # supervision boundary: a bug in looking must not stop the planner, nor look like zero
            log.exception("the cluster could not be looked at by a bug of ours")
            self.post(LookFailed(id=id, why=f"{type(error).__name__}: {error}"))
        else:
            self.keeping.saw(seen)
            self.post(Looked(id=id, observation=seen))

    def _scale(self, now: Nanos, sender: str, effect: Scale) -> None:
        self._begin(self._scaled(seconds(now), effect))

    async def _scaled(self, at: float, effect: Scale) -> None:
        told = ", ".join(f"{pool}={count}" for pool, count in effect.targets.items())
        why = "; ".join(because.text for because in effect.because)
        log.info("%s %s", told or "changes of role", f"because {why}" if why else "")
        try:
            problems = await self._connector.scale(effect.targets, effect.flips, effect.because)
        except Exception as error:  # supervision boundary: the next tick says it again
            log.exception("what should be could not be said by a bug of ours")
            problems = {pool: f"{type(error).__name__}: {error}" for pool in effect.targets}
        self.observing.pools.said(at, [pool for pool in effect.targets if pool not in problems])
        self.post(Scaled(id=effect.id, problems=problems))

    def _ask(self, now: Nanos, sender: str, effect: Ask) -> None:
        if self._host is not None:
            self._host.ask(effect)

    def _ticked(self, now: Nanos, sender: str, effect: Ticked) -> None:
        at = seconds(now)
        self.keeping.metrics.estimates.seats(self.planner.registry.seats, at, at - effect.record.at)
        self._begin(self._keep(effect))

    async def _keep(self, effect: Ticked) -> None:
        async with self._kept:
            await self.keeping.ticked(effect.record, self.restarts)
            if self._state is not None and time.monotonic() >= self._state_due:
                begun = time.monotonic()
                state = self._left()
                took = time.monotonic() - begun
                await asyncio.to_thread(write_state, self._state, state)
                self._state_due = time.monotonic() + STATE_SHARE * took

    def _left(self) -> PlannerState:
        """Return what a successor needs: the memory, and up to where that has counted, of the same moment."""
        return PlannerState(
            restarts=self.restarts,
            machine=msgspec.Raw(msgspec.msgpack.encode(self.planner.snapshot())),
            observing=self.observing.snapshot(),
        )

    def _alarm(self, now: Nanos, sender: str, effect: Alarm) -> None:
        log.warning("%s", effect.because.text, extra={"fields": {"code": effect.because.code, **effect.because.facts}})
        self.keeping.alarm(seconds(now), effect.because)

    # --- parts --------------------------------------------------------------------------------------------------------

    async def _take_over(self) -> None:
        if self._state is None:
            return
        state = await asyncio.to_thread(read_state, self._state)
        if state is None:
            return
        fresh = self.planner.snapshot()
        try:
            self.planner.restore(msgspec.msgpack.decode(state.machine, strict=False))
            self.observing.restore(state.observing)
        except Exception:  # supervision boundary: a state of another kind costs what it held, not the planner
            log.exception("what the planner before left can't be taken up, so this one begins anew")
            self.planner.restore(fresh)
            return
        self.restarts = state.restarts + (not self._renewed)
        log.info("going on where the planner before ended, at tick %s", self.planner.snapshot()["number"])

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # supervision boundary: one tick's bug must not end the ticks to come
            log.exception("a tick of the planner failed by a bug of ours")
