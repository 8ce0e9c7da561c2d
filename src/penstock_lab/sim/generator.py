"""Generation in the simulated server: submits a completion or chat, writes its tokens, aborts if the client leaves."""

import asyncio
import itertools
from typing import Literal, Protocol

import msgspec
from aiohttp import web

from penstock.kernel.errors import ClientError
from penstock.kernel.values import JsonObject
from penstock_lab.engine.settings import SimSettings
from penstock_lab.sim import sim_tokens
from penstock_lab.sim.faults import Faults
from penstock_lab.sim.json_http import problem, read_json
from penstock_lab.sim.live_engine import LiveEngine
from penstock_lab.sim.request_reader import GenerationRequest, Kind, RequestReader
from penstock_lab.sim.response_writer import ResponseChoice, ResponseWriter, choices_of
from penstock_lab.sim.sim_adapters import SimAdapters
from penstock_lab.sim.sim_media import SimEmbeddings
from penstock_lab.sim.sim_text import SimText
from penstock_lab.sim.transfer.transfer_params import Role, TransferLeg, answer_of, leg_of, tier_hints_of

_json = msgspec.json.Encoder()


class GeneratingServer(Protocol):
    """The server whose requests these are: `penstock_lab.sim.sim_server.SimServer`."""

    settings: SimSettings
    model: str
    adapters: SimAdapters
    role: Role
    text: SimText
    faults: Faults
    live: LiveEngine
    embeddings: SimEmbeddings
    draining: bool


class Generator:
    """Serves completions and chats of one server."""

    def __init__(self, server: GeneratingServer) -> None:
        settings = server.settings
        usable = (settings.blocks - settings.watermark_blocks) * settings.block_size - settings.num_speculative_tokens
        self.limit = min(settings.max_model_len, usable)
        """Longest prompt and output together that this engine can hold, in tokens."""
        self.reader = RequestReader(server.text, server.model, server.adapters, self.limit)
        self._server = server
        self.idle = asyncio.Event()
        """Set while no request is being served."""
        self.idle.set()
        self._serving = 0
        self._numbers = itertools.count()

    async def serve(self, request: web.Request, kind: Kind | Literal["tokens"]) -> web.StreamResponse:
        """Answer one request."""
        self._serving += 1
        self.idle.clear()
        try:
            return await self._serve(request, kind)
        finally:
            self._serving -= 1
            if not self._serving:
                self.idle.set()

    async def _serve(self, request: web.Request, kind: Kind | Literal["tokens"]) -> web.StreamResponse:
        server = self._server
        if server.draining:
            return problem(503, "The server is shutting down.", None)
        refused = server.faults.refusal()
        if refused is not None:
            return problem(refused, "A fault switch refuses this request.", None)
        given = request.headers.get("x-request-id")
        number = next(self._numbers)
        id = given or f"{number:08x}"
        body = await read_json(request)
        if kind == "tokens":
            ask = self.reader.read("completion", sim_tokens.generating(body))
            ask.forced = sim_tokens.forced(body)
        else:
            ask = self.reader.read(kind, body)
        if ask.lora is not None:
            await server.adapters.use(ask.lora)
        leg = leg_of(body, server.role, given)
        # The engine's own id also has our number: clients may send one id twice.
        choices = choices_of(ask, f"{id}#{number}", server.settings, server.text)
        if leg is not None:
            _join_hand_off(leg, choices[0])
        if ask.media:
            encodes, held = server.role == "encode", server.embeddings.present(ask.media)
            for choice in choices:
                choice.submit = msgspec.structs.replace(choice.submit, encode=encodes, embedded=held)
        pin, keep, next_in = tier_hints_of(body)
        if pin or keep or next_in is not None:
            for choice in choices:
                choice.submit = msgspec.structs.replace(choice.submit, pin=pin, keep=keep, next_in=next_in)
        writer = ResponseWriter(ask, id, server.text)
        if kind == "tokens":
            writer = sim_tokens.TokenWriter(ask, id, server.text, body)
        news = asyncio.Event()
        interval = server.settings.stream_interval if ask.stream else 0
        headers = {"x-request-id": id}
        now = server.live.now()
        try:
            for choice in choices:
                if leg is not None and choice is choices[0]:
                    server.live.exchange.expect(choice.submit, leg.key, leg.source)
                choice.stream = server.live.submit(choice.submit, news, interval, now)
                if choice.stream.rejected is not None:
                    raise ClientError(f"The engine refuses the request: {choice.stream.rejected}.")
            if ask.stream:
                return await self._stream(request, ask, writer, choices, news, headers)
            while not all(choice.stream is not None and choice.stream.over for choice in choices):
                await news.wait()
                news.clear()
            if ask.media and server.role == "encode":
                server.embeddings.put(ask.media)
            answer = writer.whole(choices)
            params = self._retained_params(request, choices[0]) if body.get("kv_transfer_params") else None
            if params is not None:
                answer["kv_transfer_params"] = params
            return web.Response(body=_json.encode(answer), content_type="application/json", headers=headers)
        finally:
            for choice in choices:
                if choice.stream is not None:
                    server.live.abort(choice.stream)

    def _retained_params(self, request: web.Request, choice: ResponseChoice) -> JsonObject | None:
        """Return the transfer parameters of an answer whose KV is held; None where it is not."""
        done = choice.stream.finished if choice.stream is not None else None
        if done is None or not done.blocks_retained:
            return None
        exchange = self._server.live.exchange
        # When bound to every address, give the host that this client used.
        host = exchange.host if exchange.host not in ("0.0.0.0", "::") else request.url.host or exchange.host
        return answer_of(choice.submit.id, done.prompt, done.blocks_retained, exchange.name, host, exchange.port)

    async def _stream(
        self,
        request: web.Request,
        ask: GenerationRequest,
        writer: ResponseWriter,
        choices: list[ResponseChoice],
        news: asyncio.Event,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**headers, "cache-control": "no-cache"})
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        await response.prepare(request)
        breaks = self._server.faults.broken()
        left = len(choices)
        while left:
            await news.wait()
            news.clear()
            parts: list[bytes] = []
            for choice in choices:
                if choice.ended:
                    continue
                parts += [b"data: %b\n\n" % _json.encode(body) for body in writer.chunks(choice, choices)]
                left -= choice.ended
            if left == 0:
                if ask.stream_options.usage:
                    parts.append(b"data: %b\n\n" % _json.encode(writer.usage_chunk(choices)))
                if breaks is None:
                    parts.append(b"data: [DONE]\n\n")
            # One write per tick: tokens due together go in one packet.
            if parts:
                try:
                    await response.write(b"".join(parts))
                except ConnectionResetError:
                    return response  # the client has left: that is no error, and the rest of the request is aborted
            if breaks is not None and (left == 0 or any(choice.sent >= breaks for choice in choices)):
                if request.transport is not None:
                    request.transport.abort()
                return response
        await response.write_eof()
        return response


def _join_hand_off(leg: TransferLeg, choice: ResponseChoice) -> None:
    """Let an answer take part in a hand-off; further answers to one request run without it, as in vLLM."""
    if leg.source is None:
        choice.submit = msgspec.structs.replace(choice.submit, hold=True)
    else:
        remote = leg.source.tokens or len(choice.prompt)
        choice.submit = msgspec.structs.replace(choice.submit, remote=remote)
