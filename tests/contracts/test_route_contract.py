"""The example's route keeps the contract, and routes that fail, are late or hold the event loop are left out."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.extension import Extension
from penstock.frontend import extension_routes
from penstock.frontend.extension_routes import FAILURES_MAX, FrontendRoute, FrontendRoutes
from penstock.kernel.errors import ClientError
from penstock.testing.installed_extensions import extension_installed, project_installed
from penstock.testing.route_contract import *  # noqa: F403
from penstock.testing.route_contract import frontend_serving

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "extension"


@pytest.fixture
def route_name(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "installed").mkdir()
    with project_installed(EXAMPLE, tmp_path / "installed"):
        yield "by-label"


def faulty(service: Any, handlers: Any) -> FrontendRoutes:
    async def raises(request: web.Request) -> web.Response:
        raise RuntimeError("no luck")

    async def late(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async def blocks(request: web.Request) -> web.Response:
        await asyncio.sleep(0)
        end = time.perf_counter() + 2 * extension_routes.BLOCKED
        while time.perf_counter() < end:
            pass
        return web.Response(text="done")

    async def refuses(request: web.Request) -> web.Response:
        raise ClientError("not like this", status=422)

    handlers_of = {"raises": raises, "late": late, "blocks": blocks, "refuses": refuses}
    return FrontendRoutes(
        [FrontendRoute("GET", f"/x/{name}", each, "open", timeout=0.01 if name == "late" else 30.0)
         for name, each in handlers_of.items()]
    )  # fmt: skip


def broken(service: Any, handlers: Any) -> FrontendRoutes:
    raise LookupError("nothing here")


EXTENSION = Extension(name="of-tests", entries={"route": {"faulty": faulty, "broken": broken}})


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("raises", 500, "it raised RuntimeError: no luck"),
        ("late", 504, "it did not answer within 0.01 s"),
        ("blocks", 200, "it held the event loop for 0."),
        ("refuses", 422, None),
    ],
)
async def test_a_route_that_fails_is_left_out_with_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, status: int, why: str | None
) -> None:
    monkeypatch.setattr(extension_routes, "BLOCKED", 0.02 if name == "blocks" else 30.0)
    (tmp_path / "installed").mkdir()
    with extension_installed(tmp_path / "installed", "of-tests", f"{__name__}:EXTENSION"):
        async with frontend_serving(tmp_path) as (_, client):
            for _ in range(FAILURES_MAX):
                answer = await client.get(f"/x/{name}")
                assert answer.status == status
            last = await client.get(f"/x/{name}")
            health = await (await client.get("/health")).json()
            shown = await client.get("/admin/status", headers={"authorization": "Bearer admin"})
            findings = " ".join(each["text"] for each in (await shown.json())["findings"])
            assert "routes of broken is left out: LookupError: nothing here" in findings
            if why is None:
                assert last.status == status and "/x/" not in findings
                return
            assert last.status == 503 and why in (await last.json())["error"]["message"]
            text = f"the route GET /x/{name} of faulty is left out: {why}"
            assert text in findings and text in " ".join(health["notes"]) and health["status"] == "ok"
            assert (await client.get("/v1/models", headers={"authorization": "Bearer client"})).status == 200
