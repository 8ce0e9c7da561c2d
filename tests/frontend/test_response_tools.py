"""Are tools of the responses API flattened for a chat, named back in its answer, and left out by name?"""

import json
from typing import Any

import pytest

from penstock.frontend.dialects.response_tools import NAME_MAX, ResponseTools
from penstock.kernel.errors import ClientError
from tests.frontend.scripted_answers import script
from tests.frontend.stand import Stand, stand

PARAMETERS = {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"},
}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": f"Does {name}.", "strict": False, "parameters": PARAMETERS}


def namespace(name: str, *tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": f"About {name}.", "tools": list(tools)}


ALL = [
    function("send"),
    namespace("mail", function("send"), function("read"), {**PATCH, "name": "draft"}),
    namespace("chat__", function("send")),
    PATCH,
    {"type": "web_search", "external_web_access": False},
    {"type": "mcp", "server_label": "s", "server_url": "https://x"},
]
FUNCTIONS = ["send", "mail__send", "mail__read", "mail__draft", "chat__send", "apply_patch"]
"""What they are called in a chat."""


def call(name: str, arguments: str, id: str = "call_a") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def answered(s: Stand, **fields: Any) -> tuple[Any, list[Any]]:
    """Return the response, and the events where it is streamed."""
    got = await s.http.post("/v1/responses", json={"model": "m", "input": "x", "tools": ALL, **fields})
    text = await got.text()
    assert got.status == 200, text
    assert got.headers["x-penstock-ignored-hints"].split(", ")[:2] == ["tools.web_search", "tools.mcp"]
    if not fields.get("stream"):
        return json.loads(text), []
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    return events[-1]["response"], events


async def test_each_tool_is_one_function_and_hosted_tools_are_left_out_by_name() -> None:
    async with stand() as s:
        s.engines[0].reply = script("ok")
        response, _ = await answered(s, tool_choice="auto", metadata={"mine": "1"})
        sent = json.loads(s.engines[0].bodies[0])
        functions = {tool["function"]["name"]: tool["function"] for tool in sent["tools"]}
        assert list(functions) == FUNCTIONS and sent["tool_choice"] == "auto"
        assert functions["mail__send"]["parameters"] == PARAMETERS and functions["mail__send"]["strict"] is False
        assert functions["mail__send"]["description"] == "About mail.\n\nDoes send."
        assert functions["mail__read"]["description"] == "Does read."
        assert functions["apply_patch"]["parameters"]["required"] == ["input"]
        assert (
            "lark" in functions["apply_patch"]["description"]
            and "start: LINE+" in functions["mail__draft"]["description"]
        )
        assert response["metadata"] == {"mine": "1", "penstock_left_out": "tools.web_search, tools.mcp"}
        assert response["tools"] == ALL, "the answer repeats what was asked for"
        assert s.records[0].ignored_hints == ("tools.web_search", "tools.mcp")
        only, _ = await answered(s, tools=ALL[4:], tool_choice="auto", parallel_tool_calls=True)
        assert only["status"] == "completed"
        assert not {"tools", "tool_choice", "parallel_tool_calls"} & json.loads(s.engines[0].bodies[1]).keys()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "name, arguments, item",
    [
        ("mail__send", '{"to": "a"}', {"type": "function_call", "name": "send", "namespace": "mail"}),
        ("send", '{"to": "a"}', {"type": "function_call", "name": "send"}),
        ("chat__send", '{"to": "a"}', {"type": "function_call", "name": "send", "namespace": "chat__"}),
        ("unknown__send", '{"to": "a"}', {"type": "function_call", "name": "unknown__send"}),
        ("apply_patch", '{"input": "*** a\\n\\"b\\""}', {"type": "custom_tool_call", "name": "apply_patch"}),
        ("mail__draft", '{"input": ""}', {"type": "custom_tool_call", "name": "draft", "namespace": "mail"}),
        ("apply_patch", "*** a", {"type": "custom_tool_call", "name": "apply_patch"}),
    ],
)
async def test_a_call_has_its_own_name_back_and_the_conversation_the_functions(
    stream: bool, name: str, arguments: str, item: dict[str, Any]
) -> None:
    async with stand() as s:
        s.engines[0].reply = script("Well.", calls=[call(name, arguments)], finish="tool_calls")
        response, events = await answered(s, stream=stream)
        got = response["output"][1]
        assert {key: got.get(key) for key in ("type", "name", "namespace")} == {"namespace": None, **item}
        custom = item["type"] == "custom_tool_call"
        given = json.loads(arguments)["input"] if arguments.startswith("{") and custom else arguments
        assert got["input" if custom else "arguments"] == given and got["call_id"] == "call_a"
        if stream:
            about = [event for event in events if event.get("item_id") == got["id"]]
            assert "".join(event["delta"] for event in about if "delta" in event) == given
            kind = "custom_tool_call_input" if custom else "function_call_arguments"
            assert {event["type"] for event in about} == {f"response.{kind}.delta", f"response.{kind}.done"}
            assert about[-1].get("name", got["name"]) == got["name"]
            items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            assert items == response["output"]
        # The conversation goes on, by its id as by its items: the engine gets the same, and the functions' names.
        result = {"type": "custom_tool_call_output" if custom else "function_call_output", "call_id": "call_a"}
        result["output"] = "done"
        s.engines[0].reply = script("ok")
        await answered(s, input=[result], previous_response_id=response["id"])
        await answered(s, input=[{"role": "user", "content": "x"}, *response["output"], result])
        by_id, by_items = (json.loads(body)["messages"] for body in s.engines[0].bodies[-2:])
        assert by_id == by_items
        told = by_id[1]["tool_calls"][0]["function"]
        assert told["name"] == name and by_id[2] == {"role": "tool", "tool_call_id": "call_a", "content": "done"}
        assert json.loads(told["arguments"])["input" if custom else "to"] == (given if custom else "a")


