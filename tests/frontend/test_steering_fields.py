"""Does a client's word on KV, ranks and engine internals stay out of engines, and theirs out of answers?"""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.settings.client_fields import OWN_WORDS, PLAIN_NAMES, STEERING
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.config.settings.frontend_settings import FrontendSettings, SecuritySettings
from penstock.config.settings.tenant_settings import TenantSettings
from penstock.frontend.prompt.request_body import parse, withheld_from
from tests.frontend.stand import Stand, chunk, stand

MARK = "steered-by-the-client"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
NAMES = sorted(STEERING)
UNMISTAKABLE = sorted(STEERING.keys() - PLAIN_NAMES)


def test_the_guide_names_every_field() -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/security.md").read_text()
    assert [name for name, effect in STEERING.items() if f"| `{name}` | {effect} |" not in guide] == []


def bodies(names: list[str]) -> st.SearchStrategy[Any]:
    """Any JSON in which fields of these names stand, with a mark below them, among others."""
    marked = st.sampled_from([MARK, {"remote_host": MARK}, [MARK], {"a": [{"b": MARK}]}])
    steering = st.dictionaries(st.sampled_from(names), marked, max_size=2)
    words = st.text("abc", min_size=1, max_size=3)

    def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        fields = st.dictionaries(words, inner, max_size=2)
        return st.lists(inner, max_size=2) | st.builds(lambda a, b: {**a, **b}, fields, steering)

    return st.recursive(st.integers() | st.booleans() | words | st.none(), deeper, max_leaves=12)


@given(
    bodies(NAMES), bodies(UNMISTAKABLE), st.sampled_from(["messages", "metadata", "chat_template_kwargs"]), st.data()
)
def test_no_byte_of_a_steering_field_is_left_at_any_depth(extra: Any, inside: Any, place: str, data: Any) -> None:
    fields = {**CHAT, "other": extra, **data.draw(st.dictionaries(st.sampled_from(NAMES), st.just(MARK), max_size=2))}
    if place == "messages":
        fields["messages"] = [{"role": "user", "content": "a", "more": inside}, *CHAT["messages"]]
    elif isinstance(inside, dict):
        fields[place] = inside
    parsed = parse("chat_completions", json.dumps(fields, ensure_ascii=data.draw(st.booleans())).encode())
    assert MARK.encode() not in parsed.raw
    assert json.loads(parsed.raw) == parsed.fields
    assert bool(parsed.withheld) == (MARK in json.dumps(fields))
    assert parsed.fields["messages"][-1] == CHAT["messages"][0]


def test_escapes_and_repetitions_hide_nothing_and_a_clients_own_words_stay() -> None:
    for raw in (
        rb'{"kv\u005ftransfer_params": {"a": "X"}, "model": "m", "messages": [{"role": "user", "content": "a"}]}',
        rb'{"rid": "X", "rid": "X", "model": "m", "messages": [{"role": "user", "content": "a"}]}',
        rb'{"vllm_xargs": "X", "model": "m", "vllm_xargs": {}, "messages": [{"role": "user", "content": "a"}]}',
    ):
        assert b"X" not in parse("chat_completions", raw).raw
    schema = {"type": "object", "properties": {"kv_transfer_params": {"type": "string"}, "rid": {"type": "string"}}}
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    own = {
        **CHAT,
        "tools": [function],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "metadata": {"request_id": "mine", "rid": "mine"},
        "guided_json": schema,
        "structured_outputs": {"json": schema},
    }
    raw = json.dumps(own).encode()
    parsed = parse("chat_completions", raw)
    assert (parsed.raw, parsed.withheld) == (raw, ())
    assert {*OWN_WORDS} >= {"tools", "response_format", "metadata", "guided_json", "structured_outputs"}
    assert withheld_from({"model": "m", "prompt": [1, 2]}) == ()


STEERED = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": MARK, "remote_port": 1},
    "vllm_xargs": {"kv_transfer_params": MARK, "kv_cache_report_mode": MARK, "top_n": 2},
    "bootstrap_host": MARK,
    "lora_path": MARK,
    "disaggregated_params": {"opaque_state": MARK},
}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "a"},
    "/v1/responses": {"model": "m", "input": "a"},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/v1/embeddings": {"model": "m", "input": "a"},
    "/rerank": {"model": "m", "query": "a", "documents": ["b"]},
    "/tokenize": {"model": "m", "prompt": "a"},
    "/v1/images/generations": {"model": "m", "prompt": "a"},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("nested", ["", "extra_body", "nvext"])
