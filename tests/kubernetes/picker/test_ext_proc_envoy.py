"""ext_proc with the real Envoy: each request reaches the chosen worker, and its answer comes whole and in time."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.settings.frontend_settings import LimitSettings
from penstock_kubernetes.picker.envoy_config import EnvoyPlan, envoy_config
from penstock_kubernetes.picker.ext_proc_stream import (
    DESTINATION,
    FAIRNESS,
    OBJECTIVE,
    REWRITE,
    TEST_SELECTION,
    TEST_SERVED,
)
from tests.frontend.stand import Engine, answer, eventually
from tests.kubernetes.picker.envoy import EXTENSION, Envoy, GatewayStand, envoy_stand, filters_of
from tests.servers import free_ports

WAYS: dict[str, dict[str, Any]] = {
    "as rendered": {},
    "over TLS": {"tls": True},
    "answers not watched": {"watch_answers": False},
    "duplex": {"mode": EXTENSION},
    "answers not watched, body duplex": {
        "watch_answers": False,
        "mode": {"request_body_mode": "FULL_DUPLEX_STREAMED"},
    },
    "body buffered, answers duplex": {"mode": EXTENSION | {"request_body_mode": "BUFFERED"}},
    "original destination": {"fallbacks": False},
}


def decisions_of(gateway: GatewayStand) -> dict[str, str]:
    """Return the chosen worker by request."""
    read = [json.loads(bytes(one)) for one in gateway.found.decisions]
    return {one["request"]: one["chosen"][0] for one in read}


async def whole_answers(gateway: GatewayStand, count: int, *, at_once: int = 10) -> None:
    """Ask so many chats, streamed and not, and check each answer."""
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with gate:
            got = await gateway.chat(f"{number} " * 50, stream=bool(number % 2))
            text = await got.text()
            assert got.status == 200, text
            assert (
                text.endswith("data: [DONE]\n\n") if number % 2 else json.loads(text)["usage"]["completion_tokens"] == 5
            )

    await asyncio.gather(*map(one, range(count)))


@pytest.mark.parametrize("way", WAYS)
async def test_each_request_reaches_the_worker_that_explain_names(way: str, tmp_path: Path) -> None:
    async with envoy_stand(tmp_path, 3, **WAYS[way]) as gateway:
        await whole_answers(gateway, 30)
        await eventually(lambda: len(gateway.found.records) == 30)
        served = {
            headers["x-request-id"]: engine.name for engine in gateway.found.engines for headers in engine.headers
        }
        assert decisions_of(gateway) == served and len(served) == 30
        assert {record.outcome for record in gateway.found.records} == {"ok"}
        watched = "not watched" not in way
        assert {record.osl for record in gateway.found.records} == ({5} if watched else {0})
        assert not gateway.picker.open and gateway.found.service.gate.inflight == 0


@pytest.mark.parametrize("mode", [{}, EXTENSION])
async def test_streams_are_whole_and_not_delayed(mode: dict[str, str], tmp_path: Path) -> None:
    async with envoy_stand(tmp_path, 2, mode=mode) as gateway:
        gateway.found.engines[0].reply = gateway.found.engines[1].reply = paced

        async def one(number: int) -> float:
            began = time.monotonic()
            got = await gateway.chat(f"chat {number}", stream=True)
            text, first = b"", 0.0
            async for data in got.content.iter_any():
                first = first or time.monotonic() - began
                text += data
            assert text.count(b"data:") == 22 and text.endswith(b"data: [DONE]\n\n")
            return first / (time.monotonic() - began)

        shares = sorted(await asyncio.gather(*map(one, range(8))))
        assert shares[0] < 0.5, "a first token waits for no later one"
        await eventually(lambda: len(gateway.found.records) == 8)
        assert {record.outcome for record in gateway.found.records} == {"ok"}
        assert all(record.ttft < 0.5 * record.e2e for record in gateway.found.records if record.e2e), (
            "as the records say"
        )


async def paced(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await answer(request, body, 20, gap=0.02)


@pytest.mark.parametrize("mode", [{}, EXTENSION])
@pytest.mark.parametrize("filters", [1, 2])
async def test_large_bodies_pass_whole_also_through_two_filters(
    filters: int, mode: dict[str, str], tmp_path: Path
) -> None:
    async with envoy_stand(tmp_path, 2, filters=filters, mode=mode) as gateway:
        text = "".join(f"{number:07d}" for number in range(300_000))
        got = await gateway.chat(text)
        assert got.status == 200, await got.text()
        [body] = [body for engine in gateway.found.engines for body in engine.bodies]
        assert json.loads(body)["messages"][0]["content"] == text
        await eventually(lambda: len(gateway.found.records) == filters)
        assert {record.outcome for record in gateway.found.records} == {"ok"}


async def test_a_body_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    base = ClusterSettings(models={"m": ModelSettings(tokenizer=None, pools={"main": PoolSettings()})})
    limits = LimitSettings(body_max=100_000)
    settings = msgspec.structs.replace(base, frontend=msgspec.structs.replace(base.frontend, limits=limits))
    async with envoy_stand(tmp_path, 1, settings=settings) as gateway:
        got = await gateway.chat("x" * 300_000)
        assert got.status == 413 and (await got.json())["error"]["code"] == "body_too_large"
        assert gateway.found.engines[0].bodies == []
        assert (await gateway.chat("y" * 90_000)).status == 200


async def test_a_gateway_falls_back_and_the_record_names_who_served(tmp_path: Path) -> None:
    async with envoy_stand(tmp_path, 2) as gateway:
        dead = gateway.found.engines[0]
        await dead.stop()
        for number in range(6):
            got = await gateway.chat(f"again {number}" * 20)
            assert got.status == 200
        await eventually(lambda: len(gateway.found.records) == 6)
        assert {record.outcome for record in gateway.found.records} == {"ok"}
        assert {record.legs[-1].worker for record in gateway.found.records} == {"e1"}
        assert any(record.attempts == 2 for record in gateway.found.records), "e0 was chosen first at least once"
        loads = [gateway.found.router.pools["m"].active.load(target).requests for target in _targets(gateway)]
        assert loads == [0, 0]


def _targets(gateway: GatewayStand) -> list[Any]:
    return [target for worker in gateway.found.router.roster for target in worker.targets]


async def test_hints_of_the_extension_are_followed(tmp_path: Path) -> None:
    async with envoy_stand(tmp_path, 3) as gateway:
        for name in ("e2", "e0"):
            place = gateway.place(name)
            got = await gateway.chat("one of many", headers={TEST_SELECTION: place})
            assert got.headers["x-penstock-worker"].startswith(name) and got.headers[TEST_SERVED] == place
        got = await gateway.chat("nobody", headers={TEST_SELECTION: "10.1.2.3:80"})
        assert got.status == 503 and got.headers["retry-after"] == "1"
        body = {"model": "chat-stable", "messages": [{"role": "user", "content": "x"}]}
        got = await gateway.http.post("/v1/chat/completions", json=body, headers={REWRITE: "m"})
        assert got.status == 200, await got.text()
        assert b"chat-stable" not in b"".join(body for engine in gateway.found.engines for body in engine.bodies)
        gateway.listener.objectives.changed("llm-d.ai", "urgent", {"spec": {"priority": 7}})
        chosen: list[Any] = []
        arrive = gateway.found.service.tickets.arrive
        gateway.found.service.tickets.arrive = lambda event: (chosen.append(event), arrive(event))[1]  # type: ignore
        assert (await gateway.chat("now", headers={OBJECTIVE: "urgent", FAIRNESS: "team-a"})).status == 200
        assert chosen[0].preferences.strict == 7


async def test_refusals_reach_the_client_with_their_reason(tmp_path: Path) -> None:
    async with envoy_stand(tmp_path, 1) as gateway:
        for body, status, code in (
            (b"{", 400, "invalid_json"),
            (b'{"messages": []}', 400, "missing_field"),
            (b'{"model": "x", "messages": [{"role": "user"}]}', 404, "model_not_found"),
        ):
            got = await gateway.http.post("/v1/chat/completions", data=body)
            assert (got.status, (await got.json())["error"]["code"]) == (status, code)
        gateway.found.engines[0].reply = _out_of_room
        got = await gateway.chat("busy")
        assert got.status == 429
        await eventually(lambda: gateway.found.records)
        assert (gateway.found.records[0].outcome, gateway.found.records[0].fault) == ("failed", "overloaded")
        gate = gateway.found.service.gate
        gate.use(msgspec.structs.replace(gate.settings, limits=LimitSettings(rate=0.001, burst=1)))
        assert [(await gateway.chat("often")).status for _ in range(2)] == [429, 429]
        got = await gateway.chat("often")
        assert int(got.headers["retry-after"]) > 1 and "requests per second" in (await got.json())["error"]["message"]


async def _out_of_room(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "busy"}}, status=429)


async def test_other_requests_go_to_any_worker(tmp_path: Path) -> None:
    async with envoy_stand(tmp_path, 2) as gateway:
        for engine in gateway.found.engines:
            engine.paths.clear()
        got = await gateway.http.get("/v1/models")
        assert got.status in (404, 405), "the scripted engines take POST only, and one of them said so"
        got = await gateway.http.post("/v1/load_lora_adapter", data=b"z" * 200_000)
        assert got.status == 200
        assert [len(body) for engine in gateway.found.engines for body in engine.bodies] == [200_000]


@pytest.mark.parametrize("watch_answers", [True, False])
@pytest.mark.parametrize("fail_open", [True, False])
async def test_without_a_picker_requests_go_anywhere_or_nowhere(
    fail_open: bool, watch_answers: bool, tmp_path: Path
) -> None:
    async with envoy_stand(tmp_path, 2, fail_open=fail_open, watch_answers=watch_answers) as gateway:
        assert (await gateway.chat("first")).status == 200
        await gateway.listener.close()
        got = await gateway.chat("second")
        assert (got.status == 200) == fail_open
        assert fail_open or got.status == 503


async def test_a_client_that_hangs_up_is_cancelled(tmp_path: Path) -> None:
    async with envoy_stand(tmp_path, 1) as gateway:
        gateway.found.engines[0].reply = paced
        got = await gateway.chat("bye", stream=True)
        await got.content.readany()
        got.close()
        await eventually(lambda: gateway.found.records)
        assert gateway.found.records[0].outcome == "cancelled" and not gateway.picker.open


async def test_a_killed_envoy_leaves_no_request_open(tmp_path: Path) -> None:
    async with envoy_stand(tmp_path, 2) as gateway:
        gateway.found.engines[0].reply = gateway.found.engines[1].reply = paced
        answers = [await gateway.chat(f"{number}", stream=True) for number in range(8)]
        await eventually(lambda: len(gateway.picker.open) == 8)
        gateway.envoy.kill()
        await eventually(lambda: len(gateway.found.records) == 8)
        assert {record.outcome for record in gateway.found.records} == {"cancelled"}
        assert gateway.found.service.gate.inflight == 0
        for got in answers:
            got.close()


@pytest.mark.parametrize("fields", [{}, {"watch_answers": False}, {"mode": EXTENSION}], ids=str)
async def test_a_picker_cut_off_at_any_moment_costs_no_answer_unless_bodies_are_duplex(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    """What a kill of its process does to Envoy; in duplex mode the client sees a break, or is refused."""
    whole = broken = 0
    async with envoy_stand(tmp_path, 2, fail_open=True, **fields) as gateway:
        gateway.found.engines[0].reply = gateway.found.engines[1].reply = paced

        async def one(number: int) -> bool:
            got = await gateway.chat(f"chat {number}", stream=True)
            try:
                text = await got.text()
            except aiohttp.ClientPayloadError:
                return False
            if got.status != 200:
                return False
            assert text.endswith("data: [DONE]\n\n") and text.count("data:") == 22, "cut without a sign"
            return True

        for moment in (0.02, 0.1, 0.2, 0.3):
            answers = [asyncio.create_task(one(number)) for number in range(8)]
            await asyncio.sleep(moment)
            for connection in list(gateway.listener.connections):
                assert connection._transport is not None
                connection._transport.abort()
            came = await asyncio.gather(*answers)
            whole, broken = whole + sum(came), broken + len(came) - sum(came)
    assert (broken > 0) == ("mode" in fields) and whole + broken == 32


@pytest.mark.parametrize("mode", [{}, EXTENSION])
async def test_a_picker_that_goes_lets_its_streams_end(mode: dict[str, str], tmp_path: Path) -> None:
    """Answers that run pass to their end; new requests go to the successor that the gateway finds."""
    async with envoy_stand(tmp_path, 2, mode=mode) as gateway:
        gateway.found.engines[0].reply = gateway.found.engines[1].reply = paced
        answers = [await gateway.chat(f"{number}", stream=True) for number in range(8)]
        await gateway.listener.stop_accepting()
        for got in answers:
            assert (await got.read()).endswith(b"data: [DONE]\n\n")
        await eventually(lambda: len(gateway.found.records) == 8)
        assert {record.outcome for record in gateway.found.records} == {"ok"}


async def test_a_subset_in_metadata_limits_the_choice(tmp_path: Path) -> None:
    async with envoy_stand(tmp_path, 3) as gateway:
        port, admin = free_ports(2)
        places = [engine.url.removeprefix("http://") for engine in gateway.found.engines]
        config = envoy_config(
            EnvoyPlan(f"127.0.0.1:{port}", [gateway.listener.address], places, admin=f"127.0.0.1:{admin}")
        )
        hint = {"metadata_namespace": "envoy.lb.subset_hint", "value": {f"{DESTINATION}-subset": [places[1]]}}
        kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        filters_of(config).insert(0, {"name": "hint", "typed_config": {"@type": kind, "metadata": [hint]}})
        second = await Envoy(tmp_path, config, port).ready(admin)
        try:
            for number in range(4):
                got = await gateway.http.post(
                    f"{second.url}/v1/chat/completions",
                    json={"model": "m", "messages": [{"role": "user", "content": f"{number}"}]},
                )
                assert got.headers["x-penstock-worker"].startswith("e1")
        finally:
            second.kill()


class Sidecar:
    """As the one of llm-d before a decode engine: has the prompt prefilled where the header says, then decodes it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prefilled: list[str] = []
        self._http = aiohttp.ClientSession()
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/{rest:.*}", self._serve)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._http.close()
        assert self._runner is not None
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body, headers = await request.json(), {"x-request-id": request.headers["x-request-id"]}
        place = request.headers.get("x-prefiller-host-port")
        if place is not None:
            self.prefilled.append(place)
            asked = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            url = f"http://{place}{request.path}"
            async with self._http.post(url, json=asked, headers=headers) as prefilled:
                body["kv_transfer_params"] = (await prefilled.json())["kv_transfer_params"]
        async with self._http.post(f"{self.engine.url}{request.path}", json=body, headers=headers) as decoded:
            answer = web.StreamResponse(headers={"content-type": decoded.headers["content-type"]})
            await answer.prepare(request)
            async for data in decoded.content.iter_any():
                await answer.write(data)
            return answer