@pytest.mark.parametrize(
    "choice, names, chosen",
    [
        ({"type": "function", "name": "send", "namespace": "mail"}, FUNCTIONS, "mail__send"),
        ({"type": "custom", "name": "apply_patch"}, FUNCTIONS, "apply_patch"),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}],
            },
            ["apply_patch"],
            "required",
        ),
        ({"type": "allowed_tools", "tools": [{"type": "namespace", "name": "mail"}]}, FUNCTIONS[1:4], "auto"),
        ({"type": "allowed_tools", "tools": [{"type": "function", "name": "send"}]}, ["send"], "auto"),
        ({"type": "function", "name": "send"}, FUNCTIONS, "send"),
        ({"type": "function", "name": "read"}, FUNCTIONS, "mail__read"),
        ({"type": "function", "name": "mail__read"}, FUNCTIONS, "mail__read"),
        ({"type": "allowed_tools", "tools": [{"type": "function", "name": "read"}]}, ["mail__read"], "auto"),
    ],
)
def test_a_choice_names_the_function(choice: Any, names: list[str], chosen: str) -> None:
    tools = ResponseTools({"tools": ALL}, [])
    chat = tools.chat_fields({"tools": ALL, "tool_choice": choice})
    assert [tool["function"]["name"] for tool in chat["tools"]] == names
    made = chat["tool_choice"]
    assert (made["function"]["name"] if isinstance(made, dict) else made) == chosen


@pytest.mark.parametrize("name, tools", [("gone", ALL), ("send", ALL[1:])])
def test_a_choice_that_names_no_tool_or_several_is_refused(name: str, tools: list[Any]) -> None:
    with pytest.raises(ClientError, match=name) as refused:
        ResponseTools({"tools": tools}, []).chat_fields({"tool_choice": {"type": "function", "name": name}})
    assert refused.value.param == "tool_choice.name"


def test_names_are_those_that_engines_take_and_never_two_of_the_same() -> None:
    long = "x" * 60
    given = [
        namespace("a", function("b"), function("b.c"), function(long)),
        namespace("a_", function("b")),
        namespace("a__b", function("c")),
        namespace("a", function("b__c")),
        {**PATCH, "name": "a b"},
        function("a__b"),
    ]
    left_out: list[str] = []
    tools = ResponseTools({"tools": given}, left_out)
    names = [tool["function"]["name"] for tool in tools.chat_fields({"tools": given})["tools"]]
    assert len(set(names)) == len(names) == 8 and not left_out
    assert all(len(name) <= NAME_MAX and name.replace("_", "").isalnum() for name in names)
    owners = [(tools.named(name).namespace, tools.named(name).name, tools.named(name).kind) for name in names]
    assert owners[0] == ("a", "b", "function") and owners[-1] == (None, "a__b", "function") and names[-1] == "a__b"
    assert len(set(owners)) == 8
    again = ResponseTools({"tools": given}, [])
    assert [again.flat(name, space) for space, name, _ in owners] == names, "a name is the same in each request"


