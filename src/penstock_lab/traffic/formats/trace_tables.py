"""Trace formats as tables of columns: for each one where its rows are, and which fields say time, lengths and session.

A field is a column's name, or names of nested objects with dots. Of several, the first that a row has counts.

| format | source |
|---|---|
| azure | Azure/AzurePublicDataset, 2023 and 2024 (Splitwise, arXiv 2311.18677; DynamoLLM, arXiv 2408.00741) |
| burstgpt | HPMLL/BurstGPT (arXiv 2401.17644), releases 1.1 and 2.0 |
| bailian | alibaba-edu/qwen-bailian-usagetraces-anon: chats that name their parents, blocks of 16 tokens |
| aiperf | ``profile_export.jsonl`` of NVIDIA AIPerf |
| genai-perf | ``profile_export.json`` of NVIDIA GenAI-Perf |
| vllm | results of ``vllm bench serve --save-detailed``, and of SGLang's ``bench_serving --output-details`` |
| guidellm | ``benchmarks.json`` of GuideLLM |
| otel | OTLP JSON with spans of the GenAI semantic conventions of OpenTelemetry |
| sharegpt | conversations of ShareGPT, with their lengths or with their text |
| jsonl, csv | rows with named columns |
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from penstock.kernel.values import JsonObject
from penstock_lab.traffic.formats import trace_documents as documents
from penstock_lab.traffic.formats.time_units import TimeUnit, plain_name, split_unit
from penstock_lab.traffic.traffic_request import TRACE_BLOCK

Container = Literal["csv", "json"]


class TimeColumn(NamedTuple):
    """A field with a time. ``unit``: None where neither the format nor the field's name says it."""

    name: str
    unit: TimeUnit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTable:
    """One format.

    Args:
        marks: fields that a row, a document or a header of this format has, all of them.
        at: when a request arrived: a number, or a moment as text. ``end``: when its answer was there; ``lasted``: how
            long that took.
        prompt, answer: tokens.
        session: name of the conversation; ``id`` and ``parent``: of the row, and of the one that it continues.
        roots: values of ``parent`` that name none.
        hash_ids: of the prompt's blocks, of ``block`` tokens where neither a row nor the user says their size.
        kinds: values of ``kind`` and ours for them, where these are all that there are.
        failed: fields that are empty unless the request failed.
        only: field -> values of the rows that count; others, and rows without the field, are passed over.
        span, inside: names of a row, and of the one that it is a part of.
        untimed: whether a file of the format may have no times at all.
        unpack: makes rows out of one line's object; each row has ``passed`` where it is no request.
    """

    format: str
    container: Container
    marks: tuple[str, ...] = ()
    at: tuple[TimeColumn, ...] = ()
    end: tuple[TimeColumn, ...] = ()
    lasted: tuple[TimeColumn, ...] = ()
    prompt: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    session: tuple[str, ...] = ()
    id: tuple[str, ...] = ()
    parent: tuple[str, ...] = ()
    roots: tuple[object, ...] = (None, "", -1, "-1", "null", "None")
    kind: tuple[str, ...] = ()
    kinds: Mapping[str, str] | None = None
    hash_ids: tuple[str, ...] = ()
    block_size: tuple[str, ...] = ("block_size",)
    block: int = TRACE_BLOCK
    failed: tuple[str, ...] = ()
    only: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: MappingProxyType({}))
    span: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    untimed: bool = False
    unpack: Callable[[JsonObject], Iterable[JsonObject]] | None = None


