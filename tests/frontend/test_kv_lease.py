"""Does no client get text that was made from KV whose holder may have let it go?"""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from penstock.adapters.engines.dialects.kv_transfer_protocol import LEASE_STARTED, lease_of
from penstock.adapters.engines.launch import launch_of
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.frontend.exchange import prefill_stages
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router.settings import HandoffSettings, RouterSettings
from tests.frontend.stand import Stand, answer_well, stand

ROLE: dict[str, Any] = {"engine": "vllm", "handoff": "completed", "layout": "l"}
SETTINGS = ClusterSettings(
    models={"m": ModelSettings(pools={"main": PoolSettings()})},
    router=RouterSettings(handoff=HandoffSettings(conditional="off")),
)


def card(**labels: str) -> WorkerCard:
    return WorkerCard(id=WorkerId("w"), epoch=1, model="m", url="u", engine="vllm", labels=labels)


def test_the_lease_of_an_engine_is_its_labels_or_vllms_own() -> None:
    assert (lease_of(card()), lease_of(card(kv_lease="4")), lease_of(card(kv_lease="soon"))) == (30, 4, 30)
    assert lease_of(WorkerCard(id=WorkerId("w"), epoch=1, model="m", url="u", engine="sglang")) == float("inf")


def test_an_engine_that_is_started_here_holds_kv_for_longer_than_any_deadline_of_ours() -> None:
    pool = PoolSettings(engine="vllm", role="prefill")
    launch = launch_of("w", "m", pool, port=1)
    config = json.loads(launch.argv[launch.argv.index("--kv-transfer-config") + 1])
    assert config["kv_connector_extra_config"] == {"kv_lease_duration": LEASE_STARTED}
    assert launch.card["labels"]["kv_lease"] == str(LEASE_STARTED)
    upstream = ClusterSettings().frontend.upstream
    assert upstream.first_byte_timeout + upstream.stall_timeout < LEASE_STARTED


def leased(duration: Any) -> dict[str, Any]:
    return {"kv_connector_extra_config": {"kv_lease_duration": duration}}


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}}


@pytest.mark.parametrize(
    ("config", "labels", "lease"),
    [
        ({"kv_connector": "NixlConnector"}, {}, 30),
        (leased(4), {}, 4),
        (leased(4.9), {}, 4),
        (leased("4 s"), {}, 0),
        (leased(-5), {}, 0),
        (leased([]), {}, 0),
        (leased(4), {"kv_lease": "soon"}, "soon"),
        (leased(4), {"kv_lease": "3"}, 3),
        (several({}, leased(5)), {}, 5),
        (several(leased(99)), {}, 99),
        (several({"kv_connector": "OffloadingConnector"}, leased(600)), {}, 600),
        ("no JSON", {}, 0),
        ([[]] * 2, {}, 0),
    ],
)
def test_the_lease_of_an_operators_own_configuration_counts(config: Any, labels: dict[str, str], lease: Any) -> None:
    for args in (("--kv-transfer-config", json.dumps(config)), (f"--kv-transfer-config={json.dumps(config)}",)):
        launch = launch_of("w", "m", PoolSettings(engine="vllm", role="prefill", args=args, labels=labels), port=1)
        assert launch.card["labels"]["kv_lease"] == str(lease)


def test_a_lease_may_be_a_flag_of_its_own_and_the_last_configuration_counts() -> None:
    config = "--kv-transfer-config"
    dotted = f"{config}.kv_connector_extra_config.kv_lease_duration"
    for args, lease in (
        ((dotted, "4"), "4"),
        ((f"{dotted}=5",), "5"),
        ((f"{config}.kv_connector", "NixlConnector"), "30"),
        ((config, json.dumps(leased(999)), config, json.dumps(leased(4))), "4"),
    ):
        pool = PoolSettings(engine="vllm", role="prefill", args=args)
        assert launch_of("w", "m", pool, port=1).card["labels"]["kv_lease"] == lease


class Split:
    """A prefill and a decode engine; the second one's first answer to a hand-off waits for ``pause`` seconds."""

    def __init__(self, s: Stand, lease: int, pause: float) -> None:
        self.s, self.pause, self.stood_still = s, pause, 0.0
        self.metrics: Any = None
        s.join(s.engines[0], **ROLE, role="prefill", labels={"kv_lease": str(lease)}, epoch=2)
        s.join(s.engines[1], **ROLE, role="decode", epoch=2)
        s.engines[0].reply, s.engines[1].reply = self.prefill, self.decode

    async def prefill(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(self.stood_still)
        reply = await answer_well(request, body)
        found = json.loads(reply.body)  # type: ignore[attr-defined]
        return web.json_response({**found, "kv_transfer_params": {"do_remote_prefill": True}})

    async def decode(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "kv_transfer_params" in body:
            await asyncio.sleep(self.pause)
        reply = await answer_well(request, body)
        if self.metrics is not None and not body.get("stream"):
            return web.json_response({**json.loads(reply.body), "metrics": self.metrics})  # type: ignore[attr-defined]
        return reply

    @property
    def asked(self) -> list[tuple[bool, str | None]]:
        """Whether each leg of the decode engine was to fetch, and its salt."""
        bodies = [json.loads(body) for body in self.s.engines[1].bodies]
        return [("kv_transfer_params" in body, body.get("cache_salt")) for body in bodies]


@pytest.mark.parametrize("salt", [None, "mine"])
async def test_an_answer_that_came_after_the_lease_is_made_anew_without_what_was_fetched(salt: str | None) -> None:
    async with stand(2, settings=SETTINGS) as s:
        split = Split(s, lease=1, pause=1.3)
        more = {"cache_salt": salt} if salt else {}
        reply = await s.chat(stream=True, headers={"x-request-id": "r"}, **more)
        assert (await reply.text()).count("data: ") > 5
        (first, first_salt), (second, second_salt) = split.asked
        assert (first, second) == (True, False)
        assert first_salt == salt and second_salt == f"{salt or ''}r", "what it fetched may be in its prefix cache"


@pytest.mark.parametrize(
    ("metrics", "repeated"),
    [
        (None, True),
        ({"generation_time_ms": 1_200.0}, False),
        ({"generation_time_ms": 10.0}, True),
        ({"generation_time_ms": "long"}, True),
        ({"generation_time_ms": 10**400}, True),
        ([], True),
    ],
)
async def test_an_answer_in_one_piece_counts_where_its_engine_says_that_it_began_in_time(
    metrics: Any, repeated: bool
) -> None:
    async with stand(2, settings=SETTINGS) as s:
        split = Split(s, lease=1, pause=1.3)
        split.metrics = metrics
        reply = await s.chat()
        assert reply.status == 200, await reply.text()
        assert [fetches for fetches, _ in split.asked] == [True, False][: 1 + repeated]


async def test_kv_near_its_leases_end_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stand(2, settings=SETTINGS) as s:
        split = Split(s, lease=1, pause=0.0)
        reply = await s.chat(stream=True)
        assert (await reply.text()).count("data: ") > 5
        assert [fetches for fetches, _ in split.asked] == [True]
        split.stood_still = 1.0  # after its lease had begun
        await (await s.chat(stream=True)).read()
        assert [fetches for fetches, _ in split.asked] == [True, False]
        split.stood_still = 0.0
        monkeypatch.setattr(prefill_stages, "SENT_WITHIN", -1.0)  # as if the router had let it wait for so long
        await (await s.chat(stream=True)).read()
        assert [fetches for fetches, _ in split.asked] == [True, False, False]
