"""A frontend hands over: its successor accepts, and it answers what still comes over its own connections."""

import asyncio
import http.client
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.adapters.listen_address import bind
from penstock.frontend import http_server as servers
from penstock.frontend.http_server import HttpServer
from tests.frontend.stand import Stand, answer, eventually, stand


@pytest.fixture
async def handed(monkeypatch: Any) -> AsyncIterator[tuple[Stand, HttpServer, list[socket.socket]]]:
    """A stand beside a second server on sockets that somebody else holds as well, as a supervisor does."""
    monkeypatch.setattr(servers, "LULL", 0.3)
    async with stand() as s:
        held = bind("127.0.0.1", 0)
        server = HttpServer(s.service, [one.dup() for one in held])
        await server.start()
        yield s, server, held
        await server.close()
        for one in held:
            one.close()


def ask(connection: http.client.HTTPConnection, path: str = "/v1/chat/completions") -> tuple[int, str | None]:
    """Ask over a connection; return the status and what the answer says of the connection."""
    body = '{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
    connection.request("POST", path, body, {"content-type": "application/json"})
    found = connection.getresponse()
    found.read()
    return found.status, found.getheader("connection")


def connect(server: HttpServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)


async def test_what_comes_over_an_open_connection_is_answered_and_told_to_go(handed):
    s, server, _ = handed
    connection = connect(server)
    status, said = await asyncio.to_thread(ask, connection)
    assert status == 200 and said != "close"
    retiring = asyncio.create_task(server.retire(30))
    await eventually(lambda: s.service.gate.retiring)
    status, said = await asyncio.to_thread(ask, connection)
    assert (status, said) == (200, "close")
    assert await retiring
    connection.close()


async def test_a_successor_on_the_same_socket_gets_the_new_connections(handed):
    s, server, held = handed
    successor = HttpServer(s.service, [one.dup() for one in held])
    waiting = connect(server)
    await asyncio.to_thread(waiting.connect)
    await server._stop_accepting()
    late = connect(server)
    await asyncio.to_thread(late.connect)  # in the queue of the socket: nobody accepts at this moment
    await successor.start()
    assert (await asyncio.to_thread(ask, late))[0] == 200
    await successor.close()
    waiting.close()
    late.close()


async def test_who_waits_to_be_accepted_is_served_by_the_last_who_holds_the_socket(handed):
    _, server, held = handed
    for one in held:  # as when one of several frontends is drained: the supervisor lets go of its socket
        one.close()
    held.clear()
    waiting = [connect(server) for _ in range(5)]
    for connection in waiting:
        connection.connect()  # at once: the loop, which would accept them, has no turn
    retiring = asyncio.create_task(server.retire(30))
    answers = await asyncio.gather(*(asyncio.to_thread(ask, connection) for connection in waiting))
    assert answers == [(200, "close")] * 5
    assert await retiring


async def test_a_stream_that_runs_is_finished(handed):
    s, server, _ = handed
    s.engines[0].reply = lambda request, body: answer(request, body, 8, gap=0.05)
    body = {"model": "m", "messages": [{"role": "user", "content": "slowly"}], "stream": True}
    async with s.http.post(server.url + "/v1/chat/completions", json=body) as response:
        retiring = asyncio.create_task(server.retire(30))
        text = await response.text()
        assert text.rstrip().endswith("[DONE]")
    assert await retiring


async def test_a_connection_over_which_nothing_comes_is_closed_after_a_lull(handed):
    _, server, _ = handed
    connection = connect(server)
    await asyncio.to_thread(ask, connection)
    async with asyncio.timeout(20):
        assert await server.retire(10)
    assert server._open == 0 or await asyncio.to_thread(gone, connection)


def gone(connection: http.client.HTTPConnection) -> bool:
    assert connection.sock is not None
    return connection.sock.recv(1) == b""
