"""`Service`: everything that the routes of a frontend process share, put together once per process."""

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from aiohttp import web

from penstock import extension
from penstock.adapters.engines.http.engine_access import OPEN, EngineAccess
from penstock.adapters.engines.http.engine_call import EngineCalls
from penstock.adapters.seams import Store
from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.adapters.telemetry.request_span import NoTracer, Tracer
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend.admin.request_history import RequestHistory
from penstock.frontend.admin.timeline_store import TimelineStore
from penstock.frontend.answer_filters import EngineFiles, KeyVerifier, RequestAudit, RequestCopies
from penstock.frontend.cluster_view import ClusterView
from penstock.frontend.counter_ledger import CounterLedger
from penstock.frontend.exchange.exchange_context import ExchangeContext
from penstock.frontend.exchange.open_attempts import OpenAttempts
from penstock.frontend.exchange.prefill_stages import PrefillStages
from penstock.frontend.exchange.prefix_warming import PrefixWarming
from penstock.frontend.http.api_keys import PeerGuard, is_loopback
from penstock.frontend.http.bookkeeping import Bookkeeping
from penstock.frontend.http.request_gate import RequestGate
from penstock.frontend.media.media_fetcher import MediaFetcher
from penstock.frontend.program_ledger import ProgramLedger
from penstock.frontend.prompt.model_catalog import ModelCatalog, ResolvedModel
from penstock.frontend.prompt.model_names import ModelNames, load_presets
from penstock.frontend.prompt.prompt_hashing import PromptHasher
from penstock.frontend.prompt.prompt_renderer import PromptRenderer
from penstock.frontend.prompt.prompt_tokenizer import PromptTokenizer
from penstock.frontend.prompt.request_body import JOB_PATHS, PATHS, TRANSLATED
from penstock.frontend.record_writer import DiscardingSink, RecordSink
from penstock.frontend.response_store import RESPONSE_BYTES_MAX, ResponseStore, SharedResponses
from penstock.frontend.tenants.budget_ledger import BudgetLedger
from penstock.frontend.tenants.tenant_desk import TenantDesk, token_name
from penstock.kernel.machine import Effect, Nanos, seconds
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import RequestId
from penstock.router.events import Abort, Closed, Dispatch, Release
from penstock.runtime.node.tickets import Tickets
from penstock.runtime.planning.counters_export import FrontendCounts

PROMPTS_WAITING_MAX = 1024
"""Most prompts that wait for a thread that tokenises; the next is refused with 503."""


