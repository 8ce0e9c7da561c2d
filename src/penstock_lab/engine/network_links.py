"""Network links between engines: a machine that shares their bandwidth among KV transfers, max-min fairly.

Every engine has a link out and a link in. What runs at one time shares them max-min fairly: all rates grow together
until a link is full, those that use it stay there, the others grow on. So no transfer gets less than an equal share of
both its links, and nothing is left unused that one could have. It is lazy: rates are worked out when a transfer
begins to move or ends, and only for those that share a link with it, directly or through others.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import SECOND, Effect, Event, Nanos, Snapshot, Wake, Woken, check_version, nanos

VERSION = 1
Link = tuple[str, str]
"""("out" or "in", engine)"""


class StartTransfer(Event, frozen=True, kw_only=True):
    """``size`` bytes go from ``source`` to ``target``; ``id`` is that of no other that is on its way."""

    id: str
    source: str
    target: str
    size: int


class CancelTransfer(Event, frozen=True, kw_only=True):
    """This transfer is not needed any more; unknown ids are ignored."""

    id: str


class Transferred(Effect, frozen=True, kw_only=True):
    """The last byte is there."""

    id: str
    at: Nanos


@dataclass(slots=True, eq=False)
class _Flow:
    """One transfer. ``left`` bytes at ``since``, from then on ``rate`` bytes/s; ``due``: when it begins, or ends."""

    id: str
    serial: int
    source: str
    target: str
    left: float
    due: Nanos
    since: Nanos = 0
    rate: float = 0.0
    moves: bool = False
    links: tuple[Link, Link] = field(init=False)

    def __post_init__(self) -> None:
        self.links = ("out", self.source), ("in", self.target)


class NetworkLinks:
    """All links between engines.

    Args:
        bandwidth: of each link, in bytes/s, unless `set` says otherwise.
        latency: seconds before a transfer's first byte; until then it takes nothing from others.
    Cost: of a start or an end, O(n log n) for the n transfers that share links; else nothing.
    """

    def __init__(self, bandwidth: float, latency: float = 0.0) -> None:
        self._bandwidth = bandwidth
        self._latency = nanos(latency)
        self._own: dict[str, float] = {}
        self._flows: dict[str, _Flow] = {}
        self._users: dict[Link, dict[str, _Flow]] = {}
        self._heap: list[tuple[Nanos, int, str]] = []
        self._serial = 0
        self._now: Nanos = 0
        self._wake: Nanos | None = None

    def __len__(self) -> int:
        """Count the transfers that are on their way."""
        return len(self._flows)

    def set(self, name: str, bandwidth: float) -> None:
        """Give one engine's links, out and in, another rate in bytes/s.

        Raises:
            InvariantError: something is on its way there, at a rate that would no longer be right.
        """
        if ("out", name) in self._users or ("in", name) in self._users:
            raise InvariantError(f"the links of {name} are in use and can't get another bandwidth")
        self._own[name] = bandwidth

    def bandwidth(self, name: str) -> float:
        """Return the rate of an engine's links in bytes/s."""
        return self._own.get(name, self._bandwidth)

    def rates(self) -> Mapping[str, float]:
        """Return the bytes/s at which each transfer moves, as of the last event; 0 for those that have not begun."""
        return {flow.id: flow.rate for flow in self._flows.values()}

    def handle(self, now: Nanos, event: Event) -> Sequence[Effect]:
        """Take one event: `StartTransfer`, `CancelTransfer` or `Woken`; others are ignored.

        Raises:
            InvariantError: a transfer with this id is on its way.
        """
        now = self._now = max(now, self._now)
        if isinstance(event, Woken):
            self._wake = None
        out: list[Effect] = self._advance(now)
        if isinstance(event, StartTransfer):
            if event.id in self._flows:
                raise InvariantError(f"transfer {event.id} is on its way already")
            self._serial += 1
            due = now + self._latency
            self._flows[event.id] = flow = _Flow(event.id, self._serial, event.source, event.target, event.size, due)
            heapq.heappush(self._heap, (due, flow.serial, flow.id))
            out += self._advance(now)
        elif isinstance(event, CancelTransfer):
            cancelled = self._flows.pop(event.id, None)
            if cancelled is not None and cancelled.moves:
                self._stop(cancelled, now)
        wake = self._next()
        if wake is None and self._wake is not None:
            wake = now  # so that a time that means nothing any more does not keep a simulation going
        if wake is not None and wake != self._wake:
            self._wake = wake
            out.append(Wake(at=wake))
        return out

    def snapshot(self) -> Snapshot:
        """Return the whole state as plain data."""
        return {
            "version": VERSION,
            "now": self._now,
            "wake": self._wake,
            "serial": self._serial,
            "own": dict(self._own),
            "flows": [
                [f.id, f.serial, f.source, f.target, f.left, f.due, f.since, f.rate, f.moves]
                for f in self._flows.values()
            ],
        }

    def restore(self, snapshot: Snapshot) -> None:
        """Become the links that wrote the snapshot; they must have had the same bandwidth and latency.

        Raises:
            ValueError: it is of another version.
        """
        check_version(snapshot, VERSION, "network links")
        self._now, self._wake, self._serial = snapshot["now"], snapshot["wake"], snapshot["serial"]
        self._own = dict(snapshot["own"])
        self._flows, self._users, self._heap = {}, {}, []
        for state in snapshot["flows"]:
            flow = self._flows[state[0]] = _Flow(*state)
            heapq.heappush(self._heap, (flow.due, flow.serial, flow.id))
            if flow.moves:
                self._join(flow)

    def check(self) -> None:
        """Raise `InvariantError` where a link carries too much, or a transfer could be faster. Cost: walks it all."""
        full: dict[Link, bool] = {}
        for link, users in self._users.items():
            carried, most = sum(flow.rate for flow in users.values()), self.bandwidth(link[1])
            if carried > most * (1 + 1e-9):
                raise InvariantError(f"link {link} carries {carried} bytes/s of {most}")
            full[link] = carried >= most * (1 - 1e-9)
        for flow in self._flows.values():
            if any((flow.id in self._users.get(link, ())) != flow.moves for link in flow.links):
                raise InvariantError(
                    f"transfer {flow.id} is listed on links that it does not use, or not on those it does"
                )
            if flow.moves and not any(
                full[link] and flow.rate >= max(other.rate for other in self._users[link].values()) * (1 - 1e-9)
                for link in flow.links
            ):
                raise InvariantError(f"transfer {flow.id} could go faster than {flow.rate} bytes/s")
        if sum(map(len, self._users.values())) != 2 * sum(flow.moves for flow in self._flows.values()):
            raise InvariantError("a link is used by a transfer that is over")
        if self._flows and self._wake is None:
            raise InvariantError("something is on its way, but no wake was asked for")

    def _advance(self, now: Nanos) -> list[Effect]:
        """Let what is due by ``now`` begin or end, in order."""
        out: list[Effect] = []
        while (due := self._next()) is not None and due <= now:
            flow = self._flows[heapq.heappop(self._heap)[2]]
            if flow.moves or not flow.left:
                del self._flows[flow.id]
                out.append(Transferred(id=flow.id, at=due))
                if flow.moves:
                    self._stop(flow, due)
            else:
                flow.moves, flow.since = True, due
                self._join(flow)
                self._share(flow.links, due)
        return out

    def _next(self) -> Nanos | None:
        """Return when the next transfer begins to move or ends."""
        heap, flows = self._heap, self._flows
        while heap:
            due, serial, id = heap[0]
            flow = flows.get(id)
            if flow is not None and flow.serial == serial and flow.due == due:
                return due
            heapq.heappop(heap)
        return None

    def _join(self, flow: _Flow) -> None:
        for link in flow.links:
            self._users.setdefault(link, {})[flow.id] = flow

    def _stop(self, flow: _Flow, at: Nanos) -> None:
        for link in flow.links:
            users = self._users[link]
            del users[flow.id]
            if not users:
                del self._users[link]
        self._share(flow.links, at)

    def _share(self, changed: Iterable[Link], at: Nanos) -> None:
        """Work out the rates of all that share a link with one that changed, directly or through others."""
        users = self._users
        reached = dict.fromkeys(link for link in changed if link in users)
        fresh = list(reached)
        while fresh:
            fresh = [link for near in fresh for flow in users[near].values() for link in flow.links]
            fresh = [link for link in dict.fromkeys(fresh) if link not in reached]
            reached.update(dict.fromkeys(fresh))
        free = {link: self.bandwidth(link[1]) for link in reached}
        waiting = {link: len(users[link]) for link in reached}
        rates: dict[_Flow, float] = {}
        rate = 0.0
        while waiting:
            share, tightest = min((free[link] / count, link) for link, count in waiting.items())
            # Rates only grow from one full link to the next; without the maximum, rounding might say otherwise.
            rate = max(rate, share)
            for flow in users[tightest].values():
                if flow in rates:
                    continue
                rates[flow] = rate
                for link in flow.links:
                    free[link] -= rate
                    waiting[link] -= 1
                    if not waiting[link]:
                        del waiting[link]
        for flow, rate in rates.items():
            if rate == flow.rate:
                continue
            flow.left = max(0.0, flow.left - flow.rate * (at - flow.since) / SECOND)
            flow.since, flow.rate = at, rate
            flow.due = at + round(flow.left / rate * SECOND)
            heapq.heappush(self._heap, (flow.due, flow.serial, flow.id))
