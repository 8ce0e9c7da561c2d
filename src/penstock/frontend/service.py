"""`Service`: the one object that all routes of a frontend process share, with settings, models, router and counts."""

import asyncio
import random
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.adapters.engines.http.engine_call import EngineCalls
from penstock.adapters.seams import Store
from penstock.adapters.sources.frontend_counters import FrontendCounters
from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.adapters.telemetry.otel_tracer import OtelTracer
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend.admin.frontend_peers import PeerGuard
from penstock.frontend.admin.request_history import RequestHistory
from penstock.frontend.admin.timeline_store import TimelineStore
from penstock.frontend.counter_ledger import CounterLedger
from penstock.frontend.exchange.prefill_stages import PrefillStages
from penstock.frontend.http.api_keys import ApiKeys, KeyRates
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.openai import context_overflow
from penstock.frontend.prompt.prompt_hashing import BlockHashing, PromptHasher, PromptMedia
from penstock.frontend.prompt.prompt_tokenizer import PromptTokenizer, load_tokenizer
from penstock.frontend.prompt.request_body import PATHS
from penstock.frontend.record_writer import DiscardingSink, RecordSink
from penstock.kernel.hashing import TEXT_BLOCK_BYTES
from penstock.kernel.machine import Effect, Nanos
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import RequestId, WorkerCard
from penstock.router.events import Abort, Arrived, Closed, Dispatch, Release, Resume
from penstock.router.kv_index.image_placeholders import ImagePlaceholders
from penstock.runtime.planning.frontend_counts import FrontendCounts

PROMPTS_WAITING_MAX = 1024
"""Most prompts that wait for a thread that tokenises; the next is refused with 503."""
RESOLVED_MAX = 1024
"""Most names of models, adapters included, whose resolution is remembered."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")


class RequestTicket(Protocol):
    """One request's connection to the router: `penstock.runtime.node.tickets.Ticket`."""

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
    def staged(self, attempt: int, *, kv_retained: bool, cached: int | None) -> None: ...
    def cancelled(self) -> None: ...


class TicketDesk(Protocol):
    """All requests' connections to the router: `penstock.runtime.node.tickets.Tickets`."""

    def arrive(self, event: Arrived) -> RequestTicket: ...
    def is_open(self, request: RequestId) -> bool: ...
    def listen(self, listener: Callable[[Nanos, Effect], None]) -> None: ...


class ClusterView(Protocol):
    """What a frontend needs of the node behind it, beside tickets."""

    name: str
    """Name of this process's router."""

    @property
    def store(self) -> Store | None:
        """Store for the operators' desired state; None where there is none."""
        ...

    @property
    def started(self) -> ClusterSettings:
        """The settings of the start, before operators changed some."""
        ...

    def now(self) -> Nanos:
        """Return the router's time."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the status for operators: models, workers, queues, counts, findings."""
        ...

    def cards(self) -> Sequence[WorkerCard]:
        """Return the cards of all present workers."""
        ...

    def is_current(self, card: WorkerCard) -> bool:
        """Return whether the worker of this card, in the same epoch, is still present."""
        ...

    def images(self, model: str) -> ImagePlaceholders | None:
        """Return what is known of the images that a model's engines hold."""
        ...

    def block_size(self, model: str) -> int:
        """Return a model's tokens per block, by which the router compares prefixes."""
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

    def export_counters(self, counts: FrontendCounts) -> FrontendCounters:
        """Return the counters for planners: this frontend's counts, and the workers as they are."""
        ...

    def peers(self) -> Sequence[str]:
        """Return the admin URLs of the cluster's other frontend processes."""
        ...


