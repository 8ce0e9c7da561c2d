"""Are requests of other APIs translated, refused and answered as docs/reference/api.md says? Without their clients."""

import asyncio
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from penstock.adapters.engines.http.event_stream import chunks_of
from penstock.config.settings.frontend_settings import FrontendSettings, SecuritySettings
from penstock.frontend.dialects import chat_call, messages_request, response_reach, responses_request
from penstock.frontend.dialects.body_fields import folded
from penstock.frontend.dialects.dialect_answer import DialectAnswer, encoded
from penstock.frontend.dialects.messages_answer import MessagesAnswer
from penstock.frontend.dialects.response_tools import ResponseTools
from penstock.frontend.dialects.responses_answer import ResponsesAnswer
from penstock.frontend.exchange.client_answer import TokenTiming
from penstock.frontend.exchange.prefix_warming import SpokenMessage
from penstock.frontend.exchange.sse import SseTap
from penstock.frontend.http.error_responses import sse_error
from penstock.frontend.openai import token_routes
from penstock.frontend.prompt import request_body
from penstock.frontend.prompt.context_overflow import CODE
from penstock.frontend.prompt.prompt_tokenizer import load_tokenizer
from penstock.frontend.prompt.request_body import parse
from penstock.frontend.response_store import RESPONSE_BYTES_MAX, RESPONSE_TTL, ResponseStore, StoredResponse
from penstock.kernel.errors import ClientError, EngineError
from tests.frontend.scripted_answers import CALLS, USAGE, script
from tests.frontend.stand import chunk, eventually, stand
from tests.frontend.test_migration import cut, engines