TABLES: tuple[TraceTable, ...] = (
    TraceTable(
        format="azure",
        container="csv",
        marks=("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        at=(TimeColumn("TIMESTAMP"),),
        prompt=("ContextTokens",),
        answer=("GeneratedTokens",),
    ),
    TraceTable(
        format="burstgpt",
        container="csv",
        marks=("Timestamp", "Request tokens", "Response tokens"),
        at=(TimeColumn("Timestamp", "s"),),
        lasted=(TimeColumn("Elapsed time", "s"),),
        prompt=("Request tokens",),
        answer=("Response tokens",),
        session=("Session ID",),
        kind=("Log Type",),
        kinds={"Conversation log": "conversation", "API log": "api"},
    ),
    TraceTable(
        format="bailian",
        container="json",
        marks=("chat_id", "parent_chat_id", "input_length", "output_length"),
        at=(TimeColumn("timestamp", "s"),),
        prompt=("input_length",),
        answer=("output_length",),
        id=("chat_id",),
        parent=("parent_chat_id",),
        kind=("type",),
        hash_ids=("hash_ids",),
        block=16,
    ),
    TraceTable(
        format="aiperf",
        container="json",
        marks=("metadata.request_start_ns", "metrics"),
        at=(TimeColumn("metadata.request_start_ns", "ns"),),
        end=(TimeColumn("metadata.request_end_ns", "ns"),),
        prompt=("metrics.input_sequence_length.value", "metrics.input_token_count.value"),
        answer=("metrics.output_sequence_length.value", "metrics.output_token_count.value"),
        session=("metadata.x_correlation_id", "metadata.conversation_id"),
        failed=("error", "metadata.was_cancelled"),
        only={"metadata.benchmark_phase": ("profiling", None)},
    ),
    TraceTable(
        format="genai-perf",
        container="json",
        marks=("experiments",),
        at=(TimeColumn("timestamp", "ns"),),
        end=(TimeColumn("end", "ns"),),
        prompt=("prompt_tokens",),
        answer=("completion_tokens",),
        unpack=documents.genai_perf_rows,
    ),
    TraceTable(
        format="vllm",
        container="json",
        marks=("input_lens", "output_lens"),
        at=(TimeColumn("start_times", "s"),),
        prompt=("input_lens",),
        answer=("output_lens",),
        failed=("errors",),
        untimed=True,
        unpack=documents.rows_of_lists,
    ),
    TraceTable(
        format="guidellm",
        container="json",
        marks=("benchmarks",),
        at=(
            TimeColumn("request_start_time", "s"),
            TimeColumn("info.timings.request_start", "s"),
            TimeColumn("scheduler_info.request_timings.request_start", "s"),
            TimeColumn("start_time", "s"),
        ),
        prompt=("prompt_tokens", "input_metrics.text_tokens", "prompt_tokens_count"),
        answer=("output_tokens", "output_metrics.text_tokens", "output_tokens_count"),
        failed=("failed",),
        unpack=documents.guidellm_rows,
    ),
    TraceTable(
        format="otel",
        container="json",
        marks=("resourceSpans",),
        at=(TimeColumn("startTimeUnixNano", "ns"),),
        end=(TimeColumn("endTimeUnixNano", "ns"),),
        prompt=documents.OTEL_PROMPT,
        answer=documents.OTEL_ANSWER,
        session=("gen_ai.conversation.id", "session.id"),
        failed=("failed",),
        span=("spanId",),
        inside=("parentSpanId",),
        unpack=documents.otel_rows,
    ),
    TraceTable(
        format="sharegpt",
        container="json",
        marks=("conversations",),
        prompt=("prompt_tokens",),
        answer=("completion_tokens",),
        session=("session",),
        hash_ids=("hash_ids",),
        block=documents.CHAT_BLOCK,
        unpack=documents.chat_rows,
    ),
)

_TIMES = (
    *("timestamp", "time", "ts", "at", "arrival", "arrival_time", "arrived_at", "arrival_timestamp", "request_time"),
    *("start", "start_time", "started_at", "request_start", "request_start_time", "request_timestamp", "created"),
    *(
        "created_at",
        "created_time",
        "received",
        "received_at",
        "request_received",
        "submit_time",
        "submitted_at",
        "date",
    ),
    *("datetime", "send_time", "sent_at", "start_timestamp", "start_time_unix"),
)
_ENDS = ("end", "end_time", "ended_at", "finish_time", "finished_at", "completed_at", "request_end", "request_end_time")
_LASTED = (
    *("duration", "latency", "elapsed", "elapsed_time", "e2e", "e2e_latency", "e2el", "total_time", "response_time"),
    *("request_latency", "request_duration", "request_duration_time"),
)
_PROMPTS = (
    *("input_length", "input_len", "input_tokens", "input_toks", "prompt_tokens", "prompt_len", "prompt_length", "isl"),
    *("context_tokens", "request_tokens", "num_prefill_tokens", "num_prompt_tokens", "num_input_tokens", "n_input"),
    *("prompt_token_count", "input_token_count", "input_sequence_length", "prefill_tokens", "usage.prompt_tokens"),
    *("usage.input_tokens", "tokens_in", "in_tokens", "prompt"),
)
_ANSWERS = (
    *("output_length", "output_len", "output_tokens", "output_toks", "completion_tokens", "completion_len", "osl"),
    *("generated_tokens", "response_tokens", "num_decode_tokens", "num_output_tokens", "num_completion_tokens"),
    *("n_output", "completion_token_count", "output_token_count", "output_sequence_length", "decode_tokens"),
    *("usage.completion_tokens", "usage.output_tokens", "tokens_out", "out_tokens", "response_length", "answer"),
)
_SESSIONS = ("session_id", "session", "conversation_id", "conversation", "thread_id")
_IDS = ("chat_id", "request_id", "id", "uuid")
_PARENTS = ("parent_chat_id", "parent_request_id", "parent_id", "parent")
_FAILURES = ("error", "errors", "failed")

NAMED = ("at", "end", "lasted", "prompt", "answer", "session", "id", "parent", "kind")
"""What a plain trace's columns can be named for."""


def plain_table(container: Container, names: Iterable[str], given: Mapping[str, str]) -> TraceTable | None:
    """Return the table of a file with named columns; None where no column has the prompts' or the answers' lengths.

    Args:
        names: of its columns, those of nested objects with dots.
        given: what a column stands for -> its name, where the user says it.
    """
    plain: dict[str, list[str]] = {}
    for name in names:
        whole = plain_name(name)
        stem, unit = split_unit(whole)
        plain.setdefault(whole, []).append(name)
        if unit is not None:
            plain.setdefault(stem, []).append(name)

    def columns(what: str, known: tuple[str, ...]) -> tuple[str, ...]:
        if what in given:
            return (given[what],)
        return tuple(name for each in known for name in plain.get(each, ()))

    def times(what: str, known: tuple[str, ...]) -> tuple[TimeColumn, ...]:
        return tuple(TimeColumn(name, split_unit(plain_name(name))[1]) for name in columns(what, known))

    table = TraceTable(
        format="csv" if container == "csv" else "jsonl",
        container=container,
        at=times("at", _TIMES),
        end=times("end", _ENDS),
        lasted=times("lasted", _LASTED),
        prompt=columns("prompt", _PROMPTS),
        answer=columns("answer", _ANSWERS),
        session=columns("session", _SESSIONS),
        id=columns("id", _IDS),
        parent=columns("parent", _PARENTS),
        kind=columns("kind", ()),
        failed=columns("failed", _FAILURES),
    )
    return table if table.prompt and table.answer else None
