"""Makes rows of the documents that tools write: lists side by side, lists within lists, spans, conversations.

A row is a flat object; what its fields mean stands in `trace_tables`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

from penstock.kernel.values import JsonObject
from penstock_lab.traffic.formats.trace_rows import RowProblem
from penstock_lab.traffic.prompt_maker import LETTERS_PER_TOKEN

CHAT_BLOCK = 16
"""Tokens per hash id of a conversation: a turn's prompt begins with the turns before it."""
ESTIMATED = f"lengths are estimated from the text, {LETTERS_PER_TOKEN} letters to the token"
"""Note of rows without token counts."""
CHUNKS = "answers without token counts count one token for each chunk of their stream"
OTEL_PROMPT: tuple[str, ...] = (
    *("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    *("llm.token_count.prompt", "llm.usage.prompt_tokens"),
)
OTEL_ANSWER: tuple[str, ...] = (
    *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    *("llm.token_count.completion", "llm.usage.completion_tokens"),
)
OTEL_OPERATIONS = ("chat", "text_completion", "generate_content", None)
"""Operations that are one request to a model; an agent's span repeats what its requests took."""
_ASKERS = ("human", "user", "system", "tool", "function", "observation")
_LENGTHS = ("tokens", "token_count", "num_tokens", "length", "len")


def rows_of_lists(document: JsonObject) -> Iterator[JsonObject]:
    """Yield a row for each place of lists side by side."""
    count = _size_of(document, "input_lens")
    lists = {name: each for name, each in document.items() if isinstance(each, list) and len(each) == count}
    if len(lists.get("output_lens", ())) != count:
        raise RowProblem("output_lens", document.get("output_lens"), f"a list of {count} is needed, as of input_lens")
    names = [name for name in ("input_lens", "output_lens", "start_times", "errors") if name in lists]
    if "start_times" in document and "start_times" not in lists:
        raise RowProblem("start_times", document["start_times"], f"a list of {count} is needed, as of input_lens")
    yield from (dict(zip(names, cells, strict=True)) for cells in zip(*(lists[name] for name in names), strict=True))


def genai_perf_rows(document: JsonObject) -> Iterator[JsonObject]:
    """Yield a row for each request of all experiments, with the counts of its usage or of its chunks."""
    for experiment in _object_list(document, "experiments"):
        yield from map(_sent_body, _object_list(experiment, "requests"))


def guidellm_rows(document: JsonObject) -> Iterator[JsonObject]:
    """Yield a row for each request of all benchmarks; those that did not end are ``failed``."""
    for benchmark in _object_list(document, "benchmarks"):
        requests = benchmark.get("requests")
        if not isinstance(requests, dict):
            raise RowProblem("benchmarks.requests", requests, "a JSON object with a list 'successful' is needed")
        for outcome in ("successful", "incomplete", "errored"):
            for request in requests.get(outcome) or ():
                yield request if outcome == "successful" else {**request, "failed": outcome}


def otel_rows(document: JsonObject) -> Iterator[JsonObject]:
    """Yield a row for each span, with its attributes; ``passed`` where it is no request to a model."""
    for resource in _object_list(document, "resourceSpans"):
        for scope in _object_list(resource, "scopeSpans"):
            for span in _object_list(scope, "spans"):
                row = {**span, **_attributes_of(span.get("attributes"))}
                row["failed"] = (span.get("status") or {}).get("code") in (2, "STATUS_CODE_ERROR")
                asked = any(name in row for name in OTEL_PROMPT) or row["failed"]
                row["passed"] = not asked or row.get("gen_ai.operation.name") not in OTEL_OPERATIONS
                yield row


def chat_rows(document: JsonObject) -> Iterator[JsonObject]:
    """Yield a row for each answer of a conversation: its prompt is all that was said before.

    Lengths are those of the turns where all have one, else those of the conversation (``prompt_len``, ``output_len``),
    else an estimate of the text.
    """
    turns = _object_list(document, "conversations")
    session = str(document.get("id") or f"chat-{crc32(json.dumps(document).encode())}")
    whole = [document.get(name) for name in ("prompt_len", "output_len")]
    if all(isinstance(each, int) for each in whole):
        yield {"session": session, "prompt_tokens": whole[0], "completion_tokens": whole[1]}
        return
    lengths = [next((turn[name] for name in _LENGTHS if isinstance(turn.get(name), int)), None) for turn in turns]
    estimated = None in lengths
    before = 0
    for turn, given in zip(turns, lengths, strict=True):
        tokens = estimated_tokens(_turn_text(turn)) if estimated or given is None else given
        if str(turn.get("from", turn.get("role"))).lower() not in _ASKERS and before and tokens:
            row: JsonObject = {"session": session, "prompt_tokens": before, "completion_tokens": tokens}
            row["hash_ids"] = [crc32(session.encode()) << 31 | place for place in range(-(-before // CHAT_BLOCK))]
            yield {**row, "note": ESTIMATED} if estimated else row
        before += tokens


def estimated_tokens(text: str) -> int:
    """Return about how many tokens a text has."""
    return -(-len(text) // LETTERS_PER_TOKEN)


def _sent_body(request: JsonObject) -> JsonObject:
    """Return a request of GenAI-Perf as a row."""
    moments = request.get("response_timestamps") or []
    row: JsonObject = {"timestamp": request.get("timestamp"), "end": moments[-1] if moments else None}
    outputs = [_json_object(each.get("response", each)) for each in request.get("response_outputs") or ()]
    usage: JsonObject = next((each["usage"] for each in reversed(outputs) if isinstance(each.get("usage"), dict)), {})
    row |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens") if name in usage}
    if "completion_tokens" not in row:
        row["completion_tokens"] = len(moments)
        row["note"] = CHUNKS
    if "prompt_tokens" not in row:
        inputs = request.get("request_inputs") or {}
        row["prompt_tokens"] = estimated_tokens(_prompt_text(_json_object(inputs.get("payload", inputs))))
        row["note"] = ESTIMATED
    return row


def _prompt_text(payload: JsonObject) -> str:
    """Return the text of an OpenAI body, or of Triton's input."""
    messages = payload.get("messages")
    if isinstance(messages, list):
        return "".join(_turn_text(each) for each in messages if isinstance(each, dict))
    return str(payload.get("prompt") or payload.get("text_input") or "")


def _turn_text(turn: Mapping[str, Any]) -> str:
    content = turn.get("value", turn.get("content"))
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _json_object(value: Any) -> JsonObject:
    """Return the object of a JSON text, which may be an event of a stream; {} where it has none."""
    if isinstance(value, dict):
        return value
    try:
        read = json.loads(str(value).removeprefix("data:").strip())
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _attributes_of(listed: Any) -> JsonObject:
    """Return attributes of OTLP by their keys; whole numbers may stand as text."""
    found: JsonObject = {}
    for attribute in listed if isinstance(listed, list) else ():
        for kind, value in (attribute.get("value") or {}).items():
            found[attribute.get("key")] = int(value) if kind == "intValue" else value
    return found


def _object_list(document: JsonObject, name: str) -> list[JsonObject]:
    listed = document.get(name)
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise RowProblem(name, listed, "a list of JSON objects is needed")
    return listed


def _size_of(document: JsonObject, name: str) -> int:
    listed = document.get(name)
    if not isinstance(listed, list):
        raise RowProblem(name, listed, "a list is needed")
    return len(listed)
