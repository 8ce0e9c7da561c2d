"""What ties a frontend process together? One object that the routes share: settings, models, router, counts."""

import asyncio
import random
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.adapters.engines.calls import EngineCalls
from penstock.adapters.seams import Store
from penstock.adapters.sources.told import FrontendTold
from penstock.adapters.telemetry.otel import Tracer
from penstock.adapters.telemetry.prometheus import Metrics
from penstock.config.cluster import ClusterSettings
from penstock.frontend.access import Keys, Rates
from penstock.frontend.body import PATHS
from penstock.frontend.errors import quoted, rejected
from penstock.frontend.handoffs import Handoffs
from penstock.frontend.history import History
from penstock.frontend.peering import PeerGuard
from penstock.frontend.prompts import Hashing, Prompts
from penstock.frontend.records import Discard, RecordSink
from penstock.frontend.timeline import Seen
from penstock.frontend.tokens import PromptTokenizer, load_tokenizer
from penstock.kernel.machine import Effect, Nanos
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import RequestId, WorkerCard
from penstock.planner.counts import SloOf, slo_of
from penstock.router.events import Abort, Arrived, Closed, Dispatch, Release, Resume
from penstock.runtime.planning.counts import Counts

RESOLVED_MAX = 1024
"""Most names of models, adapters among them, whose meaning is remembered."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")


class TicketLike(Protocol):
    """One request's line to the router: `penstock.runtime.tickets.Ticket`."""

    id: RequestId
    attempt: int
    closed: Closed | None
    aborted: bool

    async def next(self) -> Dispatch | Closed: ...
    def first_token(self, attempt: int | None = None) -> None: ...
    def grown(self, tokens: int) -> None: ...
    def finished(self, tokens: int, cached: int | None, attempt: int | None = None) -> None: ...
    def failed(
        self,
        reason: str,
        *,
        retryable: bool,
        worker_at_fault: bool = True,
        status: int | None = None,
        resume: Resume | None = None,
        leaving: bool = False,
        attempt: int | None = None,
    ) -> None: ...
    def staged(self, attempt: int, *, held: bool, cached: int | None) -> None: ...
    def cancelled(self) -> None: ...


class TicketsLike(Protocol):
    """All requests' lines to the router: `penstock.runtime.tickets.Tickets`."""

    def arrive(self, event: Arrived) -> TicketLike: ...
    def listen(self, listener: Callable[[Nanos, Effect], None]) -> None: ...


class Cluster(Protocol):
    """What a frontend asks of the node behind it, beside tickets."""

    name: str
    """Of this process's router."""

    @property
    def store(self) -> Store | None:
        """Where wishes of operators go; None where there is no such place."""
        ...

    @property
    def started(self) -> ClusterSettings:
        """The settings of the start, before operators changed some."""
        ...

    def now(self) -> Nanos:
        """Return the router's time."""
        ...

    def status(self) -> dict[str, Any]:
        """Return what an operator sees: models, workers, queues, counts, findings."""
        ...

    def cards(self) -> Sequence[WorkerCard]:
        """Return all workers that are there."""
        ...

    def knows(self, card: WorkerCard) -> bool:
        """Return whether a worker, as it was when this card was written, is still there."""
        ...

    def block_size(self, model: str) -> int:
        """Return a model's tokens per block, as the router compares prefixes by it."""
        ...

    def ready(self, model: str) -> int:
        """Return how many workers can take a request of a model now."""
        ...

    def kv_events(self) -> Mapping[tuple[str, str], int]:
        """Return how many KV events were applied, by (event type, result)."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Return loop and router health: loop_longest, loop_recent, loop_stalls, router_faults."""
        ...

    def notes(self) -> Mapping[str, int]:
        """Return how often each kind of note was taken."""
        ...

    def told(self, counts: Counts) -> FrontendTold:
        """Return what planners are told: what was counted here, and the workers as they are."""
        ...

    def peers(self) -> Sequence[str]:
        """Return the admin URLs of the cluster's other frontend processes."""
        ...


@dataclass(frozen=True, slots=True)
class Resolved:
    """Which model a request is for, and what routing needs of it."""

    model: str
    adapter: str | None
    tokenizer: PromptTokenizer | None
    block_size: int
    max_len: int | None


