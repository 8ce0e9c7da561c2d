"""`Service`: everything that the routes of a frontend process share, put together once per process."""

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from penstock.adapters.engines.http.engine_call import EngineCalls
from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.adapters.telemetry.otel_tracer import OtelTracer
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend.admin.request_history import RequestHistory
from penstock.frontend.admin.timeline_store import TimelineStore
from penstock.frontend.cluster_view import ClusterView, TicketDesk
from penstock.frontend.counter_ledger import CounterLedger
from penstock.frontend.exchange.exchange_context import ExchangeContext
from penstock.frontend.exchange.open_attempts import OpenAttempts
from penstock.frontend.exchange.prefill_stages import PrefillStages
from penstock.frontend.http.bookkeeping import Bookkeeping
from penstock.frontend.http.peer_guard import PeerGuard
from penstock.frontend.http.request_gate import RequestGate
from penstock.frontend.prompt.model_catalog import ModelCatalog
from penstock.frontend.prompt.prompt_hashing import PromptHasher
from penstock.frontend.prompt.prompt_tokenizer import PromptTokenizer
from penstock.frontend.prompt.request_body import PATHS
from penstock.frontend.record_writer import DiscardingSink, RecordSink
from penstock.kernel.machine import Effect, Nanos
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import RequestId
from penstock.router.events import Abort, Closed, Dispatch, Release
from penstock.runtime.planning.frontend_counts import FrontendCounts

PROMPTS_WAITING_MAX = 1024
"""Most prompts that wait for a thread that tokenises; the next is refused with 503."""


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
    secret: ClusterSecret | None = None
    """Secret of the cluster, by which the frontends recognise each other."""

    def __post_init__(self) -> None:
        frontend = self.settings.frontend
        self.started = time.monotonic()
        self.bookkeeping = Bookkeeping()
        note = self.bookkeeping.add
        self.gate = RequestGate(
            frontend,
            self.metrics,
            self.bookkeeping,
            PeerGuard(self.secret),
            routes=frozenset((*PATHS.values(), *frontend.proxied_routes)),
            new_id=self.new_id,
        )
        self.catalog = ModelCatalog(self.cluster, self.tokenizers, caching=frontend.tokenize.cache_bytes > 0)
        self.prompts = PromptHasher(
            frontend.tokenize.threads,
            PROMPTS_WAITING_MAX,
            lambda stage, took: note((self.metrics.stage, (stage, took))),
        )
        self.history = RequestHistory(offset=self.run_offset)
        self.timeline_store = TimelineStore(self.cluster.now, self.cluster.status, self.run_offset)
        self.counts = FrontendCounts(time.monotonic)
        """Request counts for planners."""
        self.open_attempts = OpenAttempts()
        self.handoffs = PrefillStages(self.engines, self.cluster, self.open_attempts, lambda: self.settings)
        self.exchanges = ExchangeContext(
            engines=self.engines,
            cluster=self.cluster,
            catalog=self.catalog,
            metrics=self.metrics,
            attempts=self.open_attempts,
            stages=self.handoffs,
            settings=self.settings,
            bookkeeping=self.bookkeeping,
            first_token=self.timeline_store.first,
        )
        self.tickets.listen(self._carry_out)

    def free_id(self, requested: str) -> RequestId:
        """Return the id under which a request is routed: a new one where an open request has the one it asks for."""
        return RequestId(self.new_id() if self.tickets.is_open(RequestId(requested)) else requested)

    def notes(self) -> list[str]:
        """Return notes for the health route of a healthy frontend."""
        return [finding.text for finding in self.cluster.status().findings] + self.catalog.notes()

    def _carry_out(self, now: Nanos, effect: Effect) -> None:
        """Do what this process has to do about an effect of the router."""
        if isinstance(effect, Dispatch):
            self.bookkeeping.add((self._dispatched, (effect,)))
        elif isinstance(effect, Closed):
            self.bookkeeping.add((self.history.closed, (effect,)))
            self.handoffs.made.pop(effect.id, None)
        elif isinstance(effect, Release):
            self.handoffs.release(effect)
        elif isinstance(effect, Abort):
            self.open_attempts.stop(effect)
            self.handoffs.aborted(effect)

    def _dispatched(self, effect: Dispatch) -> None:
        self.metrics.dispatched(effect)
        self.decisions.write(self.history.decided(effect.decision))

    async def sample_timeline(self) -> None:
        """Sample the timeline for the page, until cancelled."""
        await self.timeline_store.run(lambda: self.settings.slo)

    async def close(self) -> None:
        """Close threads, connections and spans."""
        self.prompts.close()
        await self.handoffs.close()
        await self.engines.close()
        await asyncio.to_thread(self.tracer.close)


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


def service_of(request: web.Request) -> Service:
    """Return the service that a route belongs to."""
    return request.app[SERVICE]


def id_factory(rng: random.Random) -> Callable[[], str]:
    """Return a maker of request ids: unique, not secret, and without a system call each."""
    return lambda: f"req-{rng.getrandbits(96):024x}"
