"""Fair queue: tenants' shares of the fleet, by tokens.

Each tenant waits in a queue of its own, ordered by the policy. Which queue goes next is by virtual time: a request
starts at the later of the clock and its tenant's last finish, and finishes its tokens over its tenant's weight later;
the earliest start goes first (start-time fair queueing: Goyal, Vin and Cheng 1996; of tokens: Sheng et al. 2024).

That alone would fill every idle moment with the work of a tenant that floods, and the others' prefills would wait for
it. So a tenant has a pace: what the others get on average, by weight. One that is ahead of twice its pace is sent only
to workers that prefill nothing; one that floods, where the fleet can't serve all that is asked for, is held to its
pace, and beyond it to moments in which hardly any worker prefills. What it has in excess waits in its own queue, which
has its share of the room. Where the fleet can serve everybody, nobody is held for being larger than others.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Nanos, nanos, seconds, state_of, take_state
from penstock.kernel.values import WorkerCard
from penstock.router.request_queue import FadingSum, QueuedRequest, QueueState, RequestQueue, SharesState
from penstock.router.routed_request import RoutedRequest
from penstock.router.settings import QueueSettings
from penstock.router.workers.active_sequences import TargetLoad

OTHERS = ""
"""Name under which all tenants without a weight, and requests without a tenant, stand together; its weight is 1."""
OTHERS_WEIGHT = 1.0
WINDOW = 5.0
"""Seconds over which tokens are averaged (a time constant): shorter notices a flood sooner, and takes more bursts for
one. A guess."""
ACTIVE = 30.0
"""Seconds after its last request for which a tenant counts among those that share."""
FLOOD = 2.0
"""How many times what the others ask for, or get, on average and by weight, is too much for one tenant. A guess."""
OVERLOAD = 0.9
"""How full the fleet would be with all that is asked for, from which on it can't serve it. A guess: lower keeps more of
the fleet free for the others, and holds tenants that are merely larger than they (docs/guides/tenants.md)."""
AHEAD = nanos(1.0)
"""How far a tenant may be ahead of its pace: what comes within a second is no flood yet."""
NEWEST = 0.1
"""Weight of a tenant's newest answer in the mean of their lengths."""
KICK = 0.02
"""Seconds after which held requests are looked at again where nothing else happens."""
BATCHES = 1.0
"""Prompt tokens that may wait at a worker, in forward passes' worth, where router.queue.threshold is unset."""


class IdleOnly(NamedTuple):
    """A moment in which a worker is idle, and few others are not."""

    fullness: float
    """How full a worker is that counts as busy."""
    busy: float
    """Part of the workers that may be busy, one at least."""
    reason: str

    def leaves(self, cards_loads: Sequence[tuple[WorkerCard, TargetLoad]]) -> list[tuple[WorkerCard, TargetLoad]]:
        """Return the workers that a request may go to now."""
        idle = [(card, load) for card, load in cards_loads if fullness(card, load) < self.fullness]
        busy = len(cards_loads) - len(idle)
        return idle if busy < max(1, int(self.busy * len(cards_loads))) else []


CROWDING = IdleOnly(
    1.0, 1.0, "its tenant had had more than twice what others get, and waits for a worker that prefills nothing"
)
"""For who has had much: a worker that prefills nothing."""
HELD = IdleOnly(0.5, 0.25, "its tenant floods a fleet that can't serve all, and is held to what others get")
"""For who floods a full fleet and is ahead of its pace. Guesses: with half of the workers it moves the others by up to
a third where the fleet is half empty; with none it leaves idle what they leave."""


