"""Decisions by POST: signed, tried again, the same one with the same id, and refusals with their reason."""

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from penstock.adapters.connectors.webhook import TRIES, WebhookConnector, signature
from penstock.config.settings.planning_settings import WebhookSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Pool
from penstock.planner.plugins.proposals import Flip, Reason

SECRET = "a secret of the webhook"
POOLS = {
    "prefill": Pool(model="m", role="prefill", desired=1),
    "decode": Pool(model="m", role="decode", desired=1),
}
WHY = (Reason(code="test", text="12 requests/s"),)


class Receiver:
    """Takes POSTs as somebody's orchestrator would; ``answers``: the statuses that it gives first."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[int] = []
        self.taken: list[dict[str, Any]] = []
        self.ids: list[str] = []

    async def post(self, request: web.Request) -> web.Response:
        raw = await request.read()
        at = request.headers["x-penstock-timestamp"]
        assert request.headers["x-penstock-signature"] == f"sha256={signature(SECRET, at, raw)}"
        assert abs(time.time() - int(at)) < 30
        body = json.loads(raw)
        assert request.headers["idempotency-key"] == body["decision_id"]
        self.ids.append(body["decision_id"])
        status = self.answers.pop(0) if self.answers else 204
        if status < 300:
            self.taken.append(body)
        return web.Response(status=status, text="busy" if status >= 300 else None)


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    app = web.Application()
    app.router.add_post("/scale", found.post)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/scale"
    try:
        yield found
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.adapters.connectors.webhook.BACKOFF", 0.001)


def connector(url: str) -> WebhookConnector:
    return WebhookConnector(WebhookSettings(url=url, secret=SECRET), pools=POOLS)


async def test_a_decision_is_posted_whole_and_counts_as_wanted():
    async with receiver() as there:
        mine = connector(there.url)
        flip = Flip(model="m", frm="decode", to="prefill")
        assert await mine.scale({"decode": 4}, (flip,), WHY) == {}
        assert there.taken[0]["targets"] == {"prefill": 1, "decode": 4}
        assert there.taken[0]["reasons"] == ["12 requests/s"]
        assert there.taken[0]["flips"] == [{"model": "m", "frm": "decode", "to": "prefill", "count": 1}]
        assert {name: pool.desired for name, pool in (await mine.look()).items()} == {"prefill": 1, "decode": 4}
        await mine.close()


async def test_what_was_not_taken_is_posted_again_under_the_same_id():
    async with receiver() as there:
        mine = connector(there.url)
        there.answers = [503, 502]
        assert await mine.scale({"decode": 4}, (), WHY) == {}
        assert len(there.ids) == 3
        assert len(set(there.ids)) == 1
        there.answers = [503] * TRIES
        assert "answers 503: busy" in (await mine.scale({"decode": 5}, (), WHY))["decode"]
        assert (await mine.look())["decode"].desired == 4
        assert await mine.scale({"decode": 5}, (), WHY) == {}
        assert len(set(there.ids)) == 2  # the tick after says the same decision, not another one
        await mine.close()


async def test_a_refusal_is_not_tried_again():
    async with receiver() as there:
        mine = connector(there.url)
        there.answers = [403]
        assert "answers 403" in (await mine.scale({"decode": 4}, (), WHY))["decode"]
        assert len(there.ids) == 1
        await mine.close()


async def test_nobody_there_is_a_problem_and_no_error():
    mine = connector("http://127.0.0.1:1/")
    assert "can't be reached" in (await mine.scale({"decode": 4}, (), WHY))["decode"]
    await mine.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (lambda: WebhookSettings(secret=SECRET), r"planner\.webhook\.url is not set"),
        (lambda: WebhookSettings(url="http://x/"), r"planner\.webhook\.secret is not set"),
        (lambda: WebhookSettings(url="http://x/", secret="short"), r"planner\.webhook\.secret is too short"),
    ],
)
def test_without_url_and_secret_nothing_is_posted(settings: Callable[[], WebhookSettings], says: str):
    with pytest.raises(ConfigError, match=says):
        WebhookConnector(settings(), pools=POOLS)
