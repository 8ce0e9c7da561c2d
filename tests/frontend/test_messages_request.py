"""Does a conversation of an agent over /v1/messages reach an engine whole, whatever its turns and tools are made of?"""

import json
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.frontend.dialects.body_fields import folded
from penstock.kernel.errors import ClientError
from tests.frontend.scripted_answers import script
from tests.frontend.stand import Stand, stand
from tests.frontend.test_dialects import MESSAGE, chat_of, messages_request

PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
ASKED = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": [CALL]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "42"}]},
]
AGENT: list[Any] = [
    *ASKED,
    {"role": "system", "content": [{"type": "text", "text": "The user is away."}]},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "And now?"},
]
"""As Claude Code writes: a system message between turns."""


async def strict(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer as an engine does whose template wants one system message first, and turns that alternate."""
    roles = [message["role"] for message in body["messages"] if message["role"] != "tool"]
    if "system" in roles[1:] or any(one == two == "user" for one, two in pairwise(roles)):
        return web.json_response(
            {"error": {"message": f"System message must be at the beginning: {roles}"}}, status=400
        )
    return await script("ok")(request, body)


def settings(late: Any) -> ClusterSettings:
    return ClusterSettings(models={"m": ModelSettings(late_system=late, pools={"main": PoolSettings()})})


async def sent(s: Stand, path: str = "/v1/messages", headers: dict[str, str] | None = None, **fields: Any) -> Any:
    """Return what the engine was asked."""
    body = {**MESSAGE, **fields} if path == "/v1/messages" else {"model": "m", **fields}
    got = await s.http.post(path, json=body, headers=headers or {})
    assert got.status == 200, await got.text()
    return json.loads(s.engines[0].bodies[-1])


async def test_a_later_system_message_keeps_the_prefix_and_suits_a_strict_template() -> None:
    async with stand() as s:
        s.engines[0].reply = strict
        before = await sent(s, system="Be short.", messages=ASKED)
        chat = await sent(s, system="Be short.", messages=AGENT)
        assert chat["messages"][: len(before["messages"])] == before["messages"]
        moved = chat["messages"][len(before["messages"])]
        assert moved == {"role": "user", "content": "<system>\nThe user is away.\n</system>"}
        later = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        note = {"role": "developer", "content": [{"type": "input_text", "text": "Approved."}]}
        chat = await sent(s, "/v1/responses", instructions="Be short.", input=[*later, note, later[0]])
        assert [m["role"] for m in chat["messages"]] == ["system", "user", "assistant", "user"]
        assert chat["messages"][-1]["content"] == "<system>\nApproved.\n</system>\n\na"
        counted = await s.http.post("/v1/messages/count_tokens", json={"model": "m", "messages": AGENT})
        assert counted.status == 200 and (await counted.json())["input_tokens"] > 0


@pytest.mark.parametrize("late, roles", [("first", "system user assistant tool assistant user"), ("keep", None)])
async def test_the_setting_says_what_becomes_of_it(late: str, roles: str | None) -> None:
    async with stand(settings=settings(late)) as s:
        s.engines[0].reply = script("ok")
        chat = await sent(s, system="Be short.", messages=AGENT)
        got = " ".join(message["role"] for message in chat["messages"])
        assert got == (roles or "system user assistant tool system assistant user")
        assert chat["messages"][0]["content"] == ("Be short." if roles is None else "Be short.\n\nThe user is away.")


def test_system_messages_are_joined_and_turns_alternate() -> None:
    picture = [{"type": "image_url", "image_url": {"url": "https://x"}}]
    given: list[Any] = [
        {"role": "system", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": picture},
        {"role": "system", "content": "c"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    got = folded(given, "user")
    assert [message["role"] for message in got] == ["system", "user", "user"], "two turns of the user stay two"
    assert got[0]["content"] == "a\n\nb" and got[2]["content"] == "f"
    assert got[1]["content"][0] == picture[0]
    texts = [part["text"] for part in got[1]["content"][1:]]
    assert texts == ["<system>\nc\n</system>", "<system>\nd\n</system>", "e"]
    assert folded(given, "keep") == [{"role": "system", "content": "a\n\nb"}, *given[2:]]
    assert given[2]["content"] == picture, "the messages given are not changed"


@pytest.mark.parametrize("late, where", [("user", 4), ("first", 0), ("keep", 2)])
def test_a_call_and_its_results_stay_together(late: Any, where: int) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": []}
    results = [{"role": "tool", "tool_call_id": id, "content": "r"} for id in "ab"]
    system = {"role": "system", "content": "hurry"}
    got = folded([{"role": "user", "content": "x"}, call, system, *results], late)
    assert [index for index, message in enumerate(got) if "hurry" in str(message["content"])] == [where]
    assert [message for message in got if message["role"] in ("assistant", "tool")] == [call, *results]


async def test_a_system_message_for_one_turn_and_its_effort() -> None:
    note = {"role": "system", "content": "Once.", "clear_at": "next_user_message", "output_config": {"effort": "max"}}
    async with stand() as s:
        s.engines[0].reply = strict
        now = await sent(s, messages=[*ASKED, note], output_config={"effort": "low"}, thinking={"type": "adaptive"})
        assert "Once." in now["messages"][-1]["content"] and now["reasoning_effort"] == "max"
        assert now["chat_template_kwargs"] == {"enable_thinking": True}
        said = {"role": "assistant", "content": "b"}
        later = await sent(s, messages=[*ASKED, note, said, {"role": "user", "content": "Next."}])
        assert "Once." not in json.dumps(later["messages"])
        plain = await sent(s, output_config={"effort": "low"}, thinking={"type": "disabled"})
        assert plain["reasoning_effort"] == "low" and plain["chat_template_kwargs"] == {"enable_thinking": False}
        assert "reasoning_effort" not in await sent(s)


BLOCKS: list[tuple[Any, str, str]] = [
    ({"type": "document", "source": {"type": "text", "data": "D"}, "title": "T", "context": "C"}, "T\nC\nD", ""),
    ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "D"}]}}, "D", ""),
    ({"type": "document", "source": {"type": "content", "content": "D"}}, "D", ""),
    ({"type": "document", "source": PDF, "title": "Bill"}, "[The document Bill is not shown", "messages.document"),
    ({"type": "document", "source": {"type": "url", "url": "https://x"}}, "[The document is not", "messages.document"),
    ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "[The image is not shown", "messages.image"),
    (
        {"type": "search_result", "source": "https://x", "title": "T", "content": [{"type": "text", "text": "D"}]},
        "T\nhttps://x\nD",
        "",
    ),
    ({"type": "tool_reference", "tool_name": "f"}, "The tool f is available.", ""),
    ({"type": "container_upload", "file_id": "f"}, "", "messages.container_upload"),
    ({"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, "", "messages.web_search_tool_result"),
]


@pytest.mark.parametrize("block, text, left_out", BLOCKS)
@pytest.mark.parametrize("inside", ["user", "tool_result"])
async def test_what_can_be_said_in_text_is_and_the_rest_is_left_out_by_name(
    block: Any, text: str, left_out: str, inside: str
) -> None:
    async with stand() as s:
        s.engines[0].reply = strict
        more = [block, {"type": "text", "text": "."}]
        result = {"type": "tool_result", "tool_use_id": "c", "content": more if inside == "tool_result" else "r"}
        content = [result, *(more if inside == "user" else [])]
        chat = await sent(s, messages=[*ASKED[:2], {"role": "user", "content": content}])
        last = chat["messages"][-1]
        assert last["role"] == ("tool" if inside == "tool_result" else "user")
        assert last["content"].startswith(text) and last["content"].endswith(".")
        assert list(s.records[0].ignored_hints) == ([left_out] if left_out else [])


async def test_a_history_with_blocks_of_the_vendors_tools_goes_on() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
    blocks: list[Any] = [
        {"type": "redacted_thinking", "data": "AAAA"},
        search,
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "content": "r"},
        {"type": "fallback", "from": {}, "to": {}},
        {"type": "something_new"},
        {"type": "compaction", "content": "What was said before."},
        {"type": "text", "text": " It rains."},
    ]
    async with stand() as s:
        s.engines[0].reply = strict
        turns = [ASKED[0], {"role": "assistant", "content": blocks}, ASKED[0]]
        chat = await sent(s, messages=turns)
        assert chat["messages"][1] == {"role": "assistant", "content": "What was said before. It rains."}
        assert set(s.records[0].ignored_hints) == {f"messages.{block['type']}" for block in blocks[:7]}


async def test_client_tools_are_functions_and_hosted_tools_are_left_out() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        {"type": "text_editor_20250124", "name": "str_replace_editor", "strict": True},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "computer_20251124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
        {"name": "mine", "input_schema": {"type": "object"}, "defer_loading": True},
    ]
    added = {"name": "later", "input_schema": {"type": "object"}, "description": "Comes later."}
    system = {
        "role": "system",
        "content": [
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": added}},
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "mine"}},
        ],
    }
    async with stand() as s:
        s.engines[0].reply = script(calls=[{"id": "c", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}])
        body = {**MESSAGE, "tools": tools, "tool_choice": {"type": "any"}, "messages": [*ASKED, system]}
        answer = await (await s.http.post("/v1/messages", json=body)).json()
        assert answer["content"][-1] == {"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "ls"}}
        chat = json.loads(s.engines[0].bodies[0])
        functions = {tool["function"]["name"]: tool["function"] for tool in chat["tools"]}
        names = ["bash", "str_replace_based_edit_tool", "str_replace_editor", "memory", "computer", "mine", "later"]
        assert list(functions) == names and chat["tool_choice"] == "required"
        assert set(functions["bash"]["parameters"]["properties"]) == {"command", "restart"}
        assert "str_replace" in functions["str_replace_based_edit_tool"]["parameters"]["properties"]["command"]["enum"]
        assert "800 x 600" in functions["computer"]["description"] and functions["str_replace_editor"]["strict"] is True
        assert (
            "The tool later is now available.\nThe tool mine is no longer available." in chat["messages"][-1]["content"]
        )
        kinds = ("web_search_20250305", "tool_search_tool_bm25_20251119", "mcp_toolset")
        assert s.records[0].ignored_hints == tuple(f"tools.{kind}" for kind in kinds)


@pytest.mark.parametrize(
    "choice, field",
    [({"type": "tool", "name": "web_search"}, "tool_choice.name"), ({"type": "any"}, "tool_choice.type")],
)
def test_a_choice_that_demands_a_hosted_tool_is_refused(choice: Any, field: str) -> None:
    hosted = [{"type": "web_search_20250305", "name": "web_search"}]
    with pytest.raises(ClientError) as refused:
        chat_of(messages_request, {**MESSAGE, "tools": hosted, "tool_choice": choice})
    assert refused.value.param == field
    auto = chat_of(messages_request, {**MESSAGE, "tools": hosted, "tool_choice": {"type": "auto"}})
    assert not {"tools", "tool_choice"} & auto.keys()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
async def test_an_agents_session_is_one(path: str) -> None:
    async with stand() as s:
        more = {"input": "x"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "x"}]}
        body = {"model": "m", "max_tokens": 5, **more}
        await s.http.post(path, json=body, headers={"X-Claude-Code-Session-Id": "s-1"})
        await s.http.post(path, json={**body, "prompt_cache_key": "thread-1"})
        assert [record.session for record in s.records] == ["s-1", "thread-1"]


@pytest.mark.parametrize(
    "content, text",
    [({"content": "no such file"}, "no such file"), ({"content": []}, "The tool failed."), ({}, "The tool failed.")],
)
def test_a_tool_that_failed_without_a_word_has_failed(content: dict[str, Any], text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "is_error": True, **content}
    chat = chat_of(messages_request, {**MESSAGE, "messages": [{"role": "user", "content": [result]}]})
    assert chat["messages"] == [{"role": "tool", "tool_call_id": "a", "content": text}]