@dataclass
class Service:
    """Everything that routes share; made once per process."""

    settings: ClusterSettings
    cluster: Cluster
    tickets: TicketsLike
    engines: EngineCalls
    tokenizers: dict[str, PromptTokenizer | None]
    """Every configured model; None where its text is hashed."""
    metrics: Metrics
    tracer: Tracer = field(default_factory=lambda: Tracer(None))
    records: RecordSink = field(default_factory=Discard)
    decisions: RecordSink = field(default_factory=Discard)
    changes: RecordSink = field(default_factory=Discard)
    """What operators changed through this process (`penstock.runtime.changes`)."""
    run: str = ""
    run_offset: Nanos = 0
    """Nanoseconds from the start of the run to the router's time 0."""
    urls: dict[str, str] = field(default_factory=dict)
    """Where this frontend listens: ``endpoint`` and ``admin``."""
    new_id: Callable[[], str] = field(default_factory=lambda: id_factory(random.Random(secrets.randbits(128))))
    draining: bool = False
    """Requests are refused."""
    retiring: bool = False
    """A successor accepts the new connections; those that are open here end with their next answer."""
    secret: ClusterSecret | None = None
    """Of the cluster: by it the other frontends know this one."""

    def __post_init__(self) -> None:
        frontend = self.settings.frontend
        self.started = time.monotonic()
        self.inflight = 0
        """HTTP requests of routed or proxied routes that are being answered."""
        self.idle = asyncio.Event()
        """Set while there is none."""
        self.idle.set()
        self.keys = Keys(frontend.security.api_keys)
        self.admin_keys = Keys(frontend.security.admin_keys)
        self.peer_guard = PeerGuard(self.secret)
        self.rates = Rates(frontend.limits.rate, frontend.limits.burst)
        self.prompts = Prompts(frontend.tokenize.threads, frontend.tokenize.queue_max, self.metrics.stage)
        self.handoffs = Handoffs(self)
        self.history = History(self.settings.router.decisions_kept, frontend.closed_kept, self.run_offset)
        self.seen = Seen(self.cluster.now, self.cluster.status, self.run_offset)
        self.counts = Counts(time.monotonic)
        """What planners are told."""
        self.running: dict[tuple[str, int], Callable[[str], None]] = {}
        """Open attempts by request id and number, and how each is stopped."""
        self._resolved_for: list[WorkerCard] = []
        self._resolved: dict[str, Resolved] = {}
        self.watched: set[Any] = set()
        """Attempts whose silence is watched (`penstock.frontend.watch`)."""
        self.track_output = self.settings.router.track_output
        self.routed_paths = frozenset((*PATHS.values(), *frontend.proxied_routes))
        """Paths whose POST goes to an engine."""
        self.tickets.listen(self._heard)

    @property
    def held_to(self) -> SloOf:
        """What requests are held to where planners are told of them."""
        return slo_of(self.settings.planning.slo)

    def enter(self) -> None:
        """Count a request in; `leave` counts it out."""
        self.inflight += 1
        self.idle.clear()

    def leave(self) -> None:
        self.inflight -= 1
        if not self.inflight:
            self.idle.set()

    # --- models -----------------------------------------------------------------------------------------------------

    def models(self) -> dict[str, WorkerCard | None]:
        """Return every model that clients may name: configured, served, and adapters; each with one worker's card."""
        found: dict[str, WorkerCard | None] = dict.fromkeys(self.settings.models)
        for card in self.cluster.cards():
            for name in (card.model, *card.adapters):
                if found.get(name) is None:
                    found[name] = card
        return found

    def resolve(self, name: str) -> Resolved:
        """Find out what a request's model is.

        Raises:
            ClientError: 404: it is none of the known ones, which the message lists.
        """
        every = self.cluster.cards()
        if every != self._resolved_for:
            # Workers come and go seldom: what they make of a model's name is worked out once.
            self._resolved_for, self._resolved = list(every), {}
        found = self._resolved.get(name)
        if found is None or found.block_size != self.cluster.block_size(found.model):
            found = self._resolve(name, every)
            if len(self._resolved) < RESOLVED_MAX:
                self._resolved[name] = found
        return found

    def _resolve(self, name: str, every: Sequence[WorkerCard]) -> Resolved:
        cards = [card for card in every if card.model == name]
        adapter: str | None = None
        model = name
        if not cards and name not in self.settings.models:
            cards = [card for card in every if name in card.adapters]
            if not cards:
                known = ", ".join(sorted(self.models())) or "none yet"
                raise rejected(
                    f"the model {quoted(name)} does not exist; known models: {known}",
                    "model",
                    code="model_not_found",
                    status=404,
                )
            adapter, model = name, cards[0].model
        lengths = [card.max_len for card in cards if card.max_len is not None]
        # One worker of unknown length may take what the others can't.
        most = max(lengths) if lengths and len(lengths) == len(cards) else None
        return Resolved(model, adapter, self.tokenizers.get(model), self.cluster.block_size(model), most)

    def hashing(self, resolved: Resolved, salt: str | None, media: tuple[bytes, ...] = ()) -> Hashing:
        """Return what besides its tokens decides a prompt's blocks."""
        return Hashing(
            block_size=resolved.block_size,
            text_block_bytes=self.settings.router.index.text_block_bytes,
            adapter=resolved.adapter,
            salt=salt,
            media=media,
        )

    def notes(self) -> list[str]:
        """Return what the health route should say although it is well."""
        found = [str(finding["text"]) for finding in self.cluster.status()["findings"]]
        found += [
            f"{model} has no local tokenizer: it is routed by hashed text blocks, which match caches less well"
            for model, tokenizer in self.tokenizers.items()
            if tokenizer is None
        ]
        found += [
            f"the tokenizer cache of {model} is off: {tokenizer.why_no_cache}"
            for model, tokenizer in self.tokenizers.items()
            if tokenizer is not None and not tokenizer.caches and self.settings.frontend.tokenize.cache_bytes > 0
        ]
        return found

    # --- ids --------------------------------------------------------------------------------------------------------

    def request_id(self, headers: Mapping[str, str]) -> str:
        """Return the client's id where it is sane, else a new one."""
        for name in ("x-request-id", "x-dynamo-request-id", "x-penstock-request-id"):
            wished = headers.get(name)
            if wished is not None and _SANE_ID.match(wished):
                return wished
        return self.new_id()

    def arrive(self, event: Callable[[RequestId], Arrived], wished: str) -> TicketLike:
        """Hand a request to the router, under a new id where the wished one is in use by an open request."""
        arrived = event(RequestId(wished))
        self.seen.arrived(arrived.isl)
        self.counts.of(arrived.model).arrive(arrived.isl)
        try:
            return self.tickets.arrive(arrived)
        except ValueError:
            return self.tickets.arrive(event(RequestId(self.new_id())))

    # --- what the router says ---------------------------------------------------------------------------------------

    def _heard(self, now: Nanos, effect: Effect) -> None:
        if isinstance(effect, Dispatch):
            self.metrics.dispatched(effect)
            self.decisions.write(self.history.decided(effect.decision))
        elif isinstance(effect, Closed):
            self.metrics.closed(effect)
            self.history.closed(effect)
            self.handoffs.closed(effect)
        elif isinstance(effect, Release):
            self.handoffs.release(effect)
        elif isinstance(effect, Abort):
            stop = self.running.get((effect.id, effect.attempt))
            if stop is not None:
                stop(effect.reason)
            self.handoffs.aborted(effect)

    async def see(self) -> None:
        """Keep what the page shows over time, until cancelled."""
        await self.seen.run(lambda: (self.settings.slo.ttft, self.settings.slo.itl))

    async def close(self) -> None:
        """Let go of threads, connections and spans."""
        self.prompts.close()
        await self.handoffs.close()
        await self.engines.close()
        await asyncio.to_thread(self.tracer.close)


