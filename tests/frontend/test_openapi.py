"""Does the description of our API say what the routes are, and do their answers have the shapes that it names?"""

import re
from typing import Any

import pytest

from penstock.config.settings.frontend_settings import PROXIED_ROUTES, FrontendSettings, SecuritySettings
from penstock.frontend.app import admin_app, public_app, routed_handlers
from penstock.frontend.openapi.openapi import PROBLEMS, openapi
from penstock.frontend.prompt.routing_hints import EXTRA_FIELDS
from penstock.frontend.service import Service
from tests.frontend.stand import stand

ALSO = {("GET", "/v1/models/{model}/ready")}
"""What one real route serves beside its own path: ids of models may have slashes."""


def described(frontend: FrontendSettings) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, item in openapi(frontend)["paths"].items() for method in item}


def routes(app: Any) -> set[tuple[str, str]]:
    found = set()
    for route in app.router.routes():
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical if route.resource else "")
        if route.method not in ("HEAD", "*"):  # the latter refuse methods and paths that nothing takes
            found.add((route.method, path))
    return found


def engine_routes(service: Service) -> set[tuple[str, str]]:
    """What the hand-written server takes before aiohttp's sees it."""
    return {("POST", path) for path in routed_handlers(service)}


@pytest.mark.parametrize("frontend", [FrontendSettings(), FrontendSettings(proxied_routes=("/v1/rerank",))])
async def test_every_route_is_described_and_every_description_is_a_route(frontend):
    async with stand(frontend=frontend) as s:
        everything = public_app(s.service, with_admin=True)
        assert routes(everything) | engine_routes(s.service) | ALSO == described(frontend)
        apart = routes(public_app(s.service, with_admin=False)) | routes(admin_app(s.service))
        assert apart | engine_routes(s.service) | ALSO == described(frontend)


async def test_a_refused_method_names_the_described_ones():
    async with stand() as s:
        by_path: dict[str, set[str]] = {}
        for method, path in described(FrontendSettings()):
            by_path.setdefault(path, set()).add(method)
        for path, methods in by_path.items():
            answer = await s.http.request("PROPFIND", re.sub(r"\{\w+\}", "x", path))
            assert answer.status == 405, path
            assert set(answer.headers["allow"].split(",")) - {"HEAD"} == methods, path


def test_references_lead_somewhere_and_nothing_is_left_over():
    found = openapi(FrontendSettings())
    used = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                parts = value["$ref"].removeprefix("#/").split("/")
                here: Any = found
                for part in parts:
                    assert part in here, value["$ref"]
                    here = here[part]
                used.add(parts[-1])
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(found)
    names = {*found["components"]["schemas"], *map(str, PROBLEMS)}
    assert names - used == set()
    ids = [operation["operationId"] for item in found["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids)) == len(described(FrontendSettings()))
    assert set(PROXIED_ROUTES) <= set(found["paths"])


async def test_the_description_is_served_without_a_key():
    frontend = FrontendSettings(security=SecuritySettings(api_keys=("a",), admin_keys=("b",)), admin_port=0)
    async with stand(frontend=frontend) as s:
        for url in (s.server.url, s.server.admin_url):
            answer = await s.http.get(url + "/openapi.json")
            assert answer.status == 200
            assert (await answer.json())["paths"] == openapi(frontend)["paths"]


def test_limits_stand_there_as_they_are_checked():
    found = openapi(FrontendSettings())["components"]["schemas"]
    nvext = found["ChatRequest"]["properties"]["nvext"]["properties"]
    assert nvext["extra_fields"]["items"]["enum"] == [*EXTRA_FIELDS]
    assert found["ChatRequest"]["required"] == ["model", "messages"]