class FairQueue(RequestQueue):
    """Requests that no worker may take yet, by tenant, and the tenants' tokens in service."""

    def __init__(self, settings: QueueSettings) -> None:
        super().__init__(settings)
        self._weights: dict[str, float] = dict(settings.shares)
        self._queues: dict[str, RequestQueue] = {}
        """Tenant -> its waiting requests; only of those that have any."""
        self._tenants: dict[str, str] = {}
        """Waiting request -> its tenant."""
        self._clock = 0.0
        self._finish: dict[str, float] = {}
        """Tenant -> virtual time at which what was sent of it is done."""
        self.serving: dict[str, int] = {}
        """Tenant -> tokens in service, prompts and expected output."""
        self._demand: dict[str, FadingSum] = {}
        """Tenant -> tokens that it asked for lately."""
        self._used: dict[str, FadingSum] = {}
        """Tenant -> tokens that were sent to workers for it lately."""
        self._paced: dict[str, Nanos] = {}
        """Tenant -> when what was sent of it would have been sent at the others' mean rate."""
        self._crowding: dict[str, Nanos] = {}
        """Tenant -> the same at `FLOOD` times that rate."""
        self._full = FadingSum()
        """How full the workers were when requests arrived, added up: over their number it is how full they are."""
        self._arrivals = FadingSum()
        self._began: Nanos | None = None
        """When the first request came: the sums of a young queue are those of less than the window."""
        self._outputs: dict[str, float] = {}
        """Tenant -> tokens of its answers on average: where its requests do not say, these are expected."""
        self.kicked = False
        """Whether a timer is set by which held requests are looked at again."""

    def name(self, tenant: str | None) -> str:
        """Return the name under which a tenant's share is kept."""
        return tenant if tenant is not None and tenant in self._weights else OTHERS

    def share(self, tenant: str) -> float:
        """Return a tenant's part of the fleet: its weight among all that have one, and among others while there are."""
        total = sum(self._weights.values())
        if OTHERS in self.serving or OTHERS in self._queues:
            total += OTHERS_WEIGHT
        return min(1.0, self._weight(tenant) / total)

    def room(self, tenant: str, limit: int) -> int:
        """Return how many requests of a tenant may wait: its share of the queue's limit."""
        return max(1, int(limit * self.share(tenant))) if limit else 0

    def waits(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        own = self._queues.get(tenant)
        return 0 if own is None else len(own)

    def output(self, tenant: str, mean: float) -> int:
        """Return the tokens that a tenant's answer is expected to have; ``mean``: of everybody's answers."""
        return round(self._outputs.get(tenant, mean))

    def arrived(self, tenant: str, work: int, fullness: float, now: Nanos) -> None:
        """A tenant asks for tokens. ``fullness``: of the workers on average, 0 to 1."""
        _add_to(_sum_of(self._demand, tenant), work, now)
        _add_to(self._full, fullness, now)
        _add_to(self._arrivals, 1.0, now)
        if self._began is None:
            self._began = now

    def floods(self, tenant: str, now: Nanos) -> bool:
        """Return whether a tenant asks for much more than the others do; what it has waiting counts, too."""
        if tenant not in self._demand:
            return False
        others, queue = self._others(self._demand, tenant, now), self._queues.get(tenant)
        asked = _sum_now(self._demand[tenant], now) + (0 if queue is None else queue.work)
        return others is not None and asked > FLOOD * others * self._weight(tenant)

    def overloaded(self, now: Nanos) -> bool:
        """Return whether the fleet would be too full if all that is asked for were sent to it."""
        arrivals, used = _sum_now(self._arrivals, now), sum(_sum_now(each, now) for each in self._used.values())
        asked = sum(_sum_now(each, now) for each in self._demand.values())
        return min(arrivals, used) > 0 and _sum_now(self._full, now) / arrivals * asked / used >= OVERLOAD

    def idle_only(self, tenant: str, now: Nanos) -> IdleOnly | None:
        """Return which moment a tenant's next request waits for; None where any worker with room will do."""
        if self._paced.get(tenant, 0) > now + AHEAD and self.floods(tenant, now) and self.overloaded(now):
            return HELD
        return CROWDING if self._crowding.get(tenant, 0) > now + AHEAD else None

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, OTHERS_WEIGHT)

    def _others(self, sums: dict[str, FadingSum], tenant: str, now: Nanos) -> float | None:
        """Return the tokens of the other active tenants over their weights; None where no other is active."""
        tokens = weights = 0.0
        for name, asked in self._demand.items():
            if name != tenant and now - asked.at <= nanos(ACTIVE):
                weights += self._weight(name)
                tokens += _sum_now(sums[name], now) if name in sums else 0.0
        return tokens / weights if weights else None

    # --- the queue ---------------------------------------------------------------------------------------------------

    def add(self, waiting: QueuedRequest) -> None:
        self.waiting[waiting.id] = waiting.strict
        self._tenants[waiting.id] = waiting.tenant
        if waiting.tenant not in self._queues:
            self._queues[waiting.tenant] = RequestQueue(self._settings)
        self._queues[waiting.tenant].add(waiting)

    def remove(self, request: str) -> bool:
        if self.waiting.pop(request, None) is None:  # type: ignore[call-overload]
            return False
        tenant = self._tenants.pop(request)
        self._queues[tenant].remove(request)  # type: ignore[arg-type]
        if not len(self._queues[tenant]):
            del self._queues[tenant]
        return True

    def take(self, waiting: QueuedRequest) -> None:
        own = self._queues[waiting.tenant]
        own.take(waiting)
        del self.waiting[waiting.id], self._tenants[waiting.id]
        if not len(own):
            del self._queues[waiting.tenant]

    def heads(self, now: Nanos) -> list[QueuedRequest]:
        """Return the request of each tenant that goes next, in the order in which tenants do."""
        firsts = [head for queue in self._queues.values() if (head := queue.peek(now)) is not None]
        return sorted(firsts, key=lambda head: (-head.strict, self._start(head.tenant), head.tenant))

    def peek(self, now: Nanos) -> QueuedRequest | None:
        return next(iter(self.heads(now)), None)

    def waited(self, strict: int, now: Nanos, tenant: str | None = None) -> Nanos:
        own = self._queues.get(self.name(tenant))
        return 0 if own is None else own.waited(strict, now)

    def __iter__(self) -> Iterator[QueuedRequest]:
        for queue in self._queues.values():
            yield from queue

    # --- service -----------------------------------------------------------------------------------------------------

    def begin(self, tenant: str, work: int, now: Nanos) -> None:
        """Tokens of a tenant are sent to a worker."""
        self._clock = self._start(tenant)
        self._count(tenant, work, now)
        self.serving[tenant] = self.serving.get(tenant, 0) + work

    def heard(self, tenant: str, work: int, now: Nanos) -> None:
        """Another router sent tokens of a tenant to a worker: they count in its share as those that are sent here."""
        _add_to(_sum_of(self._demand, tenant), work, now)
        self._count(tenant, work, now)

    def _count(self, tenant: str, work: int, now: Nanos) -> None:
        """Tokens were sent: count them in the tenant's share and against its pace."""
        self._finish[tenant] = self._start(tenant) + work / self._weight(tenant)
        span = WINDOW * (1.0 - _decay_after(now - (self._began or 0)))
        if (others := self._others(self._used, tenant, now)) and span:
            pace = others / span * self._weight(tenant)
            for ahead, rate in ((self._paced, pace), (self._crowding, FLOOD * pace)):
                ahead[tenant] = min(max(now, ahead.get(tenant, 0)) + nanos(work / rate), now + nanos(WINDOW))
        _add_to(_sum_of(self._used, tenant), work, now)

    def end(self, tenant: str, work: int, isl: int, osl: int) -> None:
        """They are done. ``isl``, ``osl``: how many they were in fact."""
        if osl:
            mean = self._outputs.get(tenant, osl)
            self._outputs[tenant] = mean + NEWEST * (osl - mean)
        left = self.serving.get(tenant, 0) - work
        if left > 0:
            self.serving[tenant] = left
        else:
            self.serving.pop(tenant, None)
        self._finish[tenant] = self._finish.get(tenant, 0.0) + (isl + osl - work) / self._weight(tenant)

    def recount(self, requests: Iterable[RoutedRequest]) -> None:
        """Count the tokens in service anew, of a model's open requests."""
        self.serving = {}
        for request in requests:
            if request.work:
                name = self.name(request.event.tenant)
                self.serving[name] = self.serving.get(name, 0) + request.work

    def _start(self, tenant: str) -> float:
        return max(self._clock, self._finish.get(tenant, 0.0))

    # --- machine duties ----------------------------------------------------------------------------------------------

    def snapshot(self) -> QueueState:
        dues = {tenant: queue.snapshot().due for tenant, queue in self._queues.items()}
        return QueueState(list(self), dues=dues, shares=state_of(self, SharesState))

    def restore(self, state: QueueState) -> None:
        self.__init__(self._settings)  # type: ignore[misc]
        for waiting in state.waiting:
            self.add(msgspec.structs.replace(waiting, tenant=self.name(waiting.tenant)))
        for tenant, due in state.dues.items():
            if tenant in self._queues:
                self._queues[tenant].owe(due)
        if state.shares is not None:
            take_state(self, state.shares)

    def check(self) -> None:
        for queue in self._queues.values():
            queue.check()
        if {waiting.id: waiting.tenant for waiting in self} != self._tenants or set(self._tenants) != set(self.waiting):
            raise InvariantError("the tenants' queues and their index of requests differ")
        if any(tokens <= 0 for tokens in self.serving.values()):
            raise InvariantError(f"tokens in service are {self.serving}")