DOC = (Path(__file__).parents[2] / "docs/reference/api.md").read_text()
MESSAGE: Any = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
VIDEO, TOOL = {"type": "video"}, {"name": "a", "input_schema": {}}
FILES = [{"type": "input_file", "filename": "a.pdf", "file_data": "data:"}, {"type": "input_image", "file_id": "f"}]
SEARCH = {"type": "web_search"}
STREAM = b"".join(
    [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "h"}) + b": waiting\n\n",
        chunk({"reasoning_content": "m"}),
        chunk({"content": "It "}),
        chunk({"content": "rains."}),
        chunk({"tool_calls": [{"index": 0, "id": "call_a", "function": {"name": "weather", "arguments": ""}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"city"'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": ': "Oslo"}'}}]}),
        chunk({}, finish="tool_calls"),
        b"data: " + json.dumps({"id": "a", "choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n",
    ]
)


def chat_of(module: Any, fields: Any, history: Any = ()) -> Any:
    """Return a request's chat, whatever of it is left out."""
    if module is messages_request:
        return messages_request.chat_of(fields, [])
    return responses_request.chat_of(fields, [*history], ResponseTools(fields, []), [])


def answer_of(which: str) -> DialectAnswer:
    """Return an answer whose stream is the same each time."""
    if which == "messages":
        message = MessagesAnswer("m", 20, TokenTiming())
        message._id = "msg_1"
        return message
    response = ResponsesAnswer(
        "resp_1", {"model": "m"}, ResponseTools({}, []), [], 20, TokenTiming(), lambda answer: None
    )
    response._created = 0
    return response


def fed(answer: DialectAnswer, data: bytes) -> bytes:
    """Return the bytes of an answer's stream for bytes of the chat's."""
    return encoded(answer.events(data))


@pytest.mark.parametrize("which", ["messages", "responses"])
@pytest.mark.parametrize("size", [1, 7, 64, 300])
def test_a_stream_cut_anywhere_gives_the_same_bytes(which: str, size: int) -> None:
    whole, cut = answer_of(which), answer_of(which)
    expected = fed(whole, STREAM)
    got = b"".join(fed(cut, STREAM[at : at + size]) for at in range(0, len(STREAM), size))
    assert expected.count(b"event: ") > 10 and got == expected
    assert [(item.kind, item.id, item.name, item.text) for item in cut.items] == [
        ("thinking", "", "", "hm"),
        ("text", "", "", "It rains."),
        ("call", "call_a", "weather", '{"city": "Oslo"}'),
    ]


@pytest.mark.parametrize("module, path", [(responses_request, "/v1/responses"), (messages_request, "/v1/messages")])
def test_every_field_has_its_row_in_the_table(module: Any, path: str) -> None:
    rows = {line.split(" | ")[1]: line for line in DOC.splitlines() if line.startswith(f"| `{path}` | ")}
    for name, fields in (("honoured", module.HONOURED), ("ignored", module.IGNORED), ("refused", module.REFUSED)):
        listed = set(rows[name].split(" | ")[2].replace("`", "").rstrip(" |").split(", "))
        assert listed == set(fields), name
    ignored, refused = set(module.IGNORED), set(module.REFUSED)
    assert not module.HONOURED & ignored and not (module.HONOURED | ignored) & refused


@pytest.mark.parametrize(
    "path, fields, left_out",
    [
        ("/v1/responses", {"text": {"verbosity": "low"}, "metadata": {"a": "b"}, "service_tier": "auto"}, []),
        ("/v1/responses", {"truncation": "disabled", "reasoning": {"effort": "low", "summary": None}}, []),
        ("/v1/responses", {"include": [], "client_metadata": {"a": "b"}, "max_tool_calls": 5}, []),
        ("/v1/responses", {"truncation": "auto", "service_tier": "flex"}, ["service_tier", "truncation"]),
        ("/v1/responses", {"reasoning": {"summary": "auto"}, "include": ["x"]}, ["include", "reasoning.summary"]),
        ("/v1/responses", {"text": {"new": 1}, "context_management": [{}]}, ["context_management", "text.new"]),
        ("/v1/responses", {"input": [{"role": "user", "content": FILES}]}, ["input.input_file", "input.input_image"]),
        ("/v1/messages", {"service_tier": "auto", "speed": "standard", "betas": ["x"]}, []),
        ("/v1/messages", {"thinking": {"type": "adaptive"}, "metadata": {"user_id": "u"}}, []),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 5}}, ["thinking.budget_tokens"]),
        (
            "/v1/messages",
            {"output_config": {"task_budget": {}}, "speed": "fast"},
            ["speed", "output_config.task_budget"],
        ),
        ("/v1/messages", {"context_management": {"edits": []}, "fallbacks": [{}]}, ["context_management", "fallbacks"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_field_without_an_effect_is_named_in_the_answer(
    path: str, fields: dict[str, Any], left_out: list[str], stream: bool
) -> None:
    own = {**MESSAGE} if path == "/v1/messages" else {"model": "m", "input": "x"}
    async with stand() as s:
        s.engines[0].reply = script("ok")
        got = await s.http.post(path, json={**own, **fields, "stream": stream})
        assert got.status == 200, await got.text()
        assert [name for name in got.headers.get("x-penstock-ignored-hints", "").split(", ") if name] == left_out
        text = await got.text()
        assert list(s.records[0].ignored_hints) == left_out
        if path == "/v1/responses":
            response = json.loads(text.rsplit("data: ", 1)[-1])
            response = response["response"] if stream else response
            note = {"penstock_left_out": ", ".join(left_out)} if left_out else {}
            assert response["metadata"] == {**fields.get("metadata", {}), **note}
            assert response["truncation"] == "disabled" and response["service_tier"] == "default"


def test_what_chats_have_too_is_passed_on() -> None:
    given = {"text": {"verbosity": "low"}, "metadata": {"program_id": "p"}, "reasoning": {"effort": "high"}}
    chat = chat_of(responses_request, {"model": "m", "input": "x", **given})
    assert (chat["verbosity"], chat["metadata"], chat["reasoning_effort"]) == ("low", given["metadata"], "high")
    answer = ResponsesAnswer(
        "resp_1", {"model": "m", **given}, ResponseTools({}, []), [], 20, TokenTiming(), lambda answer: None
    )
    assert answer.response("completed")["text"] == {"format": {"type": "text"}, "verbosity": "low"}


@pytest.mark.parametrize(
    "module, given, field",
    [
        (messages_request, {"mcp_servers": [{}]}, "mcp_servers"),
        (messages_request, {"max_tokens": None}, "max_tokens"),
        (messages_request, {"tools": [{"type": 5}]}, "tools[0].type"),
        (messages_request, {"messages": [{"role": "user", "content": [VIDEO]}]}, "messages[0].content[0].type"),
        (messages_request, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (messages_request, {"messages": ["x"]}, "messages[0]"),
        (
            messages_request,
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 7}]}]},
            "messages[0].content[0].content",
        ),
        (messages_request, {"tool_choice": {"type": "some"}, "tools": [TOOL]}, "tool_choice.type"),
        (responses_request, {"conversation": "c"}, "conversation"),
        (responses_request, {"input": None}, "input"),
        (responses_request, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (responses_request, {"input": [{"role": "user", "content": [VIDEO]}]}, "input[0].content[0].type"),
        (responses_request, {"tools": [{}]}, "tools[0].type"),
        (responses_request, {"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice"),
        (responses_request, {"tools": [SEARCH], "tool_choice": SEARCH}, "tool_choice.type"),
        (responses_request, {"tools": [{"type": "namespace", "name": "n", "tools": [7]}]}, "tools[0].tools[0]"),
        (responses_request, {"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)  # fmt: skip
def test_what_is_refused_names_its_field(module: Any, given: dict[str, Any], field: str) -> None:
    with pytest.raises(ClientError) as refused:
        chat_of(module, {**(MESSAGE if module is messages_request else {"model": "m", "input": "x"}), **given})
    assert refused.value.status == 400 and refused.value.param == field


FULL_MESSAGE: Any = {
    **MESSAGE,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x/a.png"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"b": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "r"}]}],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "metadata": {"user_id": "u"},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["x"],
}
FULL_RESPONSE: Any = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": "https://x/a.png", "detail": "low"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "r"}]},
        {"type": "custom_tool_call", "call_id": "b", "name": "c", "namespace": "n", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "r"},
        {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "a", "stderr": ""}]},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "g"}]},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": {}},
        {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c", "format": {"type": "text"}}]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "reasoning": {"effort": "low"},
    "metadata": {"program_id": "p"},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.mark.parametrize("full", [FULL_MESSAGE, FULL_RESPONSE])
def test_a_wrong_value_anywhere_is_refused_or_passed_on_and_never_our_bug(full: Any) -> None:
    refused = 0
    for path in places(full):
        for junk in (None, True, 7, -1.5, "junk", [], [[]], [None], {}, {"type": []}, {"type": "text", "text": 1}):
            body = copy.deepcopy(full)
            *way, last = path
            place = body
            for key in way:
                place = place[key]
            place[last] = junk
            try:
                chat = chat_of(messages_request if full is FULL_MESSAGE else responses_request, body)
                parse("chat_completions", json.dumps(chat).encode())
            except ClientError as error:
                refused += 1
                assert error.status == 400
    assert refused > 100


def test_what_a_model_did_in_one_turn_is_one_message() -> None:
    chats = chat_of(messages_request, FULL_MESSAGE), chat_of(responses_request, FULL_RESPONSE)
    turns = [next(m for m in chat["messages"] if m["role"] == "assistant") for chat in chats]
    assert [(turn["reasoning_content"], turn["tool_calls"][0]["id"]) for turn in turns] == [("t", "a")] * 2
    assert [[m["role"] for m in chat["messages"] if m["role"] != "system"][:3] for chat in chats] == [
        ["user", "assistant", "tool"]
    ] * 2


def test_all_that_a_model_did_before_a_result_is_one_message() -> None:
    def call(id: str) -> Any:
        return {"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"}

    def thought(text: str) -> Any:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    said = {"role": "assistant", "content": "So."}
    results = [{"type": "function_call_output", "call_id": id, "output": id} for id in "ab"]
    items = [{"role": "user", "content": "x"}, thought("h"), call("a"), said, thought("m"), call("b"), said, *results]
    responses = chat_of(responses_request, {"model": "m", "input": items})["messages"]
    turns = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": "So."},
                                          {"type": "tool_use", "id": id, "name": "f", "input": {}}]}
        for id, thinking in (("a", "h"), ("b", "m"))
    ]  # fmt: skip
    given = [{"type": "tool_result", "tool_use_id": id, "content": id} for id in "ab"]
    anthropic = [{"role": "user", "content": "x"}, *turns, {"role": "user", "content": given}]
    assert chat_of(messages_request, {**MESSAGE, "messages": anthropic})["messages"] == responses
    assert [message["role"] for message in responses] == ["user", "assistant", "tool", "tool"]
    assert (responses[1]["content"], responses[1]["reasoning_content"]) == ("So.\n\nSo.", "h\n\nm")
    assert [made["id"] for made in responses[1]["tool_calls"]] == ["a", "b"]


