"""OpenAPI schemas of bodies and headers, as plain JSON Schema.

Objects are open: fields that are not named here are the engine's, or come with a later release.
"""

from typing import Any

from penstock.frontend.prompt.request_body import DEPTH_MAX
from penstock.frontend.prompt.routing_hints import EXTRA_FIELDS, TEXT_MAX

Json = dict[str, Any]

_WORD: Json = {"type": "string", "minLength": 1, "maxLength": TEXT_MAX}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "number"}
_TEXT: Json = {"type": "string"}
_TRUTH: Json = {"type": "boolean"}
_TOKENS: Json = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_PRIORITY: Json = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
_WHOLE32: Json = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}


def _open(properties: Json, required: tuple[str, ...] = (), text: str | None = None) -> Json:
    schema: Json = {"type": "object", "properties": properties}
    if required:
        schema["required"] = [*required]
    return schema if text is None else {**schema, "description": text}


def _maybe(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Json) -> Json:
    return {"type": "array", "items": schema}


def _hint(schema: Json, text: str) -> Json:
    return {**schema, "description": text}


_HEADER_WORD: Json = {"type": "string", "pattern": f"^[!-~]([ -~]{{0,{TEXT_MAX - 2}}}[!-~])?$"}

HEADERS: dict[str, Json] = {
    "x-request-id": _hint({"type": "string", "pattern": r"^[A-Za-z0-9._:\-]{1,128}$"}, "Becomes the request's id."),
    "x-penstock-priority": _hint(_PRIORITY, "Seconds forward in the queue."),
    "x-penstock-strict-priority": _hint(_WHOLE32, "A class before every lower one."),
    "x-penstock-osl": _hint(_WHOLE32, "Expected output tokens."),
    "x-penstock-worker": _hint(_HEADER_WORD, "Pin to a worker."),
    "x-penstock-dp-rank": _hint({"type": "integer", "minimum": 0, "maximum": 65_535}, "Pin to a rank."),
    "x-penstock-allowed-workers": _hint(_HEADER_WORD, "Comma-separated candidates."),
    "x-penstock-session-id": _hint(_HEADER_WORD, "Session affinity."),
    "x-penstock-program-id": _hint(_HEADER_WORD, "The same where there is no session."),
    "x-penstock-context-type": _hint(_HEADER_WORD, "Metric label."),
    "x-penstock-cache-salt": _hint(_HEADER_WORD, "Separates caches."),
    "x-penstock-timeout": _hint({"type": "number", "minimum": 0.001, "maximum": 1e6}, "Seconds for the whole request."),
    "x-penstock-overlap-credit": _hint({"type": "number", "minimum": 0, "maximum": 1e6}, "router.cost.overlap_credit."),
    "x-penstock-router-temperature": _hint(
        {"type": "number", "minimum": 0, "maximum": 1e6}, "router.cost.temperature of this request."
    ),
}
"""Routing hints as request headers; other projects' spellings of the same are accepted as well."""

_NVEXT: Json = _open(
    {
        "agent_hints": _open({"priority": _PRIORITY, "strict_priority": _WHOLE32, "osl": _WHOLE32}),
        "agent_context": _open({"session_id": _WORD, "program_id": _WORD, "context_type": _WORD}),
        "session_control": _open({"session_id": _WORD}),
        "program_id": _WORD,
        "context_type": _WORD,
        "cache_salt": _WORD,
        "dp_rank": {"type": "integer", "minimum": 0, "maximum": 65_535},
        "backend_instance_id": {"anyOf": [_WORD, _COUNT]},
        "decode_worker_id": {"anyOf": [_WORD, _COUNT]},
        "token_data": _TOKENS,
        "extra_fields": _list({"enum": [*EXTRA_FIELDS]}),
    },
    text="Hints for routing.",
)
_COMMON: Json = {
    "model": _hint({"type": "string", "minLength": 1}, "One of GET /v1/models."),
    "stream": _TRUTH,
    "stream_options": _open({"include_usage": _TRUTH}),
    "max_tokens": _COUNT,
    "n": _COUNT,
    "cache_salt": _WORD,
    "nvext": _NVEXT,
}
_PART: Json = {"anyOf": [{"type": "object"}, _TEXT]}
_MESSAGE: Json = _open({"role": _TEXT, "content": {"anyOf": [_TEXT, _list(_PART), {"type": "null"}]}}, ("role",))
_USAGE: Json = _open(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _maybe(_open({"cached_tokens": _maybe(_COUNT)})),
    }
)
_FINDING: Json = _open({"level": {"enum": ["info", "warning", "error"]}, "text": _TEXT, "hint": _maybe(_TEXT)})
_RECORD: Json = _open(
    {"id": _TEXT, "model": _TEXT}, text="As in docs/reference/api.md; seconds, tokens, hashes, never text."
)

