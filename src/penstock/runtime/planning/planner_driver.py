"""Planner driver: runs the planner machine under asyncio; carries out its observations, scalings and plugin calls.

It leaves its state for the next planner.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock import extension
from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.connectors.scale_connector import ScaleConnector
from penstock.config.settings.planning_settings import PlanningSettings
from penstock.kernel.errors import PenstockError
from penstock.kernel.machine import Event, Nanos, Woken, seconds
from penstock.planner.events import Alarm, AskPlugin, Observe, Observed, ObserveFailed, Scale, Scaled, Ticked
from penstock.planner.planner import Planner
from penstock.runtime.live_driver import LiveDriver
from penstock.runtime.planning.live_observer import LiveObserver
from penstock.runtime.planning.tick_log import TickLog

log = logging.getLogger("penstock.planner")

NAME = "planner"
STATE_SHARE = 50
"""The time between two writes of the planner's state, in multiples of a write's duration: a thousand workers are some
seconds of work, a few are written each tick. A successor with an older state reads again what came since."""


class PlannerState(msgspec.Struct, frozen=True, kw_only=True):
    """``restarts``: how often one took over; ``machine``: the planner's snapshot; ``observing``: the observer's."""

    version: int = 1
    restarts: int
    machine: msgspec.Raw
    observing: bytes


class _OutsidePlugins(Protocol):
    """Plugins in other processes: `penstock_extras.plugins.plugin_host.PluginHost`."""

    def ask(self, question: AskPlugin) -> None: ...
    async def close(self) -> None: ...


class PlannerDriver:
    """One planner, driven live: `start`, then `close`.

    Args:
        start: `time.monotonic_ns` of the start of the run, so that its seconds are those of all processes of the run.
        state: file from which a planner that takes over continues; None keeps none.
        renewed: it takes over because of other settings, not because the one before failed.
    """

    def __init__(
        self,
        settings: PlanningSettings,
        planner: Planner,
        observing: LiveObserver,
        connector: ScaleConnector,
        keeping: TickLog,
        *,
        start: int | None = None,
        state: Path | None = None,
        renewed: bool = False,
    ) -> None:
        self.planner = planner
        self.observing = observing
        self.tick_log = keeping
        self.restarts = 0
        journal = keeping.journal
        self.live = LiveDriver({NAME: planner}, start=start, watch=None if journal is None else journal.watch)
        self._settings = settings
        self._connector = connector
        self._state = state
        self._renewed = renewed
        self._state_due = 0.0
        self._host: _OutsidePlugins | None = None
        self._tasks = BackgroundTasks()
        self._save_lock = asyncio.Lock()
        self.live.on(Observe, self._begin_observation)
        self.live.on(Scale, self._scale)
        self.live.on(AskPlugin, self._ask)
        self.live.on(Ticked, self._ticked)
        self.live.on(Alarm, self._alarm)

    async def start(self) -> None:
        """Read the state of the planner before, and begin.

        Raises:
            ConfigError: the address for plugin registrations can't be bound.
        """
        await self._take_over()
        if self.tick_log.journal is not None:
            self.tick_log.journal.begin(self.live.now())
        plugins = self._settings.plugins
        if plugins.outside:
            self._host = host = extension.entry("listener", "planner plugins", "planner.plugins")(
                plugins,
                self.post,
                tick=self._settings.base,
                refuses=self.planner.refuses,
                seats=lambda: self.planner.registry.seats,
                refused=self.tick_log.metrics.refused,
            )
            await host.start()
        self.post(Woken())

    def post(self, event: Event) -> None:
        """Post an event to the planner."""
        self.live.post(NAME, event)

    async def close(self) -> None:
        """End the planner; the desired state stays as it is."""
        self.live.close()
        await self._tasks.close()
        if self._host is not None:
            await self._host.close()
        await self.tick_log.close()
        await self.observing.close()

    # --- carriers -----------------------------------------------------------------------------------------------------

    def _begin_observation(self, now: Nanos, sender: str, effect: Observe) -> None:
        self._begin(self._looked(seconds(now), effect.id))

    async def _looked(self, at: float, id: int) -> None:
        try:
            observation = await self.observing.look(at)
        except PenstockError as error:
            self.post(ObserveFailed(id=id, why=str(error)))
        except (
            Exception
        ) as error:  # supervision boundary: a bug in the observer must not stop the planner, nor count as zero
            log.exception("the cluster could not be looked at by a bug of ours")
            self.post(ObserveFailed(id=id, why=f"{type(error).__name__}: {error}"))
        else:
            self.tick_log.saw(observation)
            self.post(Observed(id=id, observation=observation))

    def _scale(self, now: Nanos, sender: str, effect: Scale) -> None:
        self._begin(self._scaled(seconds(now), effect))

    async def _scaled(self, at: float, effect: Scale) -> None:
        targets = ", ".join(f"{pool}={count}" for pool, count in effect.targets.items())
        why = "; ".join(reason.text for reason in effect.reasons)
        log.info("%s %s", targets or "changes of role", f"because {why}" if why else "")
        try:
            problems = await self._connector.scale(effect.targets, effect.flips, effect.reasons)
        except Exception as error:  # supervision boundary: the next tick scales again
            log.exception("the desired state could not be written by a bug of ours")
            problems = {pool: f"{type(error).__name__}: {error}" for pool in effect.targets}
        self.observing.pool_observer.scaled(at, [pool for pool in effect.targets if pool not in problems])
        self.post(Scaled(id=effect.id, problems=problems))

    def _ask(self, now: Nanos, sender: str, effect: AskPlugin) -> None:
        if self._host is not None:
            self._host.ask(effect)

    def _ticked(self, now: Nanos, sender: str, effect: Ticked) -> None:
        at = seconds(now)
        self.tick_log.metrics.estimates.seats(self.planner.registry.seats, at, at - effect.record.at)
        self._begin(self._keep(effect))

    async def _keep(self, effect: Ticked) -> None:
        async with self._save_lock:
            await self.tick_log.ticked(effect.record, self.restarts)
            if self._state is not None and time.monotonic() >= self._state_due:
                begun = time.monotonic()
                state = self._left()
                took = time.monotonic() - begun
                await asyncio.to_thread(write_state, self._state, state)
                self._state_due = time.monotonic() + STATE_SHARE * took

    def _left(self) -> PlannerState:
        """Return a successor's state: the planner's snapshot and the observer's, of the same moment."""
        return PlannerState(
            restarts=self.restarts,
            machine=msgspec.Raw(msgspec.msgpack.encode(self.planner.snapshot())),
            observing=self.observing.snapshot(),
        )

    def _alarm(self, now: Nanos, sender: str, effect: Alarm) -> None:
        log.warning("%s", effect.reason.text, extra={"fields": {"code": effect.reason.code, **effect.reason.facts}})
        self.tick_log.alarm(seconds(now), effect.reason)

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
        except Exception:  # supervision boundary: an unreadable state costs its content, not the planner
            log.exception("what the planner before left can't be taken up, so this one begins anew")
            self.planner.restore(fresh)
            return
        self.restarts = state.restarts + (not self._renewed)
        log.info("going on where the planner before ended, at tick %s", self.planner.snapshot()["number"])

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.spawn(self._guarded(work))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # supervision boundary: one tick's bug must not end the later ticks
            log.exception("a tick of the planner failed by a bug of ours")


def write_state(path: Path, state: PlannerState) -> None:
    """Write the file, whole or not at all. Blocks; a full disk costs only how much a successor knows."""
    spare = path.with_suffix(".new")
    try:
        spare.write_bytes(msgspec.msgpack.encode(state))
        spare.replace(path)
    except OSError as error:
        log.warning("what a planner that takes over would need can't be written: %s", error)


def read_state(path: Path) -> PlannerState | None:
    """Read the file; None where it is missing or unreadable. Blocks."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=PlannerState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("what the planner before left can't be read: %s", error)
        return None