def test_a_billing_line_does_not_spoil_the_cache() -> None:
    blocks = [{"type": "text", "text": f"x-anthropic-billing-header: {number}"} for number in (1, 2)]
    one, two = (
        chat_of(messages_request, {**MESSAGE, "system": [block, {"type": "text", "text": "Be short."}]})
        for block in blocks
    )
    assert one == two and one["messages"][0] == {"role": "system", "content": "Be short."}


def test_fields_of_chats_and_engines_are_passed_on() -> None:
    own = {"seed": 5, "nvext": {"cache_salt": "s"}, "min_p": 0.1}
    response = chat_of(responses_request, {"model": "m", "input": "x", **own})
    for chat in (chat_of(messages_request, {**MESSAGE, **own}), response):
        assert {name: chat[name] for name in own} == own


def test_instructions_and_first_system_items_are_one_message() -> None:
    items = [{"role": "developer", "content": "B"}, {"role": "user", "content": "C"}]
    given = {"model": "m", "instructions": "A", "input": items}
    assert [m["content"] for m in folded(chat_of(responses_request, given)["messages"], "user")] == ["A\n\nB", "C"]


def test_the_store_is_bounded_in_time_and_size() -> None:
    now = 0.0
    store = ResponseStore(lambda: now)
    for number in range(3):
        store.put(StoredResponse(f"r{number}", "a", "s", b"x" * (RESPONSE_BYTES_MAX // 2 - 1)))
    assert store.get("r0", "a") is None and store.get("r1", "a") is not None
    assert store.get("r1", "b") is None, "another key does not see it"
    now = RESPONSE_TTL + 1
    assert store.get("r1", "a") is None


async def test_other_apis_are_counted_routed_and_recorded_as_all_requests() -> None:
    async with stand() as s:
        s.engines[0].reply = script("ok", calls=CALLS)
        for path, body in (("/v1/messages", MESSAGE), ("/v1/responses", {"model": "m", "input": "x"})):
            for stream in (False, True):
                got = await s.http.post(path, json={**body, "stream": stream}, headers={"x-penstock-worker": "e0"})
                assert got.status == 200 and got.headers["x-penstock-worker"] == "e0"
                await got.read()
        assert [(r.outcome, r.isl > 0, r.osl, r.cached) for r in s.records] == [("ok", True, 9, 16)] * 4
        assert len({r.id for r in s.records}) == 4 and len(s.decisions) == 4


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_broken_answer_goes_on_at_another_engine_with_the_same_text(path: str) -> None:
    body = {"model": "sim", "stream": True, "ignore_eos": True, "temperature": 0}
    own = {"input": "How?", "max_output_tokens": 40} if path == "/v1/responses" else {**MESSAGE, "max_tokens": 40}
    texts = []
    async with engines() as (s, servers):
        for after in (0, 7):
            if after:
                cut(servers, after)
            answer = await s.http.post(path, json={**own, **body})
            found = [json.loads(line[6:]) for line in (await answer.text()).splitlines() if line.startswith("data: ")]
            assert found[-1]["type"] in ("message_stop", "response.incomplete")
            deltas = [event["delta"] for event in found if event["type"].endswith("delta") and "usage" not in event]
            texts.append("".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas))
        assert texts[0] == texts[1] and s.records[1].attempts == 2


async def test_an_ending_process_hands_its_responses_to_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_reach, "PIECE", 10)
    async with stand() as s, stand() as other, stand() as ending:
        ids = ["resp_" + character * 32 for character in "abc"]
        never = s.service.responses.run(asyncio.Event().wait())  # type: ignore[arg-type]
        background = b'{"status":"in_progress","background":true}'
        s.service.responses.put(StoredResponse(ids[0], "", "s0", b"x" * 20, b"[1]"))
        s.service.responses.put(StoredResponse(ids[1], "key", "s1", b"{}"))
        s.service.responses.put(StoredResponse(ids[2], "", "s2", background, task=never))
        ending.service.gate.draining = True
        cards = {at: SimpleNamespace(admin_url=stood.server.own_url) for at, stood in (("1", ending), ("2", other))}
        s.service.cluster._node.peers = SimpleNamespace(cards=cards)  # type: ignore[attr-defined]
        await response_reach.hand_over(s.service)
        taken = other.service.responses
        kept = taken.get(ids[0], "")
        assert kept is not None and (kept.session, kept.body, kept.items) == ("s0", b"x" * 20, b"[1]")
        assert taken.get(ids[1], "") is None and taken.get(ids[1], "key") is not None
        failed = taken.get(ids[2], "")
        assert failed is not None and json.loads(failed.body)["status"] == "failed"
        assert ending.service.responses.all_for_peers() == []
        async with aiohttp.ClientSession() as http:
            url = f"{other.server.own_url}/peer/responses?digest=00"
            assert (await http.post(url, data=b"\x90")).status == 400, "a body that nobody signed"
            assert (await http.get(f"{other.server.url}/peer/responses/{ids[0]}?owner=")).status == 404


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", "invalid_prompt"),
        (429, "rate_limit_error", "rate_limit_exceeded"),
        (503, "overloaded_error", "server_error"),
        (502, "api_error", "server_error"),
        (504, "timeout_error", "server_error"),
    ],
)
def test_an_error_within_a_stream_is_of_its_kind(status: int, kind: str, code: str) -> None:
    broken = chunk({"content": "a"}) + sse_error(status, "the words")
    message = fed(answer_of("messages"), broken)
    assert json.loads(message.rsplit(b"data: ", 1)[1])["error"] == {"type": kind, "message": "the words"}
    response = fed(answer_of("responses"), broken)
    assert json.loads(response.rsplit(b"data: ", 1)[1])["response"]["error"] == {"code": code, "message": "the words"}


