"""HTTP server of the simulated engine: vLLM's routes on loopback, in a process of its own or inside a test.

`start` gives a running server, with ``url`` and ``await stop()``. A client that goes away aborts its request.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypedDict, Unpack

import msgspec
from aiohttp import web

from penstock import __version__
from penstock.adapters.engines.kv_events.kv_publisher import BUFFER_STEPS, KvPublisher
from penstock.kernel.errors import ClientError
from penstock.kernel.hashing import SCHEME
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import JsonObject, KvEvent
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.kv_capacity import with_blocks
from penstock_lab.engine.settings import SimSettings, checked
from penstock_lab.sim import sim_tokens
from penstock_lab.sim.faults import Faults, FaultyPublisher
from penstock_lab.sim.generator import Generator
from penstock_lab.sim.json_http import problem, read_json
from penstock_lab.sim.live_engine import LiveEngine
from penstock_lab.sim.request_reader import Kind, options_of
from penstock_lab.sim.sim_adapters import SimAdapters
from penstock_lab.sim.sim_media import SimEmbeddings
from penstock_lab.sim.sim_metrics import render
from penstock_lab.sim.sim_text import SimText
from penstock_lab.sim.sim_tokenizer import DATA_DIR
from penstock_lab.sim.transfer.transfer_params import Role
from penstock_lab.simulate.tiers.tier_plan import TierPlan

DIMENSIONS = 64
BODY_MAX = 64 * 1024 * 1024
SPOILT_BUFFER_STEPS = 1_000_000
"""Batches of KV events kept where faults may be switched on: a test then compares an index with all of them."""
_NO_TIERS = TierPlan()
_json = msgspec.json.Encoder()


class ServerOptions(TypedDict, total=False):
    """What a server is beside its engine's settings; `SimServer` has the defaults."""

    model: str
    host: str
    adapters: tuple[str, ...]
    tokenizer: Path
    chat_template: Path | None
    topic: str
    kv_events: bool
    role: Role
    secret: ClusterSecret | None
    cache: TierPlan
    max_cpu_loras: int | None
    embeddings: Path | None
    scale_out: bool


class RunningServer:
    """A simulated engine that takes requests at ``url``."""

    def __init__(self, url: str, runner: web.AppRunner, server: "SimServer") -> None:
        self.url = url
        self.server = server
        self._runner = runner

    @property
    def live(self) -> LiveEngine:
        """The engine behind it."""
        return self.server.live

    async def stop(self, grace: float = 0.0) -> None:
        """Refuse new requests, give the running ones ``grace`` seconds, then close every connection."""
        self.server.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.server.generator.idle.wait(), grace)
        await self._runner.cleanup()


async def start(
    settings: SimSettings, *, port: int = 0, faults: bool = False, **options: Unpack[ServerOptions]
) -> RunningServer:
    """Start a simulated engine in this event loop.

    Args:
        port: 0 lets the system choose.
        faults: whether the route /fault exists.
    Raises:
        ConfigError: the settings contradict each other, or the timing table can't be read.
    """
    server = SimServer(checked(settings), **options)
    app = server.application(faults)
    # aiohttp sets TCP_NODELAY on every connection; a cancelled handler shows that the client went away.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, server.host, port, backlog=1024)
    try:
        await site.start()
    except BaseException:
        await runner.cleanup()
        raise
    exchange = server.live.exchange
    exchange.host, exchange.port = server.host, runner.addresses[0][1]
    return RunningServer(f"http://{exchange.name}", runner, server)


