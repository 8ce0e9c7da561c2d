"""A frontend on loopback with the real router behind it and scripted engines before it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from penstock.adapters.engines.http.engine_call import EngineCalls
from penstock.adapters.engines.http.http1_client import Http1Client
from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.config.settings.cluster_settings import ClusterSettings, EngineStatsSettings, ModelSettings, PoolSettings
from penstock.config.settings.frontend_settings import FrontendSettings
from penstock.frontend.cluster_view import ClusterView
from penstock.frontend.http_server import HttpServer
from penstock.frontend.prompt.prompt_tokenizer import PromptTokenizer
from penstock.frontend.service import Service
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router.events import OperatorNote, Publish, ReplayWanted, WorkerJoined, WorkerLeft
from penstock.router.router import Router
from penstock.runtime.kv_events.kv_event_feeds import KvEventFeeds
from penstock.runtime.live_driver import LiveDriver
from penstock.runtime.loop_monitor import LoopMonitor
from penstock.runtime.node.engine_stats import EngineStats
from penstock.runtime.node.node_status import NodeStatus
from penstock.runtime.node.tickets import Tickets
from penstock.runtime.node.worker_observers import NOTHING

_key: Any = getattr(web, "RequestKey", web.AppKey)
ENGINE: Any = _key("engine", object)
Reply = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class Engine:
    """A scripted engine: speaks the dialect, remembers what it was asked, and does as ``reply`` says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""
        self.reply: Reply = answer_well
        self.lists: Reply = lists_nothing
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.resets = 0
        self.hung_up = asyncio.Event()
        """Set when a client closed its connection before the answer's end."""
        self.sent: bytes = b""
        """The bytes of the last stream's body."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_post("/{rest:.*}", self._serve)
        app.router.add_get("/v1/models", self._listed)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _reset(self, request: web.Request) -> web.StreamResponse:
        self.resets += 1
        return web.Response()

    async def _listed(self, request: web.Request) -> web.StreamResponse:
        request[ENGINE] = self
        return await self.lists(request, {})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.bodies.append(raw)
        self.paths.append(request.raw_path)
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        request[ENGINE] = self
        try:
            body = json.loads(raw)
        except ValueError:
            body = {}
        try:
            return await self.reply(request, body)
        except asyncio.CancelledError:
            self.hung_up.set()
            raise


async def lists_nothing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Have no list of models."""
    return web.Response(status=404)


async def answer_well(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer five tokens, streamed or not, as vLLM does."""
    return await answer(request, body, 5)


async def answer(request: web.Request, body: dict[str, Any], tokens: int, gap: float = 0.0) -> web.StreamResponse:
    usage = {"prompt_tokens": 7, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 3}}
    if not body.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": "x" * tokens}, "finish_reason": "stop"}
        return web.json_response({"id": "a", "choices": [choice], "usage": usage})
    engine: Engine = request[ENGINE]
    engine.sent = b""
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)

    async def send(data: bytes) -> None:
        engine.sent += data
        await response.write(data)

    await send(chunk({"role": "assistant", "content": ""}))
    for number in range(tokens):
        await send(chunk({"content": f"t{number} "}, finish="stop" if number == tokens - 1 else None))
        if gap:
            await asyncio.sleep(gap)
    if (body.get("stream_options") or {}).get("include_usage"):
        await send(b"data: " + json.dumps({"id": "a", "choices": [], "usage": usage}).encode() + b"\n\n")
    await send(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "a", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


class Stand:
    """The whole arrangement."""

    def __init__(
        self, service: Service, server: HttpServer, live: LiveDriver, router: Router, engines: list[Engine]
    ) -> None:
        self.service = service
        self.server = server
        self.live = live
        self.router = router
        self.engines = engines
        self.http = aiohttp.ClientSession(base_url=server.url)
        self.silent: set[str] = set()
        """Workers whose health checks are said to be unanswered."""
        self.kept_records: list[Any] = []
        self.kept_copies: list[Any] = []
        self.kept_decisions: list[Any] = []

    @property
    def records(self) -> list[Any]:
        """The records of the requests that have ended."""
        self.service.bookkeeping.enter()
        return self.kept_records

    @property
    def copies(self) -> list[Any]:
        """The records of shadows' copies that have ended."""
        self.service.bookkeeping.enter()
        return self.kept_copies

    @property
    def decisions(self) -> list[Any]:
        self.service.bookkeeping.enter()
        return self.kept_decisions

    async def chat(self, text: str = "hello", headers: dict[str, str] | None = None, **more: Any) -> Any:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers or {})

    def join(self, engine: Engine, /, **card: Any) -> None:
        defaults: dict[str, Any] = {"model": "m", "block_size": 4, "epoch": 1}
        self.live.post(
            "router",
            WorkerJoined(card=WorkerCard(**{"id": WorkerId(engine.name), "url": engine.url, **defaults, **card})),
        )

    def leave(self, name: str) -> None:
        self.live.post("router", WorkerLeft(worker=WorkerId(name), epoch=1, reason="test"))


