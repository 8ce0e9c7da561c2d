"""Live driver: runs machines in real time on asyncio, with the same contract as `Simulation`."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from penstock.kernel.machine import Effect, Event, Machine, Nanos, Send, Wake, Woken

log = logging.getLogger("penstock.live")

E = TypeVar("E", bound=Effect)
Carrier = Callable[[Nanos, str, E], object]
"""Carries out one effect: ``(now, sender, effect)``. It must not block; slow work is a task that posts its result."""


class LiveDriver:
    """Run machines on the event loop's time.

    `post` handles an event and carries out its effects, in order, before it returns; what a carrier posts meanwhile
    is queued behind and handled before the outermost `post` returns, never re-entrantly. A ``now`` that would go
    backwards is clamped and counted.

    Args:
        machines: name -> machine.
        clock: nanoseconds, any origin; the run starts at its first reading, or at ``start`` of the same clock.
        watch: called with ``(now, machine, event, effects)`` after each event, before its effects are carried out.
    """

    def __init__(
        self,
        machines: Mapping[str, Machine],
        clock: Callable[[], int] = time.monotonic_ns,
        watch: Callable[[Nanos, str, Event, Sequence[Effect]], None] | None = None,
        start: int | None = None,
    ) -> None:
        self.machines = dict(machines)
        self.events_handled = 0
        self.clamped = 0
        self.faults = 0
        self._watch = watch
        self._clock = clock
        self._start = clock() if start is None else start
        self._last: Nanos = 0
        self._carriers: dict[type[Effect], Carrier[Effect]] = {}
        self._queue: deque[tuple[str, Event]] = deque()
        self._running = False
        self._wakes: dict[str, asyncio.TimerHandle] = {}
        self._closed = False

    def now(self) -> Nanos:
        """Return nanoseconds since the start of the run; never less than it returned before."""
        value = self._clock() - self._start
        if value < self._last:
            self.clamped += 1
            return self._last
        self._last = value
        return value

    def on(self, effect: type[E], carrier: Carrier[E]) -> None:
        """Set the carrier of an effect type; one carrier per type."""
        self._carriers[effect] = carrier  # type: ignore[assignment]

    def post(self, machine: str, event: Event) -> None:
        """Give a machine an event now.

        Raises:
            Exception: what the machine or a carrier raised, after the queue has been drained; it is logged and
                counted in ``faults`` as well, since the poster may ignore it.
        """
        self._queue.append((machine, event))
        if self._running or self._closed:
            return
        self._running = True
        first: Exception | None = None
        try:
            while self._queue:
                name, item = self._queue.popleft()
                try:
                    now = self.now()
                    self.events_handled += 1
                    effects = self.machines[name].handle(now, item)
                    if self._watch is not None:
                        self._watch(now, name, item, effects)
                    for effect in effects:
                        carrier = self._carriers.get(type(effect))
                        if carrier is not None:
                            carrier(now, name, effect)
                        elif isinstance(effect, Wake):
                            self._wake(name, effect.at)
                        elif isinstance(effect, Send):
                            self._queue.append((effect.machine, effect.message))
                        else:
                            raise KeyError(type(effect))
                except Exception as error:
                    self.faults += 1
                    log.exception("machine %s failed on %s", name, type(item).__name__)
                    first = first or error
        finally:
            self._running = False
        if first is not None:
            raise first

    def close(self) -> None:
        """Cancel all pending wakes and take no further events."""
        self._closed = True
        for handle in self._wakes.values():
            handle.cancel()
        self._wakes.clear()

    def _wake(self, name: str, at: Nanos) -> None:
        pending = self._wakes.pop(name, None)
        if pending is not None:
            pending.cancel()
        delay = max(0, at - self.now()) / 1e9
        self._wakes[name] = asyncio.get_running_loop().call_later(delay, self._woken, name)

    def _woken(self, name: str) -> None:
        self._wakes.pop(name, None)
        try:
            self.post(name, Woken())
        except Exception:  # noqa: BLE001 - logged and counted by post; a timer has no caller to raise to
            return
