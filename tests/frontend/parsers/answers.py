"""Answers of models in each format, and what they mean."""

from typing import NamedTuple

WEATHER = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    },
    "search": {"type": "object", "properties": {"query": {"type": "string"}, "tags": {"type": "array"}}},
}


class WrittenAnswer(NamedTuple):
    parser: str
    text: str
    content: str
    calls: tuple[tuple[str, dict[str, object]], ...]
    theirs: bool = True
    """Whether vLLM 0.32 reads it in the same way."""


PARIS = ("get_weather", {"city": "Paris", "days": 3})
TAGS = ("search", {"query": 'a "b" {c} </tool_call>', "tags": ["x", "ü"]})
DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
SEP, END, ALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"

ANSWERS = (
    WrittenAnswer(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        "",
        (PARIS,),
    ),
    WrittenAnswer(
        "hermes",
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "search", "arguments": {"query": "a", "tags": []}}\n</tool_call>',
        "I look.\n",
        (PARIS, ("search", {"query": "a", "tags": []})),
    ),
    WrittenAnswer(
        "hermes",
        '<tool_call>{"name": "search", "arguments": {"query": "a \\"b\\" {c} </tool_call>", "tags": ["x", "ü"]}}'
        "</tool_call>",
        "",
        (TAGS,),
        theirs=False,  # it ends the call within the text
    ),
    WrittenAnswer("hermes", "Nothing <tool is called, a < b.", "Nothing <tool is called, a < b.", ()),
    WrittenAnswer("hermes", "x <tool_call>{no json}</tool_call> y", "x <tool_call>{no json}</tool_call> y", ()),
    WrittenAnswer("hermes", '<tool_call>{"name": "search", "argu', '<tool_call>{"name": "search", "argu', ()),
    WrittenAnswer("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', "", (PARIS,)),
    WrittenAnswer(
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
        '{"name": "search", "parameters": {"query": "a"}}',
        "",
        (PARIS, ("search", {"query": "a"})),
    ),
    WrittenAnswer("llama3_json", '{"name": "Ann", "age": 3}; so', '{"name": "Ann", "age": 3}; so', ()),
    WrittenAnswer("llama3_json", '{"answer": 42}', '{"answer": 42}', ()),
    WrittenAnswer("llama3_json", "One; two; {three}", "One; two; {three}", ()),
    WrittenAnswer(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "search", "arguments": {"query": "]"}}]',
        "",
        (PARIS, ("search", {"query": "]"})),
        False,
    ),
    WrittenAnswer(
        "mistral",
        'Sure.[TOOL_CALLS]get_weather{"city": "Paris", "days": 3}'
        '[TOOL_CALLS]search[CALL_ID]abc123def[ARGS]{"query": "a"}',
        "Sure.",
        (PARIS, ("search", {"query": "a"})),
        False,
    ),
    WrittenAnswer("mistral", "[TOOL_CALLS] is a marker", "[TOOL_CALLS] is a marker", (), False),
    WrittenAnswer(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        (PARIS,),
    ),
    WrittenAnswer(
        "qwen3_coder",
        "Ok.\n<tool_call>\n<function=search>\n<parameter=query>\nline 1\n  line </function> 2\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n'
        "<parameter=city>\n12\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "Ok.\n",
        (
            ("search", {"query": "line 1\n  line </function> 2", "tags": ["a", "b"]}),
            ("get_weather", {"city": "12", "exact": True}),
        ),
        theirs=False,  # it ends the call within the text
    ),
    WrittenAnswer("qwen3_coder", "<tool_call>\n<function=oops", "<tool_call>\n<function=oops", (), False),
    WrittenAnswer(
        "deepseek_v3",
        f"Let me see.{DS}function{SEP}get_weather\n```json\n"
        '{"city": "Paris", "days": 3}'
        f"\n```{END}\n"
        f"<｜tool▁call▁begin｜>function{SEP}search\n```json\n"
        '{"query": "a"}'
        f"\n```{END}{ALL_END}",
        "Let me see.",
        (PARIS, ("search", {"query": "a"})),
    ),
    WrittenAnswer(
        "deepseek_v31",
        f"{DS}get_weather{SEP}"
        '{"city": "Paris", "days": 3}'
        f"{END}<｜tool▁call▁begin｜>search{SEP}"
        '{"query": "a"}'
        f"{END}{ALL_END}",
        "",
        (PARIS, ("search", {"query": "a"})),
    ),
    WrittenAnswer("deepseek_v31", f"{DS}broken{END}", f"{DS}broken{END}", (), False),
    WrittenAnswer("pythonic", "[get_weather(city='Paris', days=3)]", "", (PARIS,)),
    WrittenAnswer(
        "pythonic",
        "[get_weather(city='Paris', days=3), search(query=\"a ] (\", tags=['x', \"y\"])]",
        "",
        (PARIS, ("search", {"query": "a ] (", "tags": ["x", "y"]})),
    ),
    WrittenAnswer("pythonic", "[1] see the note", "[1] see the note", ()),
    WrittenAnswer("pythonic", "[get_weather(city=open('x'))]", "[get_weather(city=open('x'))]", ()),
)