def has_room(settings: QueueSettings, card: WorkerCard, load: TargetLoad) -> bool:
    """Return whether a worker may take one more request: it is below every limit that it reports."""
    passes = BATCHES if settings.threshold is None else settings.threshold
    if card.max_num_batched_tokens is not None and load.prefill_tokens > passes * card.max_num_batched_tokens:
        return False
    if card.max_num_seqs is not None and load.requests >= card.max_num_seqs:
        return False
    return card.kv_blocks is None or load.blocks < card.kv_blocks


def fullness(card: WorkerCard, load: TargetLoad) -> float:
    """Return how full a worker is, 0 to 1: wholly while it prefills, since whatever comes next has to wait."""
    if load.prefill_tokens > 0:
        return 1.0
    seats = load.requests / card.max_num_seqs if card.max_num_seqs else 0.0
    return min(1.0, max(seats, load.blocks / card.kv_blocks if card.kv_blocks else 0.0))


def _decay_after(passed: Nanos) -> float:
    return math.exp(-seconds(max(0, passed)) / WINDOW)


def _sum_now(fading: FadingSum, now: Nanos) -> float:
    """Return a sum, whose parts fade with the time constant `WINDOW`, as it is now."""
    return fading.sum * _decay_after(now - fading.at)


def _add_to(fading: FadingSum, amount: float, now: Nanos) -> None:
    fading.sum = _sum_now(fading, now) + amount
    fading.at = now


def _sum_of(sums: dict[str, FadingSum], tenant: str) -> FadingSum:
    return sums.setdefault(tenant, FadingSum())
