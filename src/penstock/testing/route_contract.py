"""Contract suite of an extension's routes: what a frontend relies on, whichever routes they are.

A test module imports all names, with pytest-asyncio in mode auto, and has a fixture ``route_name``: the name of the
entry at the seam ``route``, whose extension is installed (`penstock.testing.installed_extensions`):

    from penstock.testing.route_contract import *
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from penstock.adapters.engines.http.http1_client import Http1Client
from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.config.reading.load import load
from penstock.frontend.app import parts_of, routed_handlers
from penstock.frontend.cluster_view import ClusterView
from penstock.frontend.extension_routes import FrontendRoute
from penstock.frontend.http_server import HttpServer
from penstock.frontend.service import Service
from penstock.router.events import WorkerJoined
from penstock.runtime.node.router_node import open_node
from penstock.testing.router_world import card

KEYS = {"PENSTOCK_FRONTEND__SECURITY__API_KEYS": "client", "PENSTOCK_FRONTEND__SECURITY__ADMIN_KEYS": "admin"}


@asynccontextmanager
async def frontend_serving(folder: Path) -> AsyncIterator[tuple[Service, aiohttp.ClientSession]]:
    """Serve all routes of a frontend with two workers, which nobody answers for, and a client of it without a key.

    Args:
        folder: for its run.
    """
    settings = load(None, ["frontend.port=0", "models={m: {pools: {main: {}}}}"], KEYS).settings
    node = await open_node(settings, folder, 0)
    service = Service(
        settings=settings,
        cluster=ClusterView(node),
        tickets=node.tickets,
        engines=Http1Client(connect_timeout=1.0),
        tokenizers={"m": None},
        metrics=FrontendMetrics(node.name),
    )
    server = HttpServer(service)
    for name in ("w0", "w1"):
        node.live.post("router", WorkerJoined(card=card(name, labels={"rack": name})))
    try:
        await server.start()
        async with aiohttp.ClientSession(base_url=server.url) as client:
            yield service, client
    finally:
        await server.close()
        await service.close()
        await node.close()


def routes_of(service: Service, name: str) -> list[FrontendRoute]:
    """Return the plain routes that an entry adds."""
    from penstock import extension

    parts = parts_of(service)
    return list(extension.entry("route", name)(service, lambda: routed_handlers(service, parts)).routes)


def path_of(route: FrontendRoute) -> str:
    """Return a path that the route takes."""
    return re.sub(r"\{[^}]*\}", "rack", route.path)


async def test_every_route_asks_for_the_key_that_it_names(route_name: str, tmp_path: Path) -> None:
    async with frontend_serving(tmp_path) as (service, client):
        routes = routes_of(service, route_name)
        assert routes, "the entry adds no route"
        for route in routes:
            for key in (None, "wrong", "client", "admin"):
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                answer = await client.request(route.method, path_of(route), headers=headers)
                let_in = route.access == "open" or key == {"key": "client", "admin": "admin"}[route.access]
                refused = answer.status in (401, 403)
                if let_in or key in (None, "wrong"):
                    assert refused != let_in, f"{route.method} {route.path} answers {answer.status} to the key {key}"


async def test_every_get_answers_and_none_is_left_out(route_name: str, tmp_path: Path) -> None:
    async with frontend_serving(tmp_path) as (service, client):
        for route in routes_of(service, route_name):
            key = "admin" if route.access == "admin" else "client"
            headers = {"authorization": f"Bearer {key}"}
            if route.method == "GET":
                answers = [await client.get(path_of(route), headers=headers) for _ in range(20)]
                assert {answer.status < 500 for answer in answers} == {True}, f"{route.path} fails"
                assert "x-request-id" in answers[0].headers
        assert not service.left_out


async def test_the_server_s_own_routes_are_as_without_it(route_name: str, tmp_path: Path) -> None:
    async with frontend_serving(tmp_path) as (_, client):
        health = await client.get("/health")
        assert health.status == 200 and (await health.json())["status"] == "ok"
        models = await client.get("/v1/models", headers={"authorization": "Bearer client"})
        assert [each["id"] for each in (await models.json())["data"]] == ["m"]