@dataclass(frozen=True, slots=True)
class ResolvedModel:
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
    cluster: ClusterView
    tickets: TicketDesk
    engines: EngineCalls
    tokenizers: dict[str, PromptTokenizer | None]
    """Tokenizer of every configured model; None where its text is hashed."""
    metrics: FrontendMetrics
    tracer: OtelTracer = field(default_factory=lambda: OtelTracer(None))
    records: RecordSink = field(default_factory=DiscardingSink)
    decisions: RecordSink = field(default_factory=DiscardingSink)
    changes: RecordSink = field(default_factory=DiscardingSink)
    """What operators changed through this process (`penstock.runtime.records.settings_changes`)."""
    ledger: CounterLedger | None = None
    """Counts of ended processes."""
    run: str = ""
    run_offset: Nanos = 0
    """Nanoseconds from the start of the run to the router's time 0."""
    urls: dict[str, str] = field(default_factory=dict)
    """Where this frontend listens: ``endpoint`` and ``admin``."""
    new_id: Callable[[], str] = field(default_factory=lambda: id_factory(random.Random(secrets.randbits(128))))
    draining: bool = False
    """Whether requests are refused."""
    retiring: bool = False
    """Whether a successor accepts the new connections; those that are open here end with their next answer."""
    secret: ClusterSecret | None = None
    """Secret of the cluster, by which the frontends recognise each other."""

    def __post_init__(self) -> None:
        frontend = self.settings.frontend
        self.started = time.monotonic()
        self.inflight = 0
        """HTTP requests of routed or proxied routes that are being answered."""
        self.idle = asyncio.Event()
        """Set while no request is being answered."""
        self.idle.set()
        self.keys = ApiKeys(frontend.security.api_keys)
        self.admin_keys = ApiKeys(frontend.security.admin_keys)
        self.peer_guard = PeerGuard(self.secret)
        self.rates = KeyRates(frontend.limits.rate, frontend.limits.burst)
        self.prompts = PromptHasher(frontend.tokenize.threads, PROMPTS_WAITING_MAX, self.metrics.stage)
        self.handoffs = PrefillStages(self)
        self.history = RequestHistory(offset=self.run_offset)
        self.timeline_store = TimelineStore(self.cluster.now, self.cluster.status, self.run_offset)
        self.counts = FrontendCounts(time.monotonic)
        """Request counts for planners."""
        self.running: dict[tuple[str, int], Callable[[str], None]] = {}
        """Open attempts by request id and number, and how each is stopped."""
        self._resolved_for: list[WorkerCard] = []
        self._resolved: dict[str, ResolvedModel] = {}
        self.watched: set[Any] = set()
        """Attempts whose silence is watched (`penstock.frontend.exchange.stall_watchdog`)."""
        self.track_output = self.settings.router.track_output
        self.routed_paths = frozenset((*PATHS.values(), *frontend.proxied_routes))
        """Paths whose POST goes to an engine."""
        self.tickets.listen(self._heard)

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
        models: dict[str, WorkerCard | None] = dict.fromkeys(self.settings.models)
        for card in self.cluster.cards():
            for name in (card.model, *card.adapters):
                if models.get(name) is None:
                    models[name] = card
        return models

    def resolve(self, name: str) -> ResolvedModel:
        """Resolve the model name of a request.

        Raises:
            ClientError: 404: it is unknown; the message lists the known ones.
        """
        every = self.cluster.cards()
        if every != self._resolved_for:
            # Workers come and go seldom: a model's name is resolved once for each set of them.
            self._resolved_for, self._resolved = list(every), {}
        resolved = self._resolved.get(name)
        if resolved is None or resolved.block_size != self.cluster.block_size(resolved.model):
            resolved = self._resolve(name, every)
            if len(self._resolved) < RESOLVED_MAX:
                self._resolved[name] = resolved
        return resolved

    def _resolve(self, name: str, every: Sequence[WorkerCard]) -> ResolvedModel:
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
        # A worker of unknown context length may take what the others can't.
        most = max(lengths) if lengths and len(lengths) == len(cards) else None
        return ResolvedModel(model, adapter, self.tokenizers.get(model), self.cluster.block_size(model), most)

    def hashing(self, resolved: ResolvedModel, salt: str | None, media: Sequence[str | None] = ()) -> BlockHashing:
        """Return what decides a prompt's blocks besides its tokens. ``media``: the ids of its images."""
        images = self.cluster.images(resolved.model) if media else None
        return BlockHashing(
            block_size=resolved.block_size,
            text_block_bytes=TEXT_BLOCK_BYTES,
            adapter=resolved.adapter,
            salt=salt,
            media=tuple(PromptMedia(id, None if id is None or images is None else images.find(id)) for id in media),
            placeholder=None if images is None else images.placeholder,
            usual=0 if images is None else images.usual,
        )

    def notes(self) -> list[str]:
        """Return notes for the health route of a healthy frontend."""
        notes = [str(finding["text"]) for finding in self.cluster.status()["findings"]]
        notes += [
            f"{model} has no local tokenizer: it is routed by hashed text blocks, which match caches less well"
            for model, tokenizer in self.tokenizers.items()
            if tokenizer is None
        ]
        notes += [
            f"the tokenizer cache of {model} is off: {tokenizer.why_no_cache}"
            for model, tokenizer in self.tokenizers.items()
            if tokenizer is not None and not tokenizer.caches and self.settings.frontend.tokenize.cache_bytes > 0
        ]
        return notes

    # --- ids --------------------------------------------------------------------------------------------------------

    def request_id(self, headers: Mapping[str, str]) -> str:
        """Return the client's id where it is valid, else a new one."""
        for name in ("x-request-id", "x-dynamo-request-id", "x-penstock-request-id"):
            value = headers.get(name)
            if value is not None and _SANE_ID.match(value):
                return value
        return self.new_id()

    def arrive(self, event: Callable[[RequestId], Arrived], requested: str, lead: Nanos = 0) -> RequestTicket:
        """Post a request to the router, under a new id where the requested one is in use by an open request.

        Args:
            lead: how long ago it arrived here, before it was read and tokenised.
        """
        arrived = event(RequestId(requested))
        self.timeline_store.arrived(arrived.prompt.isl)
        self.counts.of(arrived.model).arrive(arrived.prompt.isl)
        if self.tickets.is_open(arrived.id):
            arrived = event(RequestId(self.new_id()))
        self.history.arrived(arrived.id, lead)
        return self.tickets.arrive(arrived)

    # --- effects of the router --------------------------------------------------------------------------------------

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

    async def sample_timeline(self) -> None:
        """Sample the timeline for the page, until cancelled."""
        await self.timeline_store.run(lambda: self.settings.slo)

    async def close(self) -> None:
        """Close threads, connections and spans."""
        self.prompts.close()
        await self.handoffs.close()
        await self.engines.close()
        await asyncio.to_thread(self.tracer.close)