async def test_no_dialect_passes_one_on_and_the_answer_names_what_was_left_out(route: str, nested: str) -> None:
    async with stand() as s:
        steered = {nested: STEERED} if nested else STEERED
        answer = await s.http.post(route, json={**ROUTES[route], **steered})
        assert s.engines[0].bodies, await answer.text()
        assert not [body for body in s.engines[0].bodies if MARK.encode() in body]
        ignored = answer.headers["x-penstock-ignored-hints"].split(", ")
        if route not in ("/v1/responses", "/v1/messages"):  # what those don't know is not carried over anyhow
            assert {*STEERED} <= {*ignored}
        assert 'penstock_ignored_hints_total{model="m",hint="' in await (await s.http.get("/metrics")).text()


async def test_a_form_has_none_of_them_either() -> None:
    async with stand() as s:
        form = aiohttp.FormData()
        form.add_field("model", "m")
        form.add_field("vllm_xargs", json.dumps({"a": MARK}))
        form.add_field("file", b"sound", filename="a.wav", content_type="audio/wav")
        answer = await s.http.post("/v1/audio/transcriptions", data=form)
        [sent] = s.engines[0].bodies
        assert MARK.encode() not in sent and b"vllm_xargs" not in sent
        assert b'name="model"' in sent and b"sound" in sent and sent.rstrip().endswith(b"--")
        assert answer.headers["x-penstock-ignored-hints"] == "vllm_xargs"


async def test_a_pool_may_allow_one_or_a_part_of_one() -> None:
    labels = {"client_fields": "vllm_xargs.top_n lora"}
    async with stand(card={"labels": labels}) as s:
        answer = await s.chat(vllm_xargs={"top_n": 2, "kv_transfer_params": MARK}, lora=[{"id": 0}], rid=MARK)
        sent = json.loads(s.engines[0].bodies[0])
        assert sent["vllm_xargs"] == {"top_n": 2} and sent["lora"] == [{"id": 0}] and "rid" not in sent
        assert answer.headers["x-penstock-ignored-hints"] == "kv_transfer_params, rid"
        await s.http.post("/v1/embeddings", json={"model": "m", "input": "a", "vllm_xargs": {"top_n": 3, "b": 1}})
        assert json.loads(s.engines[0].bodies[1])["vllm_xargs"] == {"top_n": 3}
    async with stand(card={"labels": {"client_fields": "vllm_xargs"}}) as s:
        await s.chat(vllm_xargs={"top_n": 2, "inner": {"kv_transfer_params": MARK}})
        assert json.loads(s.engines[0].bodies[0])["vllm_xargs"] == {"top_n": 2, "inner": {}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/embeddings"])
async def test_where_kv_lies_does_not_come_back(route: str, stream: bool) -> None:
    place = {"remote_engine_id": MARK, "remote_block_ids": [1], "remote_port": 5}

    async def tells(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        message = {"role": "assistant", "content": 'the "kv_transfer_params": {} of vLLM'}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "disaggregated_params": place}
        if not body.get("stream"):
            return web.json_response({"id": "a", "choices": [choice], "kv_transfer_params": place})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        text = json.loads(chunk({"content": message["content"]}, finish="stop").removeprefix(b"data: "))
        text["choices"][0]["disaggregated_params"] = place
        data = b"data: " + json.dumps({**text, "kv_transfer_params": place}).encode() + b"\n\ndata: [DONE]\n\n"
        for start in range(0, len(data), 40):  # no piece has to be a whole event
            await response.write(data[start : start + 40])
        await response.write_eof()
        return response

    async with stand() as s:
        s.engines[0].reply = tells
        if route == "/v1/embeddings" and stream:
            pytest.skip("no such route streams")
        answer = await s.http.post(route, json={**ROUTES[route], "stream": stream})
        text = await answer.text()
        assert MARK not in text and "of vLLM" in text


async def pinned(s: Stand, **headers: str) -> str:
    answer = await s.chat(headers={"x-penstock-worker": "e1", **headers})
    return f"{answer.headers['x-penstock-worker']} {answer.headers.get('x-penstock-ignored-hints', '')}".strip()


async def test_a_pin_needs_the_right_to_pin() -> None:
    async with stand(2) as s:
        assert await pinned(s) == "e1", "whoever is on this machine and needs no key"
    keyed = SecuritySettings(api_keys=("k",))
    async with stand(2, frontend=FrontendSettings(security=keyed)) as s:
        for _ in range(3):
            answer = await pinned(s, authorization="Bearer k")
            assert answer.endswith("pin.worker")
    keyed = SecuritySettings(api_keys=("k",), pins=True)
    async with stand(2, frontend=FrontendSettings(security=keyed)) as s:
        assert await pinned(s, authorization="Bearer k") == "e1"
    tenants = {"a": TenantSettings(keys=("ka",), pins=True), "b": TenantSettings(keys=("kb",))}
    async with stand(2, settings=ClusterSettings(tenants=tenants)) as s:
        assert await pinned(s, authorization="Bearer ka") == "e1"
        assert (await pinned(s, authorization="Bearer kb")).endswith("pin.worker")