@pytest.mark.parametrize("which", ["messages", "responses"])
def test_a_context_that_overflows_after_the_streams_begin_has_the_words_to_compact(which: str) -> None:
    said = fed(answer_of(which), sse_error(400, "This model's maximum context length is 5", code=CODE))
    assert (b"prompt is too long" if which == "messages" else CODE.encode()) in said


async def silent_about_usage(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer twelve pieces of text, and no usage; whole, they are 48 bytes."""
    if not body.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": "abc " * 12}, "finish_reason": "stop"}
        return web.json_response({"id": "a", "choices": [choice], "usage": None})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for number in range(12):
        await response.write(chunk({"content": "abc "}, finish="stop" if number == 11 else None))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_tokens_are_counted_here_where_an_engine_does_not_tell_them(path: str, stream: bool) -> None:
    text = "word " * 400
    async with stand() as s:
        own = (
            {"input": text} if path == "/v1/responses" else {**MESSAGE, "messages": [{"role": "user", "content": text}]}
        )
        usages = []
        for reply in (silent_about_usage, script("ok")):
            s.engines[0].reply = reply
            got = await (await s.http.post(path, json={"model": "m", **own, "stream": stream})).text()
            events = [json.loads(line[6:]) for line in got.splitlines() if line.startswith("data: ")]
            if not stream:
                usages.append(json.loads(got)["usage"])
            else:
                last = next(event for event in reversed(events) if "usage" in event or "response" in event)
                usages.append(last.get("usage") or last["response"]["usage"])
        counted, told = usages
        assert counted["penstock_counted"] is True and "penstock_counted" not in told
        assert 300 < counted["input_tokens"] < 600 and counted["output_tokens"] == 12
        assert counted.get("total_tokens", 0) in (0, counted["input_tokens"] + 12)
        assert told["output_tokens"] == USAGE["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", ["", "Oslo", '{"city": "Os', '["Oslo"]', "null", '{"city": "Oslo"}'])
async def test_arguments_that_are_no_object_can_be_decoded_there_and_in_the_history(words: str, stream: bool) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": words}}
    expected = (
        json.loads(words) if words.startswith("{") and words.endswith("}") else {"arguments": words} if words else {}
    )
    async with stand() as s:
        s.engines[0].reply = script(calls=[call], finish="tool_calls")
        got = await s.http.post("/v1/responses", json={"model": "m", "input": "x", "stream": stream})
        text = await got.text()
        response = json.loads(text.rsplit("data: ", 1)[-1])
        response = response["response"] if stream else response
        assert json.loads(response["output"][0]["arguments"]) == expected
        if stream:
            done = next(line for line in text.splitlines() if "function_call_arguments.done" in line and "data" in line)
            assert json.loads(done[6:])["arguments"] == response["output"][0]["arguments"]
        s.engines[0].reply = script("ok")
        result = {"type": "function_call_output", "call_id": "c", "output": "rain"}
        raw = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": words}
        for more in ({"previous_response_id": response["id"], "input": [result]}, {"input": [raw, result]}):
            assert (await s.http.post("/v1/responses", json={"model": "m", **more})).status == 200
            sent = json.loads(s.engines[0].bodies[-1])["messages"]
            calls = [call for message in sent for call in message.get("tool_calls") or ()]
            assert [json.loads(each["function"]["arguments"]) for each in calls] == [expected]
        if not stream:
            s.engines[0].reply = script(calls=[call], finish="tool_calls")
            message = await (await s.http.post("/v1/messages", json=MESSAGE)).json()
            assert message["content"][0]["input"] == expected, "both APIs mend alike"


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/v1/messages", 405),
        ("GET", "/v1/messages/count_tokens", 405),
        ("POST", "/v1/messages/batches", 404),
        ("GET", "/v1/messages/batches/b", 404),
        ("POST", "/v1/messages", 400),
        ("POST", "/v1/messages/count_tokens", 400),
    ],
)
async def test_every_error_below_messages_has_anthropics_shape(method: str, path: str, status: int) -> None:
    async with stand() as s:
        got = await s.http.request(method, path, json={} if method == "POST" else None)
        body = await got.json()
        assert got.status == status and body["type"] == "error" and body["request_id"] == got.headers["request-id"]
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        assert body["error"]["type"] == kind and body["error"]["message"]
        other = await (await s.http.request(method, path.replace("messages", "messages2"))).json()
        assert other["error"]["code"], "other paths keep OpenAI's"


async def test_a_wrong_key_and_an_unknown_model_have_anthropics_shape_too() -> None:
    settings = FrontendSettings(security=SecuritySettings(api_keys=("right",)))
    async with stand(frontend=settings) as s:
        for path in ("/v1/messages", "/v1/messages/batches"):
            got = await s.http.post(path, json=MESSAGE)
            assert got.status == 401 and (await got.json())["error"]["type"] == "authentication_error"
        unknown = await s.http.post("/v1/messages", json={**MESSAGE, "model": "no"}, headers={"x-api-key": "right"})
        assert unknown.status == 404 and (await unknown.json())["error"]["type"] == "not_found_error"


def fragment(index: Any = None, id: Any = None, name: Any = None, arguments: Any = None) -> dict[str, Any]:
    """Return a fragment of a call, without what it does not say."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {key: value for key, value in (("index", index), ("id", id), ("function", function)) if value is not None}


A, B, ARGUMENTS = ("call_a", "weather"), ("call_b", "time"), ('{"city": ', '"Oslo"}')
TEXT, THOUGHT = {"content": "\n"}, {"reasoning_content": "hm"}
FRAGMENTED: dict[str, list[dict[str, Any]]] = {
    "one after the other": [
        fragment(0, *A), fragment(0, arguments=ARGUMENTS[0]), fragment(0, arguments=ARGUMENTS[1]),
        fragment(1, *B), fragment(1, arguments=ARGUMENTS[0]), fragment(1, arguments=ARGUMENTS[1]),
    ],
    "in turns": [
        fragment(0, *A), fragment(1, *B), fragment(0, arguments=ARGUMENTS[0]), fragment(1, arguments=ARGUMENTS[0]),
        fragment(0, arguments=ARGUMENTS[1]), fragment(1, arguments=ARGUMENTS[1]),
    ],
    "the second begins first": [
        fragment(1, *B), fragment(0, *A), fragment(1, arguments=ARGUMENTS[0]), fragment(0, arguments=ARGUMENTS[0]),
        fragment(1, arguments=ARGUMENTS[1]), fragment(0, arguments=ARGUMENTS[1]),
    ],
    "all at index 0": [
        fragment(0, *A, arguments=ARGUMENTS[0]), fragment(0, arguments=ARGUMENTS[1]),
        fragment(0, *B, arguments=ARGUMENTS[0]), fragment(0, arguments=ARGUMENTS[1]),
    ],
    "at index 0 with their ids in every fragment": [
        fragment(0, *A, arguments=ARGUMENTS[0]), fragment(0, *A, arguments=ARGUMENTS[1]),
        fragment(0, *B, arguments=ARGUMENTS[0]), fragment(0, *B, arguments=ARGUMENTS[1]),
    ],
    "without an index": [
        fragment(None, *A, arguments=ARGUMENTS[0]), fragment(arguments=ARGUMENTS[1]),
        fragment(None, *B, arguments=ARGUMENTS[0]), fragment(arguments=ARGUMENTS[1]),
    ],
    "without an index, in turns": [
        fragment(None, *A), fragment(None, *B), fragment(None, A[0], arguments=ARGUMENTS[0]),
        fragment(None, B[0], arguments=ARGUMENTS[0]), fragment(None, A[0], arguments=ARGUMENTS[1]),
        fragment(None, B[0], arguments=ARGUMENTS[1]),
    ],
    "whole and at index 0": [
        fragment(0, *A, arguments="".join(ARGUMENTS)), fragment(0, *B, arguments="".join(ARGUMENTS)),
    ],
    "the name in the second fragment": [
        fragment(0, A[0]), fragment(0, name=A[1], arguments=ARGUMENTS[0]), fragment(0, arguments=ARGUMENTS[1]),
        fragment(1, B[0], arguments=""), fragment(1, name=B[1]), fragment(1, arguments="".join(ARGUMENTS)),
    ],
    "the id in the second fragment": [
        fragment(0, name=A[1]), fragment(0, A[0], arguments=ARGUMENTS[0]), fragment(0, arguments=ARGUMENTS[1]),
        fragment(1, name=B[1]), fragment(1, B[0]), fragment(1, arguments="".join(ARGUMENTS)),
    ],
    "each fragment with an id of its own": [
        fragment(0, *A, arguments=ARGUMENTS[0]), fragment(0, "call_x", arguments=ARGUMENTS[1]),
        fragment(0, *B), fragment(0, "call_y", arguments=ARGUMENTS[0]), fragment(0, "call_z", arguments=ARGUMENTS[1]),
    ],
    "arguments as objects": [
        fragment(0, *A, arguments={"city": "Oslo"}), fragment(1, *B, arguments={"city": "Oslo"}),
    ],
    "null where something is left out": [
        {"index": 0, "id": A[0], "function": {"name": A[1], "arguments": None}},
        {"index": 0, "id": None, "function": {"name": None, "arguments": "".join(ARGUMENTS)}},
        {"index": 1, "id": B[0], "function": {"name": B[1], "arguments": "".join(ARGUMENTS)}},
    ],
}  # fmt: skip


def calls_of(which: str, answer: DialectAnswer, body: bytes) -> list[tuple[str, str, Any]]:
    """Return the calls of a stream's events, put together as clients of the API do, in the order of their ids."""
    open_blocks: dict[int, list[Any]] = {}
    found: list[tuple[str, str, Any]] = []
    for event in chunks_of(body):
        kind = event["type"]
        if kind in ("content_block_start", "response.output_item.added"):
            assert not open_blocks, "two blocks are open"
            block = event.get("content_block") or event["item"]
            open_blocks[event.get("index", event.get("output_index"))] = [block, ""]
        elif kind in ("content_block_delta", "response.function_call_arguments.delta"):
            delta = event["delta"] if isinstance(event["delta"], str) else event["delta"].get("partial_json", "")
            open_blocks[event.get("index", event.get("output_index"))][1] += delta
        elif kind in ("content_block_stop", "response.output_item.done"):
            block, text = open_blocks.pop(event.get("index", event.get("output_index")))
            if block["type"] in ("tool_use", "function_call"):
                found.append((block.get("call_id") or block["id"], block["name"], json.loads(text)))
            if which == "responses" and block["type"] == "function_call":
                assert event["item"]["arguments"] == text and event["item"]["name"] == block["name"]
    assert not open_blocks
    return sorted(found)


@pytest.mark.parametrize("which", ["messages", "responses"])
@pytest.mark.parametrize("between", [None, TEXT, THOUGHT])
@pytest.mark.parametrize("how", FRAGMENTED)
def test_calls_in_fragments_are_the_same_calls_whole(how: str, between: dict[str, Any] | None, which: str) -> None:
    stream = chunk({"role": "assistant", "content": ""})
    for piece in FRAGMENTED[how]:
        stream += chunk({"tool_calls": [piece]}) + (chunk(between) if between else b"")
    stream += chunk({}, finish="tool_calls") + b"data: [DONE]\n\n"
    made = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": "".join(ARGUMENTS)}}
        for id, name in (A, B)
    ]
    choice = {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": made}}
    whole = json.loads(answer_of(which).whole(json.dumps({"choices": [choice]}).encode()))
    expected = [
        (item["id"], item["name"], item["input"])
        if which == "messages"
        else (item["call_id"], item["name"], json.loads(item["arguments"]))
        for item in whole["content" if which == "messages" else "output"]
    ]
    answer = answer_of(which)
    assert calls_of(which, answer, fed(answer, stream)) == expected == [(*A, {"city": "Oslo"}), (*B, {"city": "Oslo"})]
    spoken = SpokenMessage()
    spoken.take(stream)
    message = spoken.message(streamed=True)
    assert message is not None
    assert (
        sorted(
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message["tool_calls"]
        )
        == expected
    )


def test_a_call_goes_out_as_it_comes_and_the_next_one_when_it_is_whole() -> None:
    answer = answer_of("messages")
    fed(answer, chunk({"tool_calls": [fragment(0, *A)]}))
    assert b"city" in fed(answer, chunk({"tool_calls": [fragment(0, arguments=ARGUMENTS[0])]}))
    assert fed(answer, chunk({"tool_calls": [fragment(1, *B)]})) == b""
    assert b"call_b" in fed(answer, chunk({"tool_calls": [fragment(0, arguments=ARGUMENTS[1])]}))


THINKING = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "Paris"}]


