"""How do machines run on virtual time? The reference driver: a heap of (time, sequence)."""

import heapq
from collections.abc import Callable, Iterable, Mapping

from penstock.kernel.machine import Effect, Event, Machine, Nanos, Send, Wake, Woken

Answer = tuple[Nanos, str, Event]
"""(when, machine, event): what the world makes of an effect."""

World = Callable[[Nanos, str, Effect], Iterable[Answer]]
"""Carries out the effects that are not the kernel's own: ``(now, sender, effect) -> answers``."""


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
        watch: Callable[[Nanos, str, Event, list[Effect]], None] | None = None,
    ) -> None:
        self.machines = dict(machines)
        self.now: Nanos = 0
        self.events_handled = 0
        self.clamped = 0
        self._world = world
        self._checked = checked
        self._watch = watch
        self._heap: list[tuple[Nanos, int, str, Event, int]] = []
        self._sequence = 0
        self._wake_serial: dict[str, int] = {}

    def post(self, at: Nanos, machine: str, event: Event) -> None:
        """Let ``event`` reach ``machine`` at ``at``; a time in the past is clamped to now and counted."""
        self._push(at, machine, event, 0)

    def run(self, until: Nanos | None = None, limit: int | None = None) -> None:
        """Handle events in order until the heap is empty, ``until`` is passed or ``limit`` events are done."""
        handled = 0
        while self._heap and (limit is None or handled < limit):
            at = self._heap[0][0]
            if until is not None and at > until:
                break
            _, _, name, event, serial = heapq.heappop(self._heap)
            if serial and self._wake_serial.get(name) != serial:
                continue  # a newer Wake replaced this one
            machine = self.machines.get(name)
            if machine is None:
                continue  # the machine was taken out (a killed worker): its mail is lost, as on a network
            self.now = at
            effects = list(machine.handle(at, event))
            handled += 1
            self.events_handled += 1
            if self._checked:
                machine.check()
            if self._watch is not None:
                self._watch(at, name, event, effects)
            for effect in effects:
                self._carry_out(name, effect)
        if until is not None and (limit is None or handled < limit):
            self.now = max(self.now, until)

    def remove(self, name: str) -> None:
        """Take a machine out, as a crash does: what was on its way to it is dropped."""
        self.machines.pop(name, None)
        self._wake_serial.pop(name, None)

    def _carry_out(self, name: str, effect: Effect) -> None:
        if isinstance(effect, Wake):
            self._sequence += 1
            self._wake_serial[name] = self._sequence
            self._push(effect.at, name, Woken(), self._sequence)
        elif isinstance(effect, Send):
            self._push(self.now, effect.machine, effect.message, 0)
        else:
            for at, machine, event in self._world(self.now, name, effect):
                self._push(at, machine, event, 0)

    def _push(self, at: Nanos, machine: str, event: Event, serial: int) -> None:
        if at < self.now:
            at = self.now
            self.clamped += 1
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, machine, event, serial))