def id_factory(rng: random.Random) -> Callable[[], str]:
    """Return a maker of request ids: unique, not secret, and without a system call each."""
    return lambda: f"req-{rng.getrandbits(96):024x}"


def load_tokenizers(settings: ClusterSettings) -> dict[str, PromptTokenizer | None]:
    """Load every configured model's tokenizer.

    Raises:
        ConfigError: a named tokenizer can't be loaded.
    """
    return {
        name: None
        if model.tokenizer is None
        else load_tokenizer(model.tokenizer, cache_bytes=settings.frontend.tokenize.cache_bytes)
        for name, model in settings.models.items()
    }


def check_prompt(resolved: ResolvedModel, isl: int, prompt_max: int | None, param: str) -> None:
    """Refuse a prompt that is too long, with the numbers.

    Args:
        isl: prompt tokens, counted (an estimate refuses nothing).
        param: the field that holds the prompt.

    Raises:
        ClientError: 400.
    """
    if prompt_max is not None and isl > prompt_max:
        raise rejected(context_overflow.above_limit(isl, prompt_max, param), param, code=context_overflow.CODE)
    if resolved.max_len is not None and isl >= resolved.max_len:
        raise rejected(context_overflow.too_long(isl, resolved.max_len, param), param, code=context_overflow.CODE)
