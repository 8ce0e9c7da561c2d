"""The ext_proc protocol by a scripted client, without Envoy: which message comes when, and what is ignored."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import pytest

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.settings.frontend_settings import LimitSettings
from penstock_kubernetes.picker import ext_proc_messages as wire
from penstock_kubernetes.picker.ext_proc_listener import PROCESS, ExtProcListener
from penstock_kubernetes.picker.ext_proc_stream import DESTINATION
from penstock_kubernetes.picker.picker import Picker
from tests.frontend.stand import Stand, chunk, eventually, stand
from tests.kubernetes.picker.envoy import with_picker

grpc = pytest.importorskip("grpc")

CHAT = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 20}], "stream": True}).encode()
HEADERS_ANSWER, BODY_ANSWER, IMMEDIATE = wire.REQUEST_HEADERS - 1, wire.REQUEST_BODY - 1, 7
QUIET = 0.05
"""Seconds in which nothing may come."""


def field(number: int, value: bytes) -> bytes:
    return wire._put_field(number, value)


def headers(kind: int, values: dict[str, str], *, end: bool = False) -> bytes:
    pairs = b"".join(field(1, field(1, name.encode()) + field(3, text.encode())) for name, text in values.items())
    return field(kind, field(1, pairs) + (b"\x18\x01" if end else b""))


def modes(request: int, response: int) -> bytes:
    """Encode the `protocol_config` of a stream's first message."""
    return field(wire.PROTOCOL, bytes((0x08, request, 0x10, response)))


def body(kind: int, data: bytes, *, end: bool = False) -> bytes:
    return field(kind, field(1, data) + (b"\x10\x01" if end else b""))


class Answer(NamedTuple):
    """One `ProcessingResponse`: which of its kinds it is, and the bytes in it."""

    kind: int
    data: bytes

    @property
    def streamed(self) -> tuple[bytes, bool]:
        """The piece of a body that it passes on, and whether that is the end."""
        data = self.data
        for number in (1, 3, 3):  # response, body_mutation, streamed_response
            data = dict(wire._read_fields(data))[number]  # type: ignore[assignment]
        fields: dict[int, Any] = dict(wire._read_fields(data))
        return fields.get(1, b""), bool(fields.get(2))


class Call:
    """One stream of a gateway."""

    def __init__(self, found: Stand, listener: ExtProcListener, call: Any) -> None:
        self.found, self.listener, self.call = found, listener, call
        self._reading: asyncio.Future[Any] | None = None
        """What comes next."""

    async def send(self, *messages: bytes) -> None:
        for message in messages:
            await self.call.write(message)

    async def answers(self, count: int) -> list[Answer]:
        """Return the next messages, as many as named, and check that no other one follows."""
        got = []
        for _ in range(count):
            async with asyncio.timeout(5):
                message = await self._next()
            assert message is not grpc.aio.EOF, f"the picker closed its stream after {got}"
            self._reading = None
            number, data = next(wire._read_fields(message))
            assert isinstance(data, bytes)
            got.append(Answer(number, data))
        await self.nothing()
        return got

    async def nothing(self) -> None:
        """Check that the picker says nothing, and has not closed its stream."""
        done, _ = await asyncio.wait([self._next()], timeout=QUIET)
        assert not done, "it was to say nothing"

    def _next(self) -> "asyncio.Future[Any]":
        if self._reading is None:
            self._reading = asyncio.ensure_future(self.call.read())
        return self._reading


@asynccontextmanager
async def called(count: int = 1, settings: ClusterSettings | None = None) -> AsyncIterator[Call]:
    async with stand(count, settings=with_picker(settings)) as found:
        listener = ExtProcListener(Picker(found.service))
        await listener.start(0)
        async with grpc.aio.insecure_channel(listener.address) as channel:
            yield Call(found, listener, channel.stream_stream(PROCESS)())
        await listener.close()


async def test_the_headers_are_answered_when_the_body_is_whole_and_before_it() -> None:
    async with called() as call:
        await call.send(headers(wire.REQUEST_HEADERS, CHAT) + modes(wire.DUPLEX, wire.DUPLEX))
        await call.nothing()
        await call.send(body(wire.REQUEST_BODY, BODY[:40]), body(wire.REQUEST_BODY, BODY[40:]))
        await call.nothing()
        await call.send(body(wire.REQUEST_BODY, b"", end=True))
        first, second = await call.answers(2)
        assert first.kind == HEADERS_ANSWER and DESTINATION.encode() in first.data
        assert second.kind == BODY_ANSWER and second.streamed == (BODY, True)


async def test_a_body_in_pieces_goes_back_with_one_end_however_large_it_is() -> None:
    async with called() as call:
        text = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 150_000}]}).encode()
        await call.send(headers(wire.REQUEST_HEADERS, CHAT), body(wire.REQUEST_BODY, text, end=True))
        first, *rest = await call.answers(4)
        assert first.kind == HEADERS_ANSWER and {one.kind for one in rest} == {BODY_ANSWER}
        assert b"".join(one.streamed[0] for one in rest) == text
        assert [one.streamed[1] for one in rest] == [False, False, True]