class Keep:
    """A record sink that keeps."""

    lost = 0

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def write(self, record: Any) -> None:
        self.kept.append(record)


@asynccontextmanager
async def stand(
    count: int = 1,
    *,
    frontend: FrontendSettings | None = None,
    settings: ClusterSettings | None = None,
    tokenizer: PromptTokenizer | None = None,
    card: dict[str, Any] | None = None,
    offset: int = 0,
    calls: EngineCalls | None = None,
) -> AsyncIterator[Stand]:
    base = settings or ClusterSettings(
        models={"m": ModelSettings(tokenizer=None if tokenizer is None else "given", pools={"main": PoolSettings()})}
    )
    frontend = msgspec.structs.replace(frontend or base.frontend, port=0)
    base = msgspec.structs.replace(base, frontend=frontend)
    router = Router(base.router, name="router", seed=1)
    live = LiveDriver({"router": router})
    notes: dict[str, int] = {}
    live.on(OperatorNote, lambda now, sender, effect: notes.update({effect.kind: notes.get(effect.kind, 0) + 1}))
    live.on(ReplayWanted, lambda now, sender, effect: None)
    live.on(Publish, lambda now, sender, effect: None)
    tickets = Tickets(live)

    def status() -> NodeStatus:
        return NodeStatus(**msgspec.structs.asdict(router.status(live.now())))

    node: Any = SimpleNamespace(
        name="router",
        router=router,
        live=live,
        feeds=KvEventFeeds(live),
        loop_monitor=LoopMonitor(),
        noted=notes,
        peers=None,
        status=status,
        observers=SimpleNamespace(
            stats=EngineStats(EngineStatsSettings(interval=0.0), lambda workers: [NOTHING] * len(workers), "router")
        ),
        store=None,
        membership=SimpleNamespace(silent=set()),
        plane=None,
        message_sources=SimpleNamespace(
            store=None,
            plane=None,
            peers=None,
            membership=SimpleNamespace(newer=0),
            feeds=SimpleNamespace(handshakes_failed=0, left_out={}),
        ),
    )
    engines = [Engine(f"e{number}") for number in range(count)]
    for engine in engines:
        await engine.start()
    records, decisions, copies = Keep(), Keep(), Keep()
    service = Service(
        settings=base,
        cluster=ClusterView(node),
        tickets=tickets,
        engines=calls or Http1Client(connect_timeout=5.0),
        tokenizers=dict.fromkeys(base.models, tokenizer),
        metrics=FrontendMetrics("router"),
        records=records,
        copies=copies,
        decisions=decisions,
        run_offset=offset,
    )
    server = HttpServer(service)
    await server.start()
    found = Stand(service, server, live, router, engines)
    found.silent = node.membership.silent
    found.kept_records = records.kept
    found.kept_copies = copies.kept
    found.kept_decisions = decisions.kept
    for engine in engines:
        found.join(engine, **(card or {}))
    try:
        yield found
    finally:
        await found.http.close()
        await server.close()
        await service.close()
        for engine in engines:
            await engine.stop()
        live.close()


async def eventually(condition: Callable[[], Any], timeout: float = 5.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)