HISTORY: list[Any] = [
    {"role": "user", "content": "a"},
    {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"},
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "file_search_call", "id": "f", "queries": ["q"], "status": "completed", "results": None},
    {
        "type": "code_interpreter_call",
        "id": "c",
        "code": "1",
        "container_id": "k",
        "outputs": [],
        "status": "completed",
    },
    {"type": "image_generation_call", "id": "i", "status": "completed", "result": "AAAA"},
    {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": []},
    {"type": "mcp_call", "id": "m", "server_label": "s", "name": "n", "arguments": "{}", "output": "o"},
    {"type": "computer_call", "id": "cc", "call_id": "k", "pending_safety_checks": [], "status": "completed"},
    {"type": "computer_call_output", "call_id": "k", "output": {"type": "computer_screenshot", "image_url": "data:"}},
    {"type": "tool_search_call", "id": "t", "arguments": {}, "execution": "server", "call_id": None},
    {"type": "tool_search_output", "id": "u", "call_id": None, "tools": [namespace("later", function("run"))]},
    {"type": "compaction", "id": "k", "encrypted_content": "gAAA"},
    {"type": "something_new", "id": "n"},
    {"type": "agent_message", "content": [{"type": "encrypted_content", "encrypted_content": "gAAA"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    {"type": "local_shell_call", "id": "1", "call_id": "lc", "action": {"type": "exec", "command": ["ls"], "env": {}}},
    {"type": "local_shell_call_output", "id": "lc", "output": "files"},
    {"type": "shell_call", "call_id": "sc", "action": {"commands": ["ls"]}},
    {"type": "shell_call_output", "call_id": "sc", "output": [{"stdout": "files", "stderr": ""}]},
    {"type": "function_call", "call_id": "fc", "name": "send", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "fc", "output": {"sent": True}},
    {
        "type": "apply_patch_call",
        "call_id": "pc",
        "operation": {"type": "delete_file", "path": "a"},
        "status": "completed",
    },
    {"type": "apply_patch_call_output", "call_id": "pc", "status": "completed"},
]


async def test_items_of_tools_that_are_not_here_do_not_end_a_conversation() -> None:
    async with stand() as s:
        s.engines[0].reply = script("ok")
        response, _ = await answered(s, input=HISTORY)
        sent = json.loads(s.engines[0].bodies[0])
        assert [message["role"] for message in sent["messages"]] == ["user", "user", *["assistant", "tool"] * 4]
        assert sent["messages"][2]["content"] == "b"
        calls = [call for message in sent["messages"] for call in message.get("tool_calls") or ()]
        assert [(c["id"], c["function"]["name"]) for c in calls] == [
            *(("lc", "local_shell"), ("sc", "shell"), ("fc", "send"), ("pc", "apply_patch"))
        ]
        assert all(isinstance(json.loads(c["function"]["arguments"]), dict) for c in calls)
        results = [message["content"] for message in sent["messages"] if message["role"] == "tool"]
        assert results[0] == "files" and json.loads(results[1])[0]["stdout"] == "files" and "completed" in results[3]
        assert json.loads(results[2]) == {"sent": True}
        assert [tool["function"]["name"] for tool in sent["tools"]] == [*FUNCTIONS, "later__run"]
        left_out = response["metadata"]["penstock_left_out"].split(", ")
        kinds = {"encrypted_content", *(item["type"] for item in HISTORY[2:14])}
        assert set(left_out) == {"tools.web_search", "tools.mcp", *(f"input.{kind}" for kind in kinds)}


async def test_kinds_that_clients_make_up_are_bounded_and_break_no_header() -> None:
    async with stand() as s:
        s.engines[0].reply = script("ok")
        tools = [{"type": kind} for kind in ("a\r\nx: y", "é", "", "z" * 500, *(f"kind{n}" for n in range(100)))]
        got = await s.http.post("/v1/responses", json={"model": "m", "input": "x", "tools": tools})
        assert got.status == 200 and got.headers["x-penstock-ignored-hints"].startswith("tools, tools.kind0, ")
        assert s.records
        metrics = await (await s.http.get("/metrics")).text()
        assert metrics.count("penstock_ignored_hints_total{") < 70
