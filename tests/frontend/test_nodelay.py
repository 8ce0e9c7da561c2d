"""No stall of 40 ms: TCP_NODELAY is on for clients' connections and for ours to engines."""

import socket

import aiohttp

from tests.frontend.stand import stand


async def test_nodelay_is_set_on_both_sides() -> None:
    async with stand() as scene, aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        async with http.post(f"{scene.server.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
        assert scene.server._listener is not None
        transports = [connection.transport for connection in scene.server._listener.connections]
        origins = scene.service.engines._origins.values()  # type: ignore[attr-defined]
        transports_up = [connection.transport for origin in origins for connection in origin._made]
        connections = [transport.get_extra_info("socket") for transport in transports]
        upstream = [transport.get_extra_info("socket") for transport in transports_up]
        assert connections and upstream
        for found in (*connections, *upstream):
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
