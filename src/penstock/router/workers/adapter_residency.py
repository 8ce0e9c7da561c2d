"""Adapter residency: which worker of a model holds which LoRA adapters, by decisions, answers and lists of models.

An engine does not say what it holds: vLLM's ``lora_requests_info`` names adapters with requests only. So this table is
kept from what this router and the others decided, from the answers to loads, and from ``/v1/models`` at the join of a
worker. Where it is wrong, the engine answers 404, and the adapter is loaded once more (`missing`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.kernel.bounded_table import BoundedTable
from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import SECOND, Nanos, state_of, take_state
from penstock.kernel.values import RequestId, WorkerId

LOAD_SECONDS = 1.0
"""What a load is taken to last until one was measured."""
LEARNT = 0.2
"""Weight of the newest load in the mean."""
EVICTION = 0.5
"""What unloading another adapter costs, in loads: half of those that were used last are asked for again."""
LOADS_MAX = 8
"""Loads that one worker may have before it; engines load one at a time, and a request behind more would only wait."""
RETRY_AFTER = 10.0
"""Seconds for which a worker that could not load an adapter is not asked for it again."""
FAILURES_MAX = 1024
"""Failed loads that are remembered."""
USES_MIN = 64
"""Uses of an adapter above which those that have ended are dropped."""

Use = tuple[str, RequestId]
"""The router that placed a request, empty for this one, and the request."""


class HeldAdapter(msgspec.Struct):
    """One adapter on one worker."""

    loading: bool = False
    pinned: bool = False
    """Whoever loaded it did not say from where, so it is never unloaded here."""


class WorkerAdapters(msgspec.Struct):
    """The adapters of one worker. ``slots``: how many it holds; ``resident``: the least recently used first."""

    slots: int
    resident: dict[str, HeldAdapter] = {}
    uses: dict[str, dict[Use, None]] = {}
    """By adapter: requests that were placed here with it, those that have ended among them."""

    @property
    def loading(self) -> int:
        return sum(one.loading for one in self.resident.values())


class ResidencyState(msgspec.Struct):
    """State of `AdapterResidency`."""

    workers: dict[WorkerId, WorkerAdapters]
    load_seconds: float
    counts: dict[str, int]
    wanted: dict[str, int]
    _failures: list[tuple[tuple[WorkerId, str], tuple[Nanos, str]]]


class AdapterPlan(NamedTuple):
    """What has to be done on a worker before a request is sent.

    Args:
        load: a load begins.
        waits: the adapter is not there yet.
        unload: adapters that make room.
        text: all that in words, for ``explain``.
    """

    load: bool
    waits: bool
    unload: tuple[str, ...]
    text: str


class AdapterResidency:
    """The table of one model.

    Args:
        runs: tells whether a request, by the router that placed it and its id, has not ended.
    """

    def __init__(self, runs: Callable[[str, RequestId], bool]) -> None:
        self._runs = runs
        self.workers: dict[WorkerId, WorkerAdapters] = {}
        """Workers that load adapters while they run."""
        self.load_seconds = LOAD_SECONDS
        self.counts = dict.fromkeys(("hit", "wait", "load", "unload", "failed", "missing"), 0)
        """Requests that found their adapter, that found it on its way, that had it loaded; adapters that were unloaded
        for others; loads that failed; adapters that an engine did not hold although the table said so."""
        self.wanted: dict[str, int] = {}
        """On how many workers an operator wants an adapter at any time; there it is unloaded for no other."""
        self._failures: BoundedTable[tuple[WorkerId, str], tuple[Nanos, str]] = BoundedTable(FAILURES_MAX)
        """Loads that failed lately: (until when it is not tried again, why)."""

    # --- membership -------------------------------------------------------------------------------------------------

    def join(self, worker: WorkerId, slots: int | None, listed: Sequence[str]) -> None:
        """A worker came, with what it lists; until it is known where that lies, none of it is unloaded."""
        if slots:
            resident = {name: HeldAdapter(pinned=True) for name in listed}
            self.workers[worker] = WorkerAdapters(slots, resident)

    def leave(self, worker: WorkerId) -> None:
        """A worker went."""
        self.workers.pop(worker, None)
        self._failures.drop(lambda key, failure: key[0] == worker)

    def observed(self, worker: WorkerId, names: Sequence[str], pinned: Sequence[str]) -> None:
        """A worker listed what it holds; what is on its way there stays.

        Args:
            pinned: those of which nobody knows where they lie.
        """
        mine = self.workers.get(worker)
        if mine is None:
            return
        resident = {name: one for name, one in mine.resident.items() if one.loading or name in names}
        for name in names:
            resident.setdefault(name, HeldAdapter()).pinned = name in pinned
        mine.resident = resident

    # --- what a placement needs -------------------------------------------------------------------------------------

    def why_not(self, worker: WorkerId, adapter: str, now: Nanos) -> str | None:
        """Return why a worker that loads adapters can't serve one now; None where it can."""
        mine = self.workers[worker]
        if adapter in mine.resident:
            return None
        failure = self._failures.get((worker, adapter))
        if failure is not None and now < failure[0]:
            return f"could not load adapter {adapter}: {failure[1]}"
        if mine.loading >= LOADS_MAX:
            return f"has {LOADS_MAX} adapters to load before {adapter}"
        if not self._fits(mine):
            return f"has no room for adapter {adapter}: its {mine.slots} are in use"
        return None

    def any_room(self) -> bool:
        """Return whether any worker could load one more adapter."""
        return any(mine.loading < LOADS_MAX and self._fits(mine) for mine in self.workers.values())

    def failed_lately(self, worker: WorkerId, adapter: str, now: Nanos) -> bool:
        """Return whether a worker could not load an adapter a moment ago."""
        failure = self._failures.get((worker, adapter))
        return failure is not None and now < failure[0]

    def seconds(self, worker: WorkerId, adapter: str) -> float:
        """Return how long a request for an adapter would wait for it on a worker; 0 where it is there."""
        mine = self.workers.get(worker)
        if mine is None:
            return 0.0
        entry = mine.resident.get(adapter)
        if entry is not None and not entry.loading:
            return 0.0
        ahead = 0
        for name, one in mine.resident.items():
            if name == adapter:
                break
            ahead += one.loading
        if entry is not None:
            return self.load_seconds * (ahead + 1)
        full = len(mine.resident) >= mine.slots
        return self.load_seconds * (mine.loading + 1 + (EVICTION if full else 0.0))

    def take(self, worker: WorkerId, adapter: str, request: RequestId) -> AdapterPlan:
        """A request with an adapter is placed on a worker: it counts as used, and is made room for.

        Raises:
            InvariantError: there is no room; `why_not` says so beforehand.
        """
        mine = self.workers[worker]
        entry = mine.resident.pop(adapter, None)
        if entry is not None:
            mine.resident[adapter] = entry  # the most recently used
            self._use(mine, adapter, ("", request))
            self.counts["wait" if entry.loading else "hit"] += 1
            how = "is being loaded" if entry.loading else "is resident"
            return AdapterPlan(False, entry.loading, (), f"adapter {adapter} {how}")
        unload = self._room(mine)
        if len(mine.resident) >= mine.slots:
            raise InvariantError(f"worker {worker} has no room for adapter {adapter}")
        mine.resident[adapter] = HeldAdapter(loading=True)
        self._use(mine, adapter, ("", request))
        self.counts["load"] += 1
        self.counts["unload"] += len(unload)
        instead = f" in place of {', '.join(unload)}" if unload else ""
        return AdapterPlan(True, True, unload, f"adapter {adapter} is loaded{instead}")

    def prefetch(self, worker: WorkerId, adapter: str) -> AdapterPlan:
        """An operator wants an adapter on a worker: it is made room for, without a request."""
        mine = self.workers[worker]
        if adapter in mine.resident:
            return AdapterPlan(False, False, (), f"adapter {adapter} is resident")
        unload = self._room(mine)
        if len(mine.resident) >= mine.slots:
            raise InvariantError(f"worker {worker} has no room for adapter {adapter}")
        mine.resident[adapter] = HeldAdapter(loading=True)
        self.counts["load"] += 1
        self.counts["unload"] += len(unload)
        return AdapterPlan(True, True, unload, f"adapter {adapter} is loaded")

    def roomiest(self, adapter: str, loads: Mapping[WorkerId, int], now: Nanos) -> WorkerId | None:
        """Return the worker on which loading an adapter costs least; None where none can.

        Args:
            loads: workers, and the requests that each has.
        """
        able = [one for one in loads if one in self.workers and self.why_not(one, adapter, now) is None]
        return min(
            able,
            key=lambda one: (self.seconds(one, adapter), loads[one], len(self.workers[one].resident), one),
            default=None,
        )

    def want(self, workers: Mapping[str, int]) -> dict[str, int]:
        """Take over on how many workers each adapter is to be; return which of them by how many fewer than before."""
        fewer = {name: count - workers.get(name, 0) for name, count in self.wanted.items()}
        self.wanted = {name: count for name, count in workers.items() if count > 0}
        # Beyond what is wanted there may be others that came by demand: they stay until they make room.
        return {
            name: min(count, len(self.holders(name)) - self.wanted.get(name, 0))
            for name, count in fewer.items()
            if count > 0 and len(self.holders(name)) > self.wanted.get(name, 0)
        }

    def lacking(self) -> dict[str, int]:
        """Return the wanted adapters that too few workers hold or load, and how many more it takes."""
        missing = {name: count - len(self.holders(name)) for name, count in self.wanted.items()}
        return {name: count for name, count in missing.items() if count > 0}

    def idle_holders(self, adapter: str) -> list[WorkerId]:
        """Return the workers on which an adapter may make room."""
        held = ((worker, mine, mine.resident.get(adapter)) for worker, mine in self.workers.items())
        return [worker for worker, mine, one in held if one is not None and self._idle(mine, adapter, one)]

    def holders(self, adapter: str) -> list[WorkerId]:
        """Return the workers that hold an adapter, or load it."""
        return [worker for worker, mine in self.workers.items() if adapter in mine.resident]

    # --- what became of it ------------------------------------------------------------------------------------------

    def loaded(self, worker: WorkerId, adapter: str, took: float) -> None:
        """A worker has loaded an adapter, in so many seconds."""
        mine = self.workers.get(worker)
        entry = None if mine is None else mine.resident.get(adapter)
        if entry is not None:
            entry.loading = False
        self._failures.pop((worker, adapter))
        self.load_seconds += LEARNT * (took - self.load_seconds)

    def failed(self, worker: WorkerId, adapter: str, reason: str, now: Nanos) -> None:
        """A worker could not load an adapter."""
        mine = self.workers.get(worker)
        if mine is None:
            return
        mine.resident.pop(adapter, None)
        self.counts["failed"] += 1
        self._failures.put((worker, adapter), (now + round(RETRY_AFTER * SECOND), reason))

    def missing(self, worker: WorkerId, adapter: str) -> AdapterPlan | None:
        """An engine does not hold what the table said; return what has to be done, None where it is on its way."""
        mine = self.workers.get(worker)
        if mine is None:
            return None
        entry = mine.resident.pop(adapter, None)
        if entry is not None and entry.loading:
            mine.resident[adapter] = entry
            return None
        self.counts["missing"] += 1
        unload = self._room(mine)
        # Where all others are in use, the engine has one more than it should: the request is there already.
        mine.resident[adapter] = HeldAdapter(loading=True)
        return AdapterPlan(True, True, unload, f"adapter {adapter} is loaded again")

    def forget(self, worker: WorkerId, adapter: str) -> None:
        """A worker holds an adapter no more."""
        mine = self.workers.get(worker)
        if mine is not None:
            mine.resident.pop(adapter, None)

    def heard(self, worker: WorkerId, adapter: str, unloaded: Sequence[str], router: str, request: RequestId) -> None:
        """Another router placed a request with an adapter, and had others unloaded for it."""
        mine = self.workers.get(worker)
        if mine is None:
            return
        for name in unloaded:
            mine.resident.pop(name, None)
        entry = mine.resident.pop(adapter, None)
        mine.resident[adapter] = HeldAdapter() if entry is None else entry
        self._use(mine, adapter, (router, request))

    # --- parts ------------------------------------------------------------------------------------------------------

    def _room(self, mine: WorkerAdapters) -> tuple[str, ...]:
        """Take the least recently used adapters out until there is room for one more; return their names."""
        unload: list[str] = []
        while len(mine.resident) >= mine.slots:
            victim = self._victim(mine)
            if victim is None:
                break
            del mine.resident[victim]
            unload.append(victim)
        return tuple(unload)

    def _fits(self, mine: WorkerAdapters) -> bool:
        """Return whether there is room for one more, once the idle ones are out.

        A worker may hold more than it should: another router decided at the same moment.
        """
        over = len(mine.resident) - mine.slots + 1
        if over <= 0:
            return True
        for name, one in mine.resident.items():
            if self._idle(mine, name, one):
                over -= 1
                if not over:
                    return True
        return False

    def _victim(self, mine: WorkerAdapters) -> str | None:
        """Return the least recently used adapter without a request in flight; None where there is none."""
        for name, one in mine.resident.items():
            if self._idle(mine, name, one):
                return name
        return None

    def _idle(self, mine: WorkerAdapters, name: str, one: HeldAdapter) -> bool:
        """Return whether an adapter may make room for another: nobody has or wants it there."""
        if one.loading or one.pinned:
            return False
        needed = self.wanted.get(name, 0)
        return not (needed and len(self.holders(name)) <= needed) and not self._in_use(mine, name)

    def _in_use(self, mine: WorkerAdapters, adapter: str) -> bool:
        uses = mine.uses.get(adapter)
        if uses is None:
            return False
        while uses:
            use = next(iter(uses))
            if self._runs(*use):
                return True
            del uses[use]
        del mine.uses[adapter]
        return False

    def _use(self, mine: WorkerAdapters, adapter: str, use: Use) -> None:
        uses = mine.uses.setdefault(adapter, {})
        if len(uses) >= USES_MIN and len(uses) & (len(uses) - 1) == 0:
            # At each power of two, so that the search costs a constant for each request.
            for ended in [one for one in uses if not self._runs(*one)]:
                del uses[ended]
        uses[use] = None

    # --- machine duties ---------------------------------------------------------------------------------------------

    def snapshot(self) -> ResidencyState:
        return state_of(self, ResidencyState)

    def restore(self, state: ResidencyState) -> None:
        take_state(self, state)

    def check(self) -> None:
        for worker, mine in self.workers.items():
            if mine.slots < 1:
                raise InvariantError(f"worker {worker} has {mine.slots} places for adapters")
            if "" in mine.resident:
                raise InvariantError(f"worker {worker} holds an adapter without a name")
