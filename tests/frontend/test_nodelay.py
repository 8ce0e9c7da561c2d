"""No stall of 40 ms: TCP_NODELAY is on for clients' connections and for ours to engines."""

import socket

import aiohttp

from tests.frontend.stand import stand


async def test_nodelay_is_set_on_both_sides() -> None:
    async with stand() as scene, aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        async with http.post(f"{scene.server.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
        connections = [
            connection.transport.get_extra_info("socket")
            for runner in scene.server._runners
            if runner.server is not None
            for connection in runner.server.connections
            if connection.transport is not None
        ]
        upstream = [
            protocol.transport.get_extra_info("socket")
            for pooled in scene.service.engines._session.connector._conns.values()  # type: ignore[union-attr]
            for protocol, _ in pooled
            if protocol.transport is not None
        ]
        assert connections and upstream
        for found in (*connections, *upstream):
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