def id_factory(rng: random.Random) -> Callable[[], str]:
    """Return what makes request ids: unique, not secret, and without a system call each."""
    return lambda: f"req-{rng.getrandbits(96):024x}"


def load_tokenizers(settings: ClusterSettings) -> dict[str, PromptTokenizer | None]:
    """Load every configured model's tokenizer.

    Raises:
        ConfigError: one is named and can't be loaded.
    """
    tokenize = settings.frontend.tokenize
    return {
        name: None
        if model.tokenizer is None
        else load_tokenizer(model.tokenizer, cache_bytes=tokenize.cache_bytes, cache_entries=tokenize.cache_entries)
        for name, model in settings.models.items()
    }


def check_prompt(resolved: Resolved, isl: int, prompt_max: int | None, param: str) -> None:
    """Refuse a prompt that is too long, with the numbers.

    Args:
        isl: prompt tokens, counted (an estimate refuses nothing).
        param: the field that holds the prompt.

    Raises:
        ClientError: 400.
    """
    if prompt_max is not None and isl > prompt_max:
        text = f"the prompt has {isl} tokens, and this endpoint takes at most {prompt_max}"
        raise rejected(text, param, code="context_length_exceeded")
    if resolved.max_len is not None and isl >= resolved.max_len:
        text = f"the prompt has {isl} tokens, and {resolved.model} has room for {resolved.max_len} with the output"
        raise rejected(text, param, code="context_length_exceeded")