@pytest.mark.parametrize("which", ["messages", "responses"])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"content": THINKING}, [("thinking", "hm"), ("text", "Paris")]),
        ({"content": ["Par", {"type": "text", "text": "is"}]}, [("text", "Paris")]),
        ({"content": {"type": "text", "text": "Paris"}}, [("text", "Paris")]),
        ({"content": {"type": "text", "content": "Paris"}}, [("text", "Paris")]),
        ({"content": None, "refusal": "No."}, [("text", "No.")]),
        ({"reasoning": {"content": "hm"}, "content": "Paris"}, [("thinking", "hm"), ("text", "Paris")]),
        ({"tool_calls": [{"id": "a", "index": "0", "function": {"name": "f", "arguments": "{}"}}]}, [("call", "{}")]),
        ({"reasoning": "hm", "content": "Paris"}, [("thinking", "hm"), ("text", "Paris")]),
        ({"tool_calls": [{"id": 7, "index": None, "function": {"name": "f", "arguments": {"a": 1}}}]},
         [("call", '{"a": 1}')]),
        ({"tool_calls": [{"id": "a", "name": "f", "arguments": {}}]}, [("call", "{}")]),
        ({"function_call": {"name": "f", "arguments": "{}"}}, [("call", "{}")]),
    ],
)  # fmt: skip
def test_other_types_are_read(which: str, streamed: bool, said: dict[str, Any], expected: list[Any]) -> None:
    answer = answer_of(which)
    if streamed:
        fed(answer, chunk(said) + chunk({}, finish="stop") + b"data: [DONE]\n\n")
    else:
        answer.whole(json.dumps({"choices": [{"index": None, "message": said, "finish_reason": "stop"}]}).encode())
    assert [(item.kind, item.text) for item in answer.items] == expected


