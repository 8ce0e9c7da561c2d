"""Small examples of each tabled format, made of the same requests, by the field names that the formats document."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from penstock_lab.traffic.formats.trace_format import Format

DAY = 1_759_813_207.5
"""Seconds since 1970."""


class ExampleRow(NamedTuple):
    """One request: seconds since the first, tokens, how long it took, and its conversation and turn."""

    at: float
    prompt: int
    answer: int
    lasted: float
    chat: int
    turn: int


ROWS = [
    ExampleRow(0.0, 500, 40, 1.2, 0, 0),
    ExampleRow(0.75, 120, 16, 0.5, 1, 0),
    ExampleRow(2.5, 640, 8, 0.3, 0, 1),
    ExampleRow(4.0, 90, 100, 2.25, 2, 0),
    ExampleRow(6.25, 700, 30, 0.9, 0, 2),
    ExampleRow(8.5, 260, 5, 0.2, 1, 1),
]


class TraceExample(NamedTuple):
    """``lines`` writes a file of these rows. ``sessions``: whether it tells them; ``timed``: or when they came."""

    format: Format
    lines: Callable[[Sequence[ExampleRow]], list[str]]
    sessions: bool = False
    timed: bool = True


def ns(seconds: float) -> int:
    return round((DAY + seconds) * 1e9)


def bailian(rows: Sequence[ExampleRow]) -> list[str]:
    return [
        json.dumps(
            {
                "chat_id": 10 * row.chat + row.turn,
                "parent_chat_id": 10 * row.chat + row.turn - 1 if row.turn else -1,
                "timestamp": row.at,
                "input_length": row.prompt,
                "output_length": row.answer,
                "type": "text",
                "turn": row.turn + 1,
                "hash_ids": list(range(-(-row.prompt // 16))),
            }
        )
        for row in rows
    ]


def aiperf(rows: Sequence[ExampleRow]) -> list[str]:
    return [
        json.dumps(
            {
                "metadata": {
                    "session_num": number,
                    "x_correlation_id": f"chat-{row.chat}",
                    "turn_index": row.turn,
                    "request_start_ns": ns(row.at),
                    "request_end_ns": ns(row.at + row.lasted),
                    "benchmark_phase": "profiling",
                    "was_cancelled": False,
                },
                "metrics": {
                    "input_sequence_length": {"value": row.prompt, "unit": "tokens"},
                    "output_sequence_length": {"value": row.answer, "unit": "tokens"},
                    "request_latency": {"value": row.lasted * 1e3, "unit": "ms"},
                },
                "error": None,
            }
        )
        for number, row in enumerate(rows)
    ]


def genai_perf(rows: Sequence[ExampleRow]) -> list[str]:
    def request(row: ExampleRow) -> dict[str, Any]:
        usage = {"prompt_tokens": row.prompt, "completion_tokens": row.answer}
        return {
            "timestamp": ns(row.at),
            "request_inputs": {"payload": json.dumps({"messages": [{"role": "user", "content": "?"}]})},
            "response_timestamps": [ns(row.at + 0.1), ns(row.at + row.lasted)],
            "response_outputs": [{"response": "data: [DONE]"}, {"response": "data: " + json.dumps({"usage": usage})}],
        }

    experiment = {"experiment": {"mode": "concurrency", "value": 2}, "requests": list(map(request, rows))}
    return json.dumps({"service_kind": "openai", "experiments": [experiment], "version": "1"}, indent=1).split("\n")


def vllm(rows: Sequence[ExampleRow]) -> list[str]:
    result = {
        "date": "20261101-000000",
        "completed": len(rows),
        "input_lens": [row.prompt for row in rows],
        "output_lens": [row.answer for row in rows],
        "start_times": [90_000.0 + row.at for row in rows],
        "ttfts": [0.1 for _ in rows],
        "itls": [[0.01] for _ in rows],
        "errors": ["" for _ in rows],
    }
    return [json.dumps(result)]


def guidellm(rows: Sequence[ExampleRow]) -> list[str]:
    requests = [
        {
            "type_": "generative_request_stats",
            "request_start_time": DAY + row.at,
            "request_end_time": DAY + row.at + row.lasted,
            "prompt_tokens": row.prompt,
            "output_tokens": row.answer,
        }
        for row in rows
    ]
    benchmark = {"requests": {"successful": requests, "incomplete": [], "errored": []}}
    return json.dumps({"metadata": {"version": 1}, "benchmarks": [benchmark]}, indent=2).split("\n")


def span(row: ExampleRow, *, id: str, parent: str = "", **attributes: Any) -> dict[str, Any]:
    values = {
        "gen_ai.operation.name": "chat",
        "gen_ai.conversation.id": f"chat-{row.chat}",
        "gen_ai.usage.input_tokens": row.prompt,
        "gen_ai.usage.output_tokens": row.answer,
        **attributes,
    }
    listed = [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in values.items()
        if value is not None
    ]
    times = {"startTimeUnixNano": str(ns(row.at)), "endTimeUnixNano": str(ns(row.at + row.lasted))}
    return {"traceId": "a" * 32, "spanId": id, "parentSpanId": parent, "name": "chat m", **times, "attributes": listed}


def otlp(spans: Sequence[dict[str, Any]]) -> str:
    return json.dumps({"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}]})


def otel(rows: Sequence[ExampleRow]) -> list[str]:
    return [otlp([span(row, id=f"{row.chat}-{row.turn}")]) for row in rows]


def sharegpt(rows: Sequence[ExampleRow]) -> list[str]:
    chats = [
        {
            "id": f"chat-{number}",
            "conversations": [
                {"from": "human", "value": "a question", "tokens": row.prompt},
                {"from": "gpt", "value": "an answer", "tokens": row.answer},
            ],
        }
        for number, row in enumerate(rows)
    ]
    return json.dumps(chats, indent=2).split("\n")


def jsonl(rows: Sequence[ExampleRow]) -> list[str]:
    return [
        json.dumps(
            {
                "created_at": DAY + row.at,
                "latency_ms": row.lasted * 1e3,
                "usage": {"prompt_tokens": row.prompt, "completion_tokens": row.answer},
                "conversation_id": f"chat-{row.chat}",
            }
        )
        for row in rows
    ]


def csv(rows: Sequence[ExampleRow]) -> list[str]:
    head = "Arrival Time (ms);NumPrefillTokens;num_decode_tokens;sessionId;end_time_ms"
    return [
        head,
        *(f"{row.at * 1e3};{row.prompt};{row.answer};{row.chat};{(row.at + row.lasted) * 1e3}" for row in rows),
    ]


EXAMPLES = (
    TraceExample("bailian", bailian, sessions=True),
    TraceExample("aiperf", aiperf, sessions=True),
    TraceExample("genai-perf", genai_perf),
    TraceExample("vllm", vllm),
    TraceExample("guidellm", guidellm),
    TraceExample("otel", otel, sessions=True),
    TraceExample("sharegpt", sharegpt, timed=False),
    TraceExample("jsonl", jsonl, sessions=True),
    TraceExample("csv", csv, sessions=True),
)