async def _prefills(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response(
        {"choices": [], "kv_transfer_params": {"remote_engine_id": "p", "do_remote_prefill": True}}
    )


async def test_a_sidecar_prefills_where_the_picker_says(tmp_path: Path) -> None:
    async with envoy_stand(tmp_path, 0, fallbacks=False) as gateway:
        gateway.found.service.catalog.tokenizers["m"] = None
        prefill, decode, plain = Engine("p"), Engine("d"), Engine("d-behind")
        prefill.reply = _prefills
        sidecar = Sidecar(plain)
        await prefill.start()
        await plain.start()
        decode.url = await sidecar.start()
        try:
            gateway.found.join(prefill, role="prefill", engine="vllm", handoff="completed")
            gateway.found.join(decode, role="decode", engine="vllm", handoff="completed")
            for number in range(6):
                got = await gateway.chat(f"a long prompt {number} " * 400, stream=bool(number % 2))
                assert got.status == 200 and got.headers["x-penstock-worker"].startswith("d"), await got.text()
                assert await got.read()
            assert sidecar.prefilled == [prefill.url.removeprefix("http://")] * 6
            handed = [json.loads(body)["kv_transfer_params"]["remote_engine_id"] for body in plain.bodies]
            assert handed == ["p"] * 6
            await eventually(lambda: len(gateway.found.records) == 6)
            assert {(record.outcome, record.osl) for record in gateway.found.records} == {("ok", 5)}
        finally:
            await sidecar.stop()
            await prefill.stop()
            await plain.stop()