JUNK = (None, True, 7, -1.5, "junk", [], [[]], [None], {}, {"type": []}, {"type": "text", "text": 1}, ["stop"])


@pytest.mark.parametrize("which", ["messages", "responses"])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_wrong_value_anywhere_in_an_answer_is_read_or_the_engines_fault(which: str, streamed: bool) -> None:
    said = {"role": "assistant", "content": '<|start|>"x', "reasoning_content": "h", "tool_calls": CALLS}
    choice = {"index": 0, "delta" if streamed else "message": said, "finish_reason": "stop", "stop_reason": None}
    full, unread = {"choices": [choice], "usage": USAGE}, 0
    for path in places(full):
        for junk in JUNK:
            body = copy.deepcopy(full)
            *way, last = path
            place: Any = body
            for key in way:
                place = place[key]
            place[last] = junk
            raw, spoken = json.dumps(body).encode(), SpokenMessage()
            try:
                if streamed:
                    raw = SseTap(strip_usage=True).feed(b"data: " + raw + b"\n\n")
                spoken.take(raw)
                spoken.message(streamed=streamed)
                if streamed:
                    fed(answer_of(which), raw + b"data: [DONE]\n\n")
                else:
                    answer_of(which).whole(raw)
            except EngineError:
                unread += 1
    assert unread > 50


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    "said",
    [
        *({"content": 7}, {"content": [{"type": "hologram"}]}, {"tool_calls": ["f"]}, "Paris"),
        {"tool_calls": [{"index": "first", "id": "a", "function": {"name": "f", "arguments": "{}"}}]},
    ],
)
async def test_what_can_not_be_read_is_the_engines_fault(path: str, streamed: bool, said: Any) -> None:
    async with stand() as s:

        async def strange(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if not streamed:
                return web.json_response({"choices": [{"index": 0, "message": said, "finish_reason": "stop"}]})
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(chunk({"content": "So."}))
            await response.write(chunk(said) + chunk({}, finish="stop") + b"data: [DONE]\n\n")
            return response

        s.engines[0].reply = strange
        answer = await s.http.post(path, json={**MESSAGE, "input": "x", "stream": streamed})
        assert answer.status == 200 if streamed else answer.status in (500, 502)
        text = await answer.read()
        assert b"be read" in text or (said == "Paris" and b"the engine answered" in text)
        if streamed:
            events = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: ")]
            assert events[0]["type"] in ("message_start", "response.created") and b"So." in text
            numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
            assert numbers == list(range(len(numbers)))
        await eventually(lambda: s.records)
        assert (s.records[0].outcome, s.records[0].fault) == ("failed", "engine")


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"[]", b'{"choices": null}', b'{"choices": []}', b"Internal Server Error", b""),
        *(b'{"choices": [{"message": null}]}', b'{"choices": [{"message": "Paris"}]}'),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