@dataclass
class Service:
    """Everything that routes share; made once per process."""

    settings: ClusterSettings
    cluster: ClusterView
    tickets: Tickets
    engines: EngineCalls
    tokenizers: dict[str, PromptTokenizer | None]
    """Tokenizer of every configured model; None where its text is hashed."""
    metrics: FrontendMetrics
    tracer: Tracer = field(default_factory=NoTracer)
    records: RecordSink = field(default_factory=DiscardingSink)
    decisions: RecordSink = field(default_factory=DiscardingSink)
    shadow_records: RecordSink = field(default_factory=DiscardingSink)
    copies: RecordSink = field(default_factory=DiscardingSink)
    """Takes the records of shadows' copies, apart from those of clients' requests."""
    changes: RecordSink = field(default_factory=DiscardingSink)
    """What operators changed through this process (`penstock.runtime.records.change_log`)."""
    ledger: CounterLedger | None = None
    """Counts of ended processes."""
    run: str = ""
    run_offset: Nanos = 0
    """Nanoseconds from the start of the run to the router's time 0."""
    urls: dict[str, str] = field(default_factory=dict)
    """Where this frontend listens: ``endpoint`` and ``admin``."""
    new_id: Callable[[], str] = field(default_factory=lambda: id_factory(random.Random(secrets.randbits(128))))
    budget_store: Store | None = None
    """Keeps the tenants' budgets over restarts."""
    audit: RequestAudit | None = None
    """Log of prompts and answers, where there is one."""
    access: Callable[[str], EngineAccess] = lambda url: OPEN
    """What a server asks of who talks to it, by its URL."""
    secret: ClusterSecret | None = None
    """Secret of the cluster, by which the frontends recognise each other."""

    def may_pin(self, tenant: str | None) -> bool:
        """Return whether a client may choose the worker of its request; where that is not set, callers of this machine
        may that need no key.
        """
        if tenant is not None:
            return self.settings.tenants[tenant].pins
        frontend = self.settings.frontend
        unset = not self.gate.keys.needed and is_loopback(frontend.host)
        return unset if frontend.security.pins is None else frontend.security.pins

    def may_use(self, caller: str | None, name: str) -> bool:
        """Return whether a caller may ask for a model, an adapter or what stands behind a name."""
        return self.tenants.may_use(self._tenant(caller), name, self.catalog.names.behind(name))

    def check_model(self, caller: str | None, resolved: ResolvedModel) -> None:
        """Refuse a model that a caller may not use.

        Raises:
            ClientError: 403.
        """
        name = resolved.name or resolved.served
        self.tenants.check_model(self._tenant(caller), name, self.catalog.names.behind(name))

    def _tenant(self, caller: str | None) -> str | None:
        return None if caller is None else self.gate.tenants.get(caller)

    def __post_init__(self) -> None:
        frontend = self.settings.frontend
        self.started = time.monotonic()
        self.created = int(time.time() - seconds(self.cluster.now() + self.run_offset))
        """When the run began, in seconds of Unix: the same in each of its processes."""
        self.bookkeeping = Bookkeeping()
        note = self.bookkeeping.add
        self.gate = RequestGate(
            frontend,
            self.metrics,
            self.bookkeeping,
            PeerGuard(self.secret),
            tenants=self.settings.tenants,
            routes=frozenset((*PATHS.values(), *TRANSLATED, *JOB_PATHS, *frontend.proxied_routes)),
            new_id=self.new_id,
        )
        tenants = self.settings.tenants
        self.budgets = BudgetLedger(self.budget_store, self.cluster.name, tenants)
        self.tenants = TenantDesk(
            tenants, self.budgets, lambda: 1 + len(self.cluster.peers()), self.metrics.tenant_refusals.add
        )
        self.verifier = _verifier(self.settings)
        if self.verifier is not None:
            self.gate.accept(self.verifier.name, {token_name(name): name for name in tenants})
        self.catalog = ModelCatalog(
            self.cluster,
            self.tokenizers,
            ModelNames(self.settings),
            load_presets(self.settings),
            renders={name: model.render for name, model in self.settings.models.items() if model.render is not None},
            caching=frontend.tokenize.cache_bytes > 0,
            may_use=self.may_use,
        )
        self.renderer = PromptRenderer(self.engines, lambda took: note((self.metrics.stage, ("render", took))))
        self.prompts = PromptHasher(
            frontend.tokenize.threads,
            PROMPTS_WAITING_MAX,
            lambda stage, took: note((self.metrics.stage, (stage, took))),
        )
        self.media = MediaFetcher(frontend.media)
        self.history = RequestHistory(offset=self.run_offset, share=lambda: self.settings.router.decisions)
        self.timeline_store = TimelineStore(self.cluster.now, self.cluster.status, self.run_offset)
        self.counts = FrontendCounts(time.monotonic)
        """Request counts for planners."""
        shared = SharedResponses(Path(self.run), RESPONSE_BYTES_MAX) if self.run else None
        self.responses = ResponseStore(shared=shared)
        self.programs = ProgramLedger()
        self.jobs: EngineFiles | None = None
        """Which engine has which job or file; set by the routes of jobs."""
        self.shadows: RequestCopies | None = None
        if extension.offers("request end", "shadows"):
            make = extension.entry("request end", "shadows")
            self.shadows = make(self.metrics, self.shadow_records, self.catalog.ready)
        self.named: Counter[tuple[str, str]] = Counter()
        """Requests by a name that is no model's own, and by the model behind it."""
        self.left_out: dict[str, str] = {}
        """Routes of extensions that are not served any more, each with the reason."""
        attempts = OpenAttempts()
        self.exchanges = ExchangeContext(
            engines=self.engines,
            cluster=self.cluster,
            catalog=self.catalog,
            metrics=self.metrics,
            attempts=attempts,
            stages=PrefillStages(self.engines, self.cluster, attempts, lambda: self.settings),
            warming=PrefixWarming(self.engines, self.cluster, self._warmed),
            settings=self.settings,
            renderer=self.renderer,
            bookkeeping=self.bookkeeping,
            first_token=self.timeline_store.first,
        )
        self.tickets.listen(self._carry_out)

    def free_id(self, requested: str) -> RequestId:
        """Return the id under which a request is routed: a new one where an open request has the one it asks for."""
        return RequestId(self.new_id() if requested in self.tickets.open else requested)

    def owner(self, caller: str) -> str:
        """Return whose a job or a file of a caller is: its key's; all are one owner's where no keys are set."""
        return caller if self.gate.keys.needed else ""

    def notes(self) -> list[str]:
        """Return notes for the health route of a healthy frontend."""
        return (
            [finding.text for finding in self.cluster.status().findings]
            + self.catalog.notes()
            + self.renderer.notes()
            + [f"{what} is left out: {why}" for what, why in self.extension_faults()]
        )

    def extension_faults(self) -> list[tuple[str, str]]:
        """Return what of extensions is left out, each with the reason."""
        faults = [(f"the extension {name}", why) for name, why in extension.installed().faults.items()]
        return [*faults, *self.left_out.items()]

    def _carry_out(self, now: Nanos, effect: Effect) -> None:
        """Do what this process has to do about an effect of the router."""
        if isinstance(effect, Dispatch):
            self.bookkeeping.add((self._dispatched, (effect,)))
        elif isinstance(effect, Closed):
            self.bookkeeping.add((self.history.closed, (effect,)))
            self.exchanges.stages.made.pop(effect.id, None)
        elif isinstance(effect, Release):
            self.exchanges.stages.release(effect)
        elif isinstance(effect, Abort):
            self.exchanges.attempts.stop(effect)
            self.exchanges.stages.aborted(effect)

    def _dispatched(self, effect: Dispatch) -> None:
        self.metrics.dispatched(effect)
        self.decisions.write(self.history.decided(effect.decision))

    def _warmed(self, request: str, model: str, result: str, text: str) -> None:
        """Enter what came of computing the next turn's beginning: after the request's own end."""
        self.bookkeeping.add((self.metrics.prefix_warmings.add, (model, result)))
        self.bookkeeping.add((partial(self.history.add, next_turn=text), (request,)))

    async def close(self) -> None:
        """Close threads, connections and spans."""
        if self.shadows is not None:
            await self.shadows.close()
        if self.verifier is not None:
            await self.verifier.close()
        await self.responses.close()
        if self.jobs is not None:
            await self.jobs.close()
        self.prompts.close()
        await self.exchanges.warming.close()
        await self.exchanges.stages.close()
        await self.media.close()
        await self.engines.close()
        await asyncio.to_thread(self.tracer.close)


def _verifier(settings: ClusterSettings) -> KeyVerifier | None:
    """Return what checks an issuer's tokens, where they are accepted.

    Raises:
        ConfigError: the package for it is missing.
    """
    given = settings.frontend.security.jwt
    if given.issuer is None:
        return None
    install = "pip install 'penstock[jwt]'"
    verifier: KeyVerifier = extension.entry("key verifier", "jwt", "frontend.security.jwt", install=install)(settings)
    return verifier


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


def service_of(request: web.Request) -> Service:
    """Return the service that a route belongs to."""
    return request.app[SERVICE]


def id_factory(rng: random.Random) -> Callable[[], str]:
    """Return a maker of request ids: unique, not secret, and without a system call each."""
    return lambda: f"req-{rng.getrandbits(96):024x}"