SCHEMAS: Json = {
    "Open": {"type": "object"},
    "Problem": _open(
        {"error": _open({"message": _TEXT, "type": _TEXT, "param": _maybe(_TEXT), "code": {}}, ("message", "type"))},
        ("error",),
        "The one shape of every error.",
    ),
    "ChatRequest": _open(
        {
            **_COMMON,
            "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
            "tools": _list({}),
            "max_completion_tokens": _COUNT,
            "chat_template_kwargs": {"type": "object"},
        },
        ("model", "messages"),
        f"Nested at most {DEPTH_MAX} levels.",
    ),
    "CompletionRequest": _open(
        {
            **_COMMON,
            "prompt": {
                "anyOf": [
                    _TEXT,
                    {"type": "array", "minItems": 1, "items": _TEXT},
                    _TOKENS,
                    {"type": "array", "minItems": 1, "items": _TOKENS},
                ]
            },
        },
        ("model", "prompt"),
    ),
    "ProxiedRequest": _open({"model": {"type": "string", "minLength": 1}, "stream": _TRUTH}),
    "ChatCompletion": _open(
        {
            "id": _TEXT,
            "choices": _list(_open({"index": _COUNT, "message": {"type": "object"}, "finish_reason": _maybe(_TEXT)})),
            "usage": _maybe(_USAGE),
            "nvext": {"type": "object"},
        },
        ("choices",),
    ),
    "Completion": _open(
        {
            "id": _TEXT,
            "choices": _list(_open({"index": _COUNT, "text": _TEXT, "finish_reason": _maybe(_TEXT)})),
            "usage": _maybe(_USAGE),
            "nvext": {"type": "object"},
        },
        ("choices",),
    ),
    "Model": _open(
        {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": _TEXT,
            "root": _TEXT,
            "parent": _maybe(_TEXT),
            "max_model_len": _COUNT,
        },
        ("id", "object", "created", "owned_by"),
    ),
    "ModelList": _open(
        {"object": {"const": "list"}, "data": _list({"$ref": "#/components/schemas/Model"})}, ("object", "data")
    ),
    "Ready": _open({"id": _TEXT, "ready": _TRUTH, "workers": _COUNT}, ("id", "ready", "workers")),
    "Health": _open(
        {
            "status": {"enum": ["ok", "degraded", "unready", "draining"]},
            "models": {"type": "object", "additionalProperties": _COUNT},
            "notes": _list(_TEXT),
        },
        ("status", "models", "notes"),
    ),
    "Live": _open({"status": {"const": "ok"}}, ("status",)),
    "Status": _open(
        {
            "cluster": _TEXT,
            "version": _TEXT,
            "run": _TEXT,
            "endpoint": _TEXT,
            "uptime": _NUMBER,
            "draining": _TRUTH,
            "mode": _TEXT,
            "models": _list(_open({"name": _TEXT, "ready": _TRUTH, "workers": _COUNT}, ("name", "ready", "workers"))),
            "workers": _list(
                _open({"id": _TEXT, "model": _TEXT, "url": _TEXT, "state": _TEXT, "requests": _COUNT}, ("id", "state"))
            ),
            "queue": {"type": "object", "additionalProperties": _open({"length": _COUNT}, ("length",))},
            "requests": {"type": "object", "additionalProperties": _COUNT},
            "hit_rate": _maybe({"type": "number", "minimum": 0, "maximum": 1}),
            "findings": _list(_FINDING),
            "frontends": _list(_TEXT),
        },
        ("cluster", "version", "uptime", "draining", "mode", "models", "workers", "queue", "requests", "findings"),
    ),
    "Explained": _open({"request": _maybe(_RECORD), "decisions": _list({"type": "object"})}, ("request", "decisions")),
    "Requests": _open({"requests": _list(_RECORD)}, ("requests",)),
    "Decisions": _open({"decisions": _list({"type": "object"})}, ("decisions",)),
    "Timeline": _open(
        {
            "kind": {"enum": ["live"]},
            "run": _TEXT,
            "now": _NUMBER,
            "width": _NUMBER,
            "kept": _COUNT,
            "first": _COUNT,
            "columns": {"type": "object", "description": "Name to a number, or null where unknown, per window."},
            "pools": {"type": "object"},
            "frontends": {"type": "object", "description": "Frontend to since when it has seen, in seconds."},
            "windows": {"type": "object", "description": "With scope=process: the windows as they are kept."},
        },
        (),
    ),
    "Loads": _open({"at": _NUMBER, "workers": {"type": ["object", "null"]}}, ("at", "workers")),
    "WorkerLoad": _open({"width": _NUMBER, "first": _COUNT, "columns": {"type": "object"}}, ("width", "columns")),
    "PlannerDecisions": _open(
        {
            "planner": {"type": ["object", "null"], "description": "How it is; null where none runs."},
            "last": {"type": ["object", "null"], "description": "The last tick."},
            "decisions": _list({"type": "object"}),
        },
        ("planner", "last", "decisions"),
    ),
    "Cleared": _open(
        {
            "cleared": _COUNT,
            "failed": _COUNT,
            "workers": _list(_open({"worker": _TEXT, "cleared": _TRUTH, "reason": _TEXT}, ("worker", "cleared"))),
        },
        ("cleared", "failed", "workers"),
    ),
}
