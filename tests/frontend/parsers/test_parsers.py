"""Our parsers: what models write in each format, cut anywhere, reads as the whole does, and no text is lost."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.settings.parser_names import REASONING_PARSERS, TOOL_PARSERS
from penstock.frontend.parsers.parser_registry import (
    REASONING_TAGS,
    TOOL_FORMATS,
    ChoiceParser,
    reasoning_tags,
    whole_text,
)
from penstock.frontend.parsers.tool_call_stream import CALL_MAX, FALSE_MAX, ToolCallStream
from penstock.frontend.parsers.tool_format import (
    CallReader,
    ContentDelta,
    ParsedDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolSchemas,
    joined,
)
from penstock.frontend.parsers.written_calls import types_of
from tests.frontend.parsers.answers import ANSWERS, DS, WEATHER, WrittenAnswer

MARKERS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"),
    *(
        '{"name": "search", "arguments": {"query": "x"}}',
        '{"name": "search", "parameters": {}}',
        "search",
        ";",
        "[",
        "{",
    ),
    *(
        "<function=search>",
        "<parameter=query>",
        "</parameter>",
        "</function>",
        DS,
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ),
    *(
        "<｜tool▁calls▁end｜>",
        "function",
        "```json",
        "```",
        "[search(query='x')]",
        '"',
        "'",
        "\\",
        "}",
        "]",
        " ",
        "\n",
        "(",
        ")",
    ),
)


def parser_of(name: str | None, reasoning: str | None = None, **options: bool) -> ChoiceParser:
    return ChoiceParser(TOOL_FORMATS[name] if name else None, reasoning_tags(reasoning), WEATHER, **options)


def cut(parser: ChoiceParser, pieces: list[str]) -> list[ParsedDelta]:
    out: list[ParsedDelta] = []
    for piece in pieces:
        out += parser.feed(piece)
    return joined([*out, *parser.finish()])


def parts(text: str, places: list[int]) -> list[str]:
    marks = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(marks)]


def by_kind(deltas: list[ParsedDelta]) -> tuple[str, str, list[tuple[str, str]]]:
    return (
        "".join(d.text for d in deltas if isinstance(d, ContentDelta)),
        "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)),
        [(d.name, d.arguments) for d in deltas if isinstance(d, ToolCallDelta)],
    )


def test_the_names_in_settings_are_those_of_the_parsers() -> None:
    assert sorted(TOOL_PARSERS) == sorted(TOOL_FORMATS) and sorted(REASONING_PARSERS) == sorted(REASONING_TAGS)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: f"{a.parser}-{a.text[:24]!r}")
def test_an_answer_reads_as_it_is_meant_whole_and_by_characters(answer: WrittenAnswer) -> None:
    for pieces in ([answer.text], list(answer.text)):
        content, reasoning, calls = by_kind(cut(parser_of(answer.parser), pieces))
        assert (content, reasoning) == (answer.content, "")
        assert [(name, json.loads(arguments)) for name, arguments in calls] == list(answer.calls)


@given(
    name=st.sampled_from(sorted(TOOL_FORMATS)),
    reasoning=st.sampled_from([None, *REASONING_TAGS, "<a>...</a>", "...</a>"]),
    text=st.lists(st.sampled_from(MARKERS) | st.text(max_size=4), max_size=14).map("".join)
    | st.sampled_from([a.text for a in ANSWERS]),
    places=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_a_stream_cut_anywhere_is_the_whole(name: str, reasoning: str | None, text: str, places: list[int]) -> None:
    whole = whole_text(parser_of(name, reasoning), text)
    assert by_kind(cut(parser_of(name, reasoning), parts(text, places))) == by_kind(whole)
    assert by_kind(cut(parser_of(name, reasoning), list(text))) == by_kind(whole)


@given(
    name=st.sampled_from(sorted(TOOL_FORMATS)),
    text=st.lists(st.sampled_from(MARKERS) | st.text(max_size=4), max_size=14).map("".join),
)
def test_without_a_call_no_character_is_lost(name: str, text: str) -> None:
    content, _, calls = by_kind(whole_text(parser_of(name), text))
    if not calls:
        assert content == text
    rest = iter(text)
    assert all(sign in rest for sign in content), "content is what the model wrote, in its order"


@pytest.mark.parametrize(
    ("reasoning", "text", "thought", "content"),
    [
        ("think", "<think>hm</think>\n\nYes", "hm", "\n\nYes"),
        ("think", "Yes, no tags", "", "Yes, no tags"),
        ("think", "<think>cut", "cut", ""),
        ("qwen3", "hm</think>Yes", "hm", "Yes"),
        ("qwen3", "<think>\nhm\n</think>Yes </think> no", "\nhm\n", "Yes </think> no"),
        ("deepseek_r1", "hm, cut </thi", "hm, cut </thi", ""),
        ("mistral", "[THINK]hm[/THINK]Yes", "hm", "Yes"),
        ("<r>...</r>", " <r>hm</r>Yes", "hm", "Yes"),
        ("...</r>", "hm</r>Yes", "hm", "Yes"),
    ],
)
def test_reasoning_is_parted_from_the_answer(reasoning: str, text: str, thought: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert by_kind(cut(parser_of(None, reasoning), pieces)) == (content, thought, [])


def test_a_request_that_turns_reasoning_off_gets_content() -> None:
    assert by_kind(whole_text(parser_of(None, "qwen3", thinks=False), "Yes")) == ("Yes", "", [])


def test_content_goes_on_as_it_comes_and_reasoning_too() -> None:
    parser = parser_of("hermes", "think")
    assert parser.feed("<think>a") == [ReasoningDelta("a")]
    assert parser.feed("b</think>c") == [ReasoningDelta("b"), ContentDelta("c")]
    assert parser.feed(" d <") == [ContentDelta(" d ")]
    assert parser.feed("e") == [ContentDelta("<e")]


def test_one_call_at_most_where_the_request_says_so() -> None:
    text = next(a.text for a in ANSWERS if a.parser == "hermes" and len(a.calls) == 2)
    assert len(by_kind(whole_text(parser_of("hermes", single=True), text))[2]) == 1


def test_a_call_without_end_is_content_at_a_limit() -> None:
    parser = parser_of("hermes")
    begin = '<tool_call>{"name": "search", "arguments": {"query": "'
    assert parser.feed(begin) == []
    out = [delta for _ in range(CALL_MAX // 1000 + 2) for delta in parser.feed("x" * 1000)]
    assert sum(len(delta.text) for delta in out if isinstance(delta, ContentDelta)) > CALL_MAX


@pytest.mark.parametrize(
    ("name", "begin"),
    [("hermes", '<tool_call>{"a":'), ("qwen3_coder", "<function=search><parameter=query>"), ("deepseek_v3", DS)],
)
def test_beginnings_without_end_are_read_a_limited_number_of_times(name: str, begin: str) -> None:
    read: list[str] = []

    def reader(marker: str, schemas: ToolSchemas) -> CallReader:
        read.append(marker)
        return TOOL_FORMATS[name].reader(marker, schemas)

    text = begin * (FALSE_MAX + 20) + '<tool_call>{"name": "search"}</tool_call>'
    for pieces in ([text], parts(text, list(range(0, len(text), 7)))):
        del read[:]
        stream = ToolCallStream(replace(TOOL_FORMATS[name], reader=reader), WEATHER)
        out = [delta for piece in pieces for delta in stream.feed(piece)] + stream.finish()
        assert by_kind(out) == (text, "", []) and len(read) <= FALSE_MAX


def test_half_a_surrogate_pair_does_not_break_the_answer() -> None:
    text = '<tool_call>{"name": "search", "arguments": {"query": "\\ud800"}}</tool_call>'
    (call,) = whole_text(parser_of("hermes"), text)
    assert isinstance(call, ToolCallDelta) and call.arguments.encode() == b'{"query": "\\ud800"}'


CALL = ("search", {"query": "x"})
EXAMPLE = (
    "<tool_call>\n<function=search>\n<parameter=query>\na\n</parameter>\n<parameter=tags>\n[]\n</parameter>\n"
    "</function>\n</tool_call>"
)
NESTED = "<function=search>\n<parameter=query>\n" + EXAMPLE + "{end}"
"""A call whose value is a call of the same function, as where a model writes about its own format."""


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("qwen3_coder", "<function=get_weather>\n<parameter=city>Oslo\n<parameter=days>\n2\n</parameter>\n</function>",
         [("get_weather", {"city": "Oslo", "days": 2})]),
        ("qwen3_coder", "<function=get_weather>\n<parameter=city>\nOslo\n</function>",
         [("get_weather", {"city": "Oslo"})]),
        ("qwen3_coder", "<function=get_weather><parameter=city>Oslo<parameter=days>2</parameter></function>", []),
        ("qwen3_coder", NESTED.format(end="\n</parameter>\n</function>"), [("search", {"query": EXAMPLE})]),
        ("qwen3_coder", NESTED.format(end=" and more"), []),
        ("qwen3_coder", NESTED.format(end=""), []),
        ("qwen3_coder", "<function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\nx</parameter>y\n</parameter>"
         "\n</function>", []),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=days>\n2\n</parameter>\n</tool_call>",
         [("get_weather", {"days": 2})]),
        ("qwen3_coder", "<function=get_weather>\n<parameter=days>\n2\n</parameter>\n", []),
        ("pythonic", "[search(query='x', query='y')]", []),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": 1e999}}</tool_call>', []),
        ("mistral", '[TOOL_CALLS]search{"query": [-1e999]}', []),
        ("qwen3_coder", "<function=get_weather><parameter=days>1e999</parameter></function>",
         [("get_weather", {"days": "1e999"})]),
        ("hermes", '<tool_call>{"name": "search"}</tool_call>', [("search", {})]),
        ("hermes", '<tool_call>{"name": "search", "arguments": null}</tool_call>', [("search", {})]),
        ("deepseek_v3", DS + 'function<｜tool▁sep｜>search\n```jsonc\n{"query": "x"}\n```<｜tool▁call▁end｜>', [CALL]),
        ("llama3_json", 'I look.\n{"name": "search", "parameters": {"query": "x"}}', [CALL]),
        ("llama3_json", '<function=search>{"query": "x"}</function>', [CALL]),
        ("llama3_json", '{"a": {"name": "search", "parameters": {"query": "x"}}}', []),
        ("mistral", '[{"name": "search", "arguments": {"query": "x"}}]', [CALL]),
        ("mistral", '[TOOL_CALLS][{"name": "search", "arguments": {"query": "x"}}', [CALL]),
    ],
)  # fmt: skip
def test_what_models_write_beside_their_format(name: str, text: str, calls: list[object]) -> None:
    for pieces in ([text], list(text)):
        content, _, made = by_kind(cut(parser_of(name), pieces))
        assert [(called, json.loads(arguments)) for called, arguments in made] == calls
        assert calls or content == text


def test_a_call_in_reasoning_without_an_end_is_a_call_and_one_before_the_end_is_reasoning() -> None:
    call = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
    for pieces in (["<think>hm " + call], list("<think>hm " + call)):
        content, reasoning, made = by_kind(cut(parser_of("hermes", "think"), pieces))
        assert (content, reasoning, len(made)) == ("", "hm ", 1)
    text = f"<think>hm {call}</think>Yes"
    assert by_kind(cut(parser_of("hermes", "think"), list(text))) == ("Yes", "hm " + call, [])


def test_what_stands_beside_a_call_in_reasoning_without_an_end_is_reasoning() -> None:
    text = 'Use <tool_call> then\n<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call> so'
    for pieces in ([text], list(text)):
        content, reasoning, made = by_kind(cut(parser_of("hermes", "qwen3"), pieces))
        assert (content, reasoning, len(made)) == ("", "Use <tool_call> then\n so", 1)


def test_the_end_mark_of_a_call_is_not_shown_where_text_follows_it() -> None:
    for answer in ANSWERS:
        if answer.calls and answer.text.endswith(("</tool_call>", "<｜tool▁calls▁end｜>")):
            content, _, calls = by_kind(cut(parser_of(answer.parser), list(answer.text + " Done.")))
            assert (content.split(), len(calls)) == ((answer.content + " Done.").split(), len(answer.calls)), (
                answer.text
            )


def test_types_of_parameters_are_found_through_references_and_in_other_words() -> None:
    root = {"$defs": {"N": {"type": "integer"}}}
    assert types_of({"$ref": "#/$defs/N"}, root) == ("integer",)
    assert types_of({"allOf": [{"$ref": "#/$defs/N"}]}, root) == ("integer",)
    assert types_of({"type": "float"}, {}) == ("number",) and types_of({"enum": [1, 2]}, {}) == ("integer", "number")
    loop: dict[str, object] = {"$ref": "#/$defs/L"}
    assert types_of(loop, {"$defs": {"L": loop}}) == ()