class SimServer:
    """The routes of one simulated engine.

    Args:
        adapters: LoRA names that it serves beside the model.
        topic: topic of its KV events.
        role: which leg a request with bootstrap fields is; ``kv_transfer_params`` state it themselves.
        secret: of the cluster; subscribers of its KV events then need it.
        host: address on which it listens, with its KV events.
        cache: simulated tiers below its memory.
        max_cpu_loras: LoRA adapters that it holds in memory; None takes none beside ``adapters``.
        embeddings: folder that it shares with other engines for encoded media.
        scale_out: whether it has the routes that render, generate and derender.
    """

    def __init__(
        self,
        settings: SimSettings,
        *,
        model: str = "sim",
        adapters: tuple[str, ...] = (),
        tokenizer: Path = DATA_DIR,
        chat_template: Path | None = None,
        topic: str = "",
        kv_events: bool = True,
        role: Role = "aggregated",
        secret: ClusterSecret | None = None,
        host: str = "127.0.0.1",
        cache: TierPlan = _NO_TIERS,
        max_cpu_loras: int | None = None,
        embeddings: Path | None = None,
        scale_out: bool = False,
    ) -> None:
        self._cache = cache
        self.embeddings = SimEmbeddings(embeddings)
        self.table = load_timing(settings.timing)
        settings = self.settings = with_blocks(settings, self.table)
        self.model = model
        self.adapters = SimAdapters(adapters, max_cpu_loras, settings.adapter_load)
        self.role = role
        self.faults = Faults(settings.seed)
        self.draining = False
        self.asleep = False
        self.text = SimText(tokenizer, chat_template)
        self._topic = topic
        self._kv_events = kv_events
        self._scale_out = scale_out
        self._secret = secret
        self.host = host
        self._buffer_steps = BUFFER_STEPS
        self._began = int(time.time())
        self._benchmark: bytes | None = None
        self.publisher: KvPublisher | None = None
        self.live: LiveEngine
        self.generator: Generator

    def application(self, faults: bool) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=BODY_MAX, middlewares=[self._guard])
        app.cleanup_ctx.append(self._life)
        add = app.router
        add.add_post("/v1/completions", self._completions)
        add.add_post("/v1/chat/completions", self._chat)
        add.add_post("/v1/embeddings", self._embeddings)
        add.add_get("/v1/models", self._models)
        add.add_get("/health", self._health)
        add.add_route("*", "/ping", self._health)
        add.add_get("/version", self._version)
        add.add_get("/load", self._load)
        add.add_get("/metrics", self._metrics)
        add.add_post("/tokenize", self._tokenize)
        add.add_post("/detokenize", self._detokenize)
        add.add_get("/kv_event_sources", self._sources)
        add.add_post("/reset_prefix_cache", self._reset)
        add.add_post("/sleep", self._sleep)
        add.add_post("/wake_up", self._wake)
        add.add_get("/is_sleeping", self._is_sleeping)
        add.add_get("/get_perf_metrics", self._perf)
        add.add_get("/step_stats", self._steps)
        add.add_post("/kv_pull", self._kv_pull)
        add.add_post("/kv_release", self._kv_release)
        if self._scale_out:
            add.add_post("/v1/{kind:chat/completions|completions}/render", self._render)
            add.add_post("/v1/{kind:chat/completions|completions}/derender", self._derender)
            add.add_post("/inference/v1/generate", self._generate)
        if self.adapters.slots is not None:
            add.add_post("/v1/load_lora_adapter", self._load_adapter)
            add.add_post("/v1/unload_lora_adapter", self._unload_adapter)
        if faults:
            add.add_post("/fault", self._fault)
            self._buffer_steps = SPOILT_BUFFER_STEPS
        return app

    async def _life(self, app: web.Application) -> AsyncIterator[None]:
        replay: asyncio.Task[None] | None = None
        if self._kv_events and self.settings.enable_prefix_caching:
            self.publisher = FaultyPublisher(
                self.faults,
                host=self.host,
                topic=self._topic,
                buffer_steps=self._buffer_steps,
                secret=self._secret,
            )
            replay = asyncio.create_task(self.publisher.serve_replay())
        self.live = LiveEngine(
            self.settings,
            words=self.text.words,
            end=self.text.end,
            turn=self.text.turn,
            table=self.table,
            cache=self._cache,
            publish=self._publish if self.publisher is not None else None,
        )
        self.generator = Generator(self)
        yield
        await self.live.close()
        if replay is not None:
            replay.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await replay
        if self.publisher is not None:
            self.publisher.close()

    def _publish(self, events: list[KvEvent]) -> None:
        assert self.publisher is not None
        self.publisher.publish(time.time(), events)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            answer: web.StreamResponse = await handler(request)
            return answer
        except ClientError as error:
            return problem(error.status, error.message, error.param)
        except web.HTTPException as error:
            return problem(error.status, error.reason, None)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self._awake()
        return await self.generator.serve(request, "completion")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self._awake()
        return await self.generator.serve(request, "chat")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self._awake()
        return await self.generator.serve(request, "tokens")

    async def _render(self, request: web.Request) -> web.Response:
        body, kind = await read_json(request), _route_kind(request)
        requests = sim_tokens.rendered(self.generator.reader, kind, body, request.headers.get("x-request-id", "r"))
        return _answer(requests[0] if kind == "chat" else requests)

    async def _derender(self, request: web.Request) -> web.Response:
        return _answer(sim_tokens.derendered(self.text, _route_kind(request), await read_json(request), self.model))

    async def _kv_pull(self, request: web.Request) -> web.StreamResponse:
        return await self.live.exchange.serve(request, await read_json(request))

    async def _kv_release(self, request: web.Request) -> web.Response:
        self.live.exchange.give_up(await read_json(request))
        return web.Response()

    # --- description and health -------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        # As vLLM, it stays healthy while it drains: the operator has to take it out of service before stopping it.
        return web.Response(status=503 if self.faults.unhealthy else 200)

    async def _version(self, request: web.Request) -> web.Response:
        return _answer({"version": f"penstock-sim-{__version__}"})

    async def _load(self, request: web.Request) -> web.Response:
        return _answer({"server_load": self.live.load})

    async def _models(self, request: web.Request) -> web.Response:
        entries: list[JsonObject] = [
            {
                "id": name,
                "object": "model",
                "created": self._began,
                "owned_by": "penstock",
                "root": self.model if name == self.model else self.adapters.path(name),
                "parent": None if name == self.model else self.model,
                "max_model_len": self.generator.limit if name == self.model else None,
                "permission": [],
            }
            for name in (self.model, *self.adapters)
        ]
        return _answer({"object": "list", "data": entries})

    async def _metrics(self, request: web.Request) -> web.Response:
        live = self.live
        page = render(live.metrics, live.engine, self.settings, self.model, live.now())
        if self.adapters.slots is not None:
            page += f'vllm:lora_requests_info{{max_lora="{self.adapters.slots}"}} 1\n'
        return web.Response(text=page, content_type="text/plain")

    async def _sources(self, request: web.Request) -> web.Response:
        if self.publisher is None:
            return _answer({})
        source = {"endpoint": self.publisher.endpoint, "replay_endpoint": self.publisher.replay_endpoint}
        # The scheme shows that the block hashes are the router's own: a reader that knows it needs no translation.
        description = {**source, "topic": self._topic, "hash_scheme": SCHEME, "security": self.publisher.security}
        return _answer({"0": description})

    async def _steps(self, request: web.Request) -> web.Response:
        return _answer(self.live.step_stats(request.query.get("reader", "")))

    async def _perf(self, request: web.Request) -> web.Response:
        from penstock_lab.engine.self_benchmark import perf_metrics

        if self._benchmark is None:
            metrics = await asyncio.to_thread(perf_metrics, self.settings, self.table)
            self._benchmark = _json.encode(metrics)
        return web.Response(body=self._benchmark, content_type="application/json")

    # --- other routes -----------------------------------------------------------------------------------------------

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        reader = self.generator.reader
        reader.model(body)
        if "messages" in body:
            (tokens,) = reader.chat_prompt(options_of(body))
        elif isinstance(body.get("prompt"), str):
            tokens = self.text.encode(body["prompt"])
        else:
            raise ClientError("Give prompt (a text) or messages.", param="prompt")
        strings = self.text.pieces(tokens) if body.get("return_token_strs") else None
        counts = {"count": len(tokens), "max_model_len": self.generator.limit}
        return _answer({**counts, "tokens": tokens, "token_strs": strings})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise ClientError("tokens must be a list of token ids.", param="tokens")
        return _answer({"prompt": self.text.decode(tokens)})

    async def _embeddings(self, request: web.Request) -> web.Response:
        from penstock_lab.sim.embeddings import embed

        body = await read_json(request)
        name = self.generator.reader.model(body)
        vectors, tokens = embed(body, self.text, DIMENSIONS)
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return _answer({"object": "list", "data": data, "model": name, "usage": usage})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        if self.draining:
            return problem(503, "The server is shutting down.", None)
        refused = self.faults.refusal()
        if refused is not None:
            return problem(refused, "A fault switch refuses this request.", None)
        name = await self.adapters.load(await read_json(request), self.model)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = self.adapters.unload(await read_json(request))
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _reset(self, request: web.Request) -> web.Response:
        self.live.clear()
        return web.Response()

    async def _sleep(self, request: web.Request) -> web.Response:
        """Sleep, as vLLM does at level 1: the KV cache is lost, and requests that run are none of an idle engine."""
        if self.faults.no_sleep:
            return web.Response(status=500, text="no memory to copy the weights to")
        await asyncio.sleep(self.settings.wake_time)
        self.live.clear()
        self.asleep = True
        return _answer({"status": "sleeping", "level": 1})

    async def _wake(self, request: web.Request) -> web.Response:
        if self.faults.no_wake:
            return web.Response(status=500, text="CUDA out of memory")
        await asyncio.sleep(self.settings.wake_time)
        self.asleep = False
        return _answer({"status": "awake", "tags": None})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return _answer({"is_sleeping": self.asleep})

    def _awake(self) -> None:
        if self.asleep:
            raise web.HTTPServiceUnavailable(reason="The engine sleeps: POST /wake_up first.")

    async def _fault(self, request: web.Request) -> web.Response:
        self.faults.switch(await read_json(request))
        if self.faults.die:
            os._exit(137)
        if self.faults.stall:
            self.live.stall(self.faults.stall)
            self.faults.stall = 0.0
        return _answer({"ok": True})


def _route_kind(request: web.Request) -> Kind:
    return "chat" if request.match_info["kind"].startswith("chat") else "completion"


def _answer(value: Any) -> web.Response:
    return web.Response(body=_json.encode(value), content_type="application/json")