async def test_a_whole_answer_that_is_none_is_the_engines_fault(path: str, body: bytes) -> None:
    async with stand() as s:

        async def strange(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
            return web.Response(body=body, content_type="application/json")

        s.engines[0].reply = strange
        answer = await s.http.post(path, json={**MESSAGE, "input": "x"})
        assert answer.status in (500, 502)
        await eventually(lambda: s.records)
        assert (s.records[0].outcome, s.records[0].fault, s.records[0].status) == ("failed", "engine", 502)


ODD = [
    b'\xef\xbb\xbf{"choices": [{"index": 0, "SAID": {"content": "Hm"}, "finish_reason": "stop"}]}',
    b'{"choices": [{"index": 0, "SAID": {"content": "Hm"}, "logprobs": NaN, "finish_reason": "stop"}]}',
    b'{"choices": [{"index": 0, "SAID": {"content": "Hm\\ud83d"}, "finish_reason": "stop"}]}',
    b'{"choices": [{"index": 0, "SAID": {"content": "Hm\xff"}, "finish_reason": "stop"}]}',
]
"""What Python's and other writers of JSON make, and the standard has not."""


@pytest.mark.parametrize("body", ODD)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
async def test_json_of_other_writers_is_read(path: str, streamed: bool, body: bytes) -> None:
    async with stand() as s:

        async def odd(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
            said = body.replace(b"SAID", b"delta" if streamed else b"message")
            if streamed:
                return web.Response(body=b"data: " + said + b"\n\n", content_type="text/event-stream")
            return web.Response(body=said, content_type="application/json")

        s.engines[0].reply = odd
        answer = await s.http.post(path, json={**MESSAGE, "input": "x", "stream": streamed})
        assert answer.status == 200 and b"Hm" in await answer.read()
        assert s.records[0].outcome == "ok"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_whole_answer_that_can_not_be_read_is_got_elsewhere(path: str) -> None:
    async with stand(2) as s:

        async def strange(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"choices": [{"index": 0, "message": {"content": 7}, "finish_reason": "stop"}]})

        s.engines[0].reply, s.engines[1].reply = strange, script("ok")
        for _ in range(2):
            answer = await s.http.post(path, json={**MESSAGE, "input": "x"})
            assert answer.status == 200 and b'"ok"' in await answer.read()
        assert {record.outcome for record in s.records} == {"ok"} and max(r.attempts for r in s.records) == 2


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", MESSAGE),
        ("/v1/messages", MESSAGE),
        ("/v1/responses", {"model": "m", "input": "x"}),
        ("/tokenize", MESSAGE),
    ],
)
async def test_a_body_is_decoded_once(path: str, fields: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    decode = request_body.decode_object

    def counted(raw: bytes) -> Any:
        decoded.append(raw)
        return decode(raw)

    for module in (request_body, chat_call, token_routes):
        monkeypatch.setattr(module, "decode_object", counted)
    tokenizer = load_tokenizer("builtin:sim", cache_bytes=1 << 20)
    async with stand(tokenizer=tokenizer) as s, s.http.post(path, json=fields) as answer:
        assert answer.status == 200, await answer.text()
    assert len(decoded) == 1
