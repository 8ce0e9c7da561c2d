"""`Simulation`: the reference driver, which runs machines on virtual time from a heap of (time, sequence).

What is to happen at once waits in a queue beside the heap: half of all events are answers to the one before.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.kernel.machine import Effect, Event, Machine, Nanos, Send, Wake, Woken

Answer = tuple[Nanos, str, Event]
"""(when, machine, event): what the world makes of an effect."""

World = Callable[[Nanos, str, Effect], Iterable[Answer]]
"""Carries out the effects that are not the kernel's own: ``(now, sender, effect) -> answers``."""

_WOKEN = Woken()
_CALL = ""
"""In place of a machine's name: what is due is a call."""
_CALLS = 1 << 62
"""Calls stand behind all events of their moment."""


class Simulation:
    """Run machines on virtual time until nothing is left to happen.

    The contract is the live driver's: effects in order, never re-entrant; a `Send` arrives after the current
    `handle` at the same ``now``; one pending `Wake` per machine, the newest wins; time never goes backwards.
    """

    def __init__(
        self,
        machines: Mapping[str, Machine],
        world: World,
        *,
        checked: bool = False,
        watch: Callable[[Nanos, str, Event, Sequence[Effect]], object] | None = None,
    ) -> None:
        self.machines = dict(machines)
        self.now: Nanos = 0
        self.events_handled = 0
        self.clamped = 0
        self._world = world
        self._checked = checked
        self._watch = watch
        self._heap: list[tuple[Nanos, int, str, Any, int]] = []
        self._at_once: deque[tuple[int, str, Any, int]] = deque()
        """What was posted for the present moment, in order."""
        self._stopped = False
        self._sequence = 0
        self._wake_serial: dict[str, int] = {}

    def post(self, at: Nanos, machine: str, event: Event) -> None:
        """Let ``event`` reach ``machine`` at ``at``; a time in the past is clamped to now and counted."""
        self._push(at, machine, event, 0)

    def call(self, at: Nanos, act: Callable[[], object]) -> None:
        """Call something at ``at``, after every event of that moment; what was asked for first is called first."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(at, self.now), _CALLS + self._sequence, _CALL, act, 0))

    def stop(self) -> None:
        """End the `run` under way after the present event."""
        self._stopped = True

    def run(self, until: Nanos | None = None, limit: int | None = None) -> None:
        """Handle events in order until the heap is empty, ``until`` is passed, ``limit`` events are done, or `stop`."""
        handled = 0
        self._stopped = False
        heap, at_once, machines, wakes = self._heap, self._at_once, self.machines, self._wake_serial
        while (heap or at_once) and handled != limit and not self._stopped:
            # At the same moment, what stands in the heap may have been posted before.
            first = bool(at_once) and not (heap and heap[0][0] <= self.now and heap[0][1] < at_once[0][0])
            at = self.now if first else heap[0][0]
            if until is not None and at > until:
                break
            if first:
                _, name, event, serial = at_once.popleft()
            else:
                _, _, name, event, serial = heapq.heappop(heap)
            if serial and wakes.get(name) != serial:
                continue  # a newer Wake replaced this one
            machine = machines.get(name)
            if machine is None:
                if name is _CALL:
                    self.now = at
                    event()
                    handled += 1
                continue  # a machine that was taken out (a killed worker): its events are lost, as on a network
            self.now = at
            effects = machine.handle(at, event)
            handled += 1
            if self._checked:
                machine.check()
            if self._watch is not None:
                self._watch(at, name, event, effects)
            for effect in effects:
                kind = type(effect)
                if kind is Wake:
                    self._sequence = wakes[name] = sequence = self._sequence + 1
                    self._push(effect.at, name, _WOKEN, sequence)  # type: ignore[attr-defined]
                elif kind is Send:
                    self._push(at, effect.machine, effect.message, 0)  # type: ignore[attr-defined]
                else:
                    for when, receiver, answer in self._world(at, name, effect):
                        self._push(when, receiver, answer, 0)
        self.events_handled += handled
        if until is not None and (limit is None or handled < limit) and not self._stopped:
            self.now = max(self.now, until)

    def remove(self, name: str) -> None:
        """Take a machine out, as a crash does: what was on its way to it is dropped."""
        self.machines.pop(name, None)
        self._wake_serial.pop(name, None)

    def _push(self, at: Nanos, machine: str, event: Event, serial: int) -> None:
        self._sequence += 1
        if at > self.now:
            heapq.heappush(self._heap, (at, self._sequence, machine, event, serial))
            return
        if at < self.now:
            self.clamped += 1
        self._at_once.append((self._sequence, machine, event, serial))