async def test_a_second_end_of_stream_and_what_follows_it_is_ignored() -> None:
    async with called() as call:
        await call.send(headers(wire.REQUEST_HEADERS, CHAT), body(wire.REQUEST_BODY, BODY, end=True))
        await call.send(body(wire.REQUEST_BODY, b"", end=True), body(wire.REQUEST_BODY, b"more", end=True))
        first, second = await call.answers(2)
        assert (first.kind, second.streamed) == (HEADERS_ANSWER, (BODY, True))
        assert len(call.listener.picker.open) == 1, "it is one request"
        await call.send(body(wire.REQUEST_BODY, b"", end=True))
        await call.nothing()
        await answered(call)
        assert [record.outcome for record in call.found.records] == ["ok"]


async def answered(call: Call) -> None:
    """Show the picker an answer, and check that it passes each chunk on and stays until the gateway ends the stream."""
    await call.send(headers(wire.RESPONSE_HEADERS, {":status": "200", "content-type": "text/event-stream"}))
    assert [one.kind for one in await call.answers(1)] == [wire.RESPONSE_HEADERS - 1]
    pieces = [chunk({"content": "t0"}), chunk({"content": "t1"}, finish="stop"), b"data: [DONE]\n\n"]
    for piece in pieces:
        await call.send(body(wire.RESPONSE_BODY, piece))
        assert [one.streamed for one in await call.answers(1)] == [(piece, False)]
    await call.send(body(wire.RESPONSE_BODY, b"", end=True))
    assert [one.streamed for one in await call.answers(1)] == [(b"", True)]
    await call.nothing()


async def test_the_picker_never_closes_its_stream_before_the_gateway_does() -> None:
    async with called() as call:
        await call.send(headers(wire.REQUEST_HEADERS, CHAT), body(wire.REQUEST_BODY, BODY, end=True))
        await call.answers(2)
        await answered(call)
        assert not call.call.done(), "the answer has passed, and the stream is open"
        await call.call.done_writing()
        assert await call.call.code() == grpc.StatusCode.OK


async def test_a_body_that_trailers_end_has_no_end_of_its_own() -> None:
    async with called() as call:
        await call.send(headers(wire.REQUEST_HEADERS, CHAT), body(wire.REQUEST_BODY, BODY))
        await call.send(field(wire.REQUEST_TRAILERS, b""))
        first, second, third = await call.answers(3)
        assert first.kind == HEADERS_ANSWER and second.streamed == (BODY, False)
        assert third.kind == wire.REQUEST_TRAILERS - 1


async def test_a_buffered_body_is_asked_for_and_answered_in_one_message() -> None:
    async with called() as call:
        await call.send(headers(wire.REQUEST_HEADERS, CHAT) + modes(wire.BUFFERED, wire.NONE))
        [first] = await call.answers(1)
        assert first == Answer(HEADERS_ANSWER, b"")
        await call.send(body(wire.REQUEST_BODY, BODY, end=True))
        [second] = await call.answers(1)
        assert second.kind == BODY_ANSWER and DESTINATION.encode() in second.data


async def test_a_refusal_is_the_only_answer() -> None:
    async with called() as call:
        await call.send(headers(wire.REQUEST_HEADERS, CHAT), body(wire.REQUEST_BODY, b"{", end=True))
        [only] = await call.answers(1)
        assert only.kind == IMMEDIATE and b"invalid_json" in only.data
        await call.send(body(wire.REQUEST_BODY, b"", end=True))
        await call.nothing()


async def test_a_body_beyond_the_limit_is_refused_once_and_counted() -> None:
    base = ClusterSettings(models={"m": ModelSettings(tokenizer=None, pools={"main": PoolSettings()})})
    limited = msgspec.structs.replace(base.frontend, limits=LimitSettings(body_max=1000))
    async with called(settings=msgspec.structs.replace(base, frontend=limited)) as call:
        await call.send(headers(wire.REQUEST_HEADERS, CHAT), *[body(wire.REQUEST_BODY, b"x" * 600)] * 4)
        [only] = await call.answers(1)
        assert only.kind == IMMEDIATE and b"body_too_large" in only.data
        assert 'error_type="validation"' in call.found.service.metrics.render()


async def test_a_gateway_that_gives_up_while_its_request_waits_leaves_nothing_behind() -> None:
    base = ClusterSettings(models={"m": ModelSettings(tokenizer=None, pools={"main": PoolSettings()})})
    queue = msgspec.structs.replace(base.router.queue, start_wait=60.0)
    waits = msgspec.structs.replace(base, router=msgspec.structs.replace(base.router, queue=queue))
    async with called(0, settings=waits) as call:
        call.found.service.catalog.tokenizers["m"] = None
        await call.send(headers(wire.REQUEST_HEADERS, CHAT), body(wire.REQUEST_BODY, BODY, end=True))
        await eventually(lambda: call.listener.picker.open)
        await call.nothing()
        call.call.cancel()
        await eventually(lambda: not call.listener.picker.open)
        assert call.found.service.gate.inflight == 0
