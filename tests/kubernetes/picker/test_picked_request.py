"""A request that a gateway carries: the choice, what the gateway reports of it, and exactly one end."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings, SecuritySettings
from penstock.kernel.errors import ClientError, OverloadedError
from penstock.router.settings import RouterSettings
from penstock_kubernetes.picker.picked_request import PREFILLER, GatewayRequest, PickedRequest
from penstock_kubernetes.picker.picker import Picker
from tests.frontend.stand import Engine, Stand, chunk, eventually, stand

CHAT = "/v1/chat/completions"


@pytest.fixture
async def two() -> AsyncIterator[tuple[Stand, Picker]]:
    async with stand(2) as found:
        yield found, Picker(found.service)


def ask(text: str = "hello", headers: dict[str, str] | None = None, **more: Any) -> GatewayRequest:
    """Return a chat as a gateway shows it; fields of `GatewayRequest` by keyword, others go into the body."""
    own = {name: more.pop(name) for name in GatewayRequest._fields if name in more and name != "model"}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode()
    return GatewayRequest("POST", CHAT, headers or {}, body, **own)


def endpoint(found: Stand, name: str) -> str:
    return next(engine.url for engine in found.engines if engine.name == name).removeprefix("http://")


def stream_to(picked: PickedRequest, tokens: int = 3) -> None:
    picked.head(200, "text/event-stream")
    for number in range(tokens):
        picked.feed(chunk({"content": f"t{number}"}, finish="stop" if number == tokens - 1 else None))
    usage = {"prompt_tokens": 7, "completion_tokens": tokens + 1, "prompt_tokens_details": {"cached_tokens": 2}}
    picked.feed(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
    picked.feed(b"data: [DONE]\n\n")


async def test_the_same_router_chooses_and_the_record_is_as_for_any_other_request(two: tuple[Stand, Picker]) -> None:
    found, picker = two
    picked = await picker.pick(ask("a prompt " * 40, stream=True))
    assert picked.refusal is None and len(picked.endpoints) == 2
    stream_to(picked)
    assert found.service.gate.inflight == 0 and not picker.open
    [record] = found.records
    [decision] = [json.loads(bytes(one)) for one in found.decisions]
    assert (record.outcome, record.osl, record.cached) == ("ok", 4, 2)
    assert record.id == decision["request"] == picked.id
    assert endpoint(found, decision["chosen"][0]) == picked.endpoint
    again = await picker.pick(ask("a prompt " * 40, stream=True))
    assert again.endpoint == picked.endpoint, "the second one finds the prefix where the first one went"


async def test_an_unary_answer_is_read_for_its_usage(two: tuple[Stand, Picker]) -> None:
    found, picker = two
    picked = await picker.pick(ask())
    picked.head(200, "application/json")
    usage = {"prompt_tokens": 7, "completion_tokens": 5}
    picked.feed(json.dumps({"choices": [], "usage": usage}).encode())
    picked.ended()
    picked.ended()
    picked.abandoned()
    assert [(record.outcome, record.osl) for record in found.records] == [("ok", 5)]


async def test_an_answer_that_passed_elsewhere_ends_with_unknown_output(two: tuple[Stand, Picker]) -> None:
    found, picker = two
    before = found.router.pools["m"].counts.output_mean
    picked = await picker.pick(ask())
    picked.ended()
    assert found.records[0].outcome == "ok"
    assert found.router.pools["m"].counts.output_mean == before, "an output that nobody counted is not one of 0 tokens"


async def test_a_fallback_moves_the_request_to_the_worker_that_serves_it(two: tuple[Stand, Picker]) -> None:
    found, picker = two
    picked = await picker.pick(ask(stream=True))
    chosen, other = picked.endpoints
    picked.served(chosen)
    picked.served(other)
    assert picked.endpoint == other
    load = {target.worker: found.router.pools["m"].active.load(target).requests for target in _targets(found)}
    assert load == {_name(found, chosen): 0, _name(found, other): 1}
    stream_to(picked)
    assert found.records[0].outcome == "ok"
    assert [str(leg.failure or "") for leg in found.records[0].legs][-1] == ""


def _targets(found: Stand) -> list[Any]:
    return [target for worker in found.router.roster for target in worker.targets]


def _name(found: Stand, place: str) -> str:
    return next(engine.name for engine in found.engines if engine.url.endswith(place))


async def test_a_subset_limits_the_choice_and_an_empty_one_is_refused(two: tuple[Stand, Picker]) -> None:
    found, picker = two
    for name in ("e0", "e1"):
        picked = await picker.pick(ask(subset=[endpoint(found, name)]))
        assert picked.endpoint == endpoint(found, name)
        picked.ended()
    with pytest.raises(OverloadedError) as caught:
        await picker.pick(ask(subset=["10.0.0.1:80"]))
    assert caught.value.status == 503
    assert found.service.gate.inflight == 0


async def test_an_engines_refusal_is_the_requests_own_fault_and_a_fault_is_the_workers(
    two: tuple[Stand, Picker],
) -> None:
    found, picker = two
    for status, fault in ((400, "client"), (500, "engine")):
        picked = await picker.pick(ask())
        picked.head(status, "application/json")
        picked.feed(b'{"error": "no"}')
        picked.ended()
        assert (found.records[-1].outcome, found.records[-1].fault) == ("failed", fault)


async def test_a_request_that_is_given_up_counts_no_more(two: tuple[Stand, Picker]) -> None:
    found, picker = two
    picked = await picker.pick(ask(stream=True))
    picked.head(200, "text/event-stream")
    picked.feed(chunk({"content": "t"}))
    picked.abandoned()
    assert found.records[0].outcome == "cancelled"
    assert found.service.gate.inflight == 0


async def test_bad_bodies_and_unknown_models_are_refused_before_the_router(two: tuple[Stand, Picker]) -> None:
    found, picker = two
    for body, status in (
        (b"{", 400),
        (b'{"messages": []}', 400),
        (b'{"model": "x", "messages": [{"role": "u"}]}', 404),
    ):
        with pytest.raises(ClientError) as caught:
            await picker.pick(GatewayRequest("POST", CHAT, {}, body))
        assert caught.value.status == status
    assert found.service.gate.inflight == 0 and found.records == []


async def test_a_model_is_rewritten_in_the_body(two: tuple[Stand, Picker]) -> None:
    _, picker = two
    picked = await picker.pick(ask()._replace(model="m"))
    assert picked.body is None
    body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "x"}]}).encode()
    picked = await picker.pick(GatewayRequest("POST", CHAT, {}, body, model="m"))
    assert picked.body is not None and json.loads(picked.body)["model"] == "m"


async def test_without_workers_the_refusal_says_when_to_come_back() -> None:
    async with stand(0) as found:
        found.service.catalog.tokenizers["m"] = None
        picked = await Picker(found.service).pick(ask())
        assert picked.refusal is not None and picked.refusal.status == 503
        assert picked.refusal.headers["retry-after"] == "1"
        assert found.service.gate.inflight == 0
        await eventually(lambda: found.records)


async def test_refusals_are_counted_and_answered_as_the_frontends_own() -> None:
    counted = []
    unknown, other = b'{"model": "x", "messages": [{"role": "user", "content": "x"}]}', "/v1/embeddings"
    bad = [(CHAT, b"{"), (CHAT, b'{"messages": []}'), (CHAT, unknown), (other, b"{"), (other, unknown)]
    for by_picker in (False, True):
        async with stand(1, frontend=FrontendSettings(security=SecuritySettings(api_keys=("k",)))) as found:
            answers = []
            picker = Picker(found.service)
            for (path, body), key in itertools.product(bad, ("k", "wrong")):
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                if by_picker:
                    request = GatewayRequest("POST", path, headers, body)
                    with pytest.raises(ClientError) as caught:
                        await picker.pick(request)
                    refusal = picker.refused(request, caught.value, 0.0)
                    answers.append((refusal.status, refusal.body, refusal.headers.get("www-authenticate")))
                else:
                    got = await found.http.post(path, data=body, headers=headers)
                    answers.append((got.status, await got.read(), got.headers.get("www-authenticate")))
            lines = found.service.metrics.render().splitlines()
            counts = [line for line in lines if "error" in line or "unauthorized_total" in line]
            counted.append((answers, counts))
            assert found.records == [] and found.service.gate.inflight == 0
    assert counted[0] == counted[1] and len(counted[0][1]) >= 4


async def test_a_tenant_has_a_rate_of_its_own_and_needs_a_key_nevertheless() -> None:
    limits, security = LimitSettings(rate=0.001, burst=1), SecuritySettings(api_keys=("k",))
    async with stand(1, frontend=FrontendSettings(limits=limits, security=security)) as found:
        picker, key = Picker(found.service), {"authorization": "Bearer k"}
        for tenant in ("team-a", "team-b", None):
            picked = await picker.pick(ask(headers=key, tenant=tenant))
            assert (picked.caller == tenant) == (tenant is not None)
            picked.ended()
            with pytest.raises(OverloadedError) as caught:
                await picker.pick(ask(headers=key, tenant=tenant))
            assert caught.value.status == 429
        with pytest.raises(ClientError) as refused:
            await picker.pick(ask(tenant="team-c"))
        assert refused.value.status == 401, "a tenant's name is not a key"


async def test_without_workers_a_request_waits_as_long_as_it_is_allowed_to() -> None:
    """`router.queue.start_wait` is what upstream's skip_initial_worker_wait decides."""
    models = {"m": ModelSettings(tokenizer=None, pools={"main": PoolSettings()})}
    queue = msgspec.structs.replace(RouterSettings().queue, start_wait=30.0)
    settings = ClusterSettings(models=models, router=msgspec.structs.replace(RouterSettings(), queue=queue))
    async with stand(0, settings=settings) as found:
        picking = asyncio.create_task(Picker(found.service).pick(ask()))
        await eventually(lambda: found.service.gate.inflight == 1)
        assert not picking.done()
        engine = Engine("late")
        engine.url = "http://127.0.0.1:9"
        found.join(engine)
        picked = await asyncio.wait_for(picking, 5)
        assert picked.endpoint == "127.0.0.1:9"
        picked.ended()
        assert found.records[0].outcome == "ok"


async def test_a_remote_prefill_is_named_for_the_sidecar() -> None:
    async with stand(0) as found:
        for name, role in (("p", "prefill"), ("d", "decode")):
            engine = Engine(name)
            engine.url = f"http://127.0.0.1:{9000 + len(found.engines)}"
            found.engines.append(engine)
            found.join(engine, role=role, engine="vllm", handoff="completed")
        picked = await Picker(found.service).pick(ask("a long prompt " * 400, stream=True))
        assert picked.headers[PREFILLER] == endpoint(found, "p")
        assert picked.endpoints == [endpoint(found, "d")]
        stream_to(picked)
        assert found.records[0].outcome == "ok"
