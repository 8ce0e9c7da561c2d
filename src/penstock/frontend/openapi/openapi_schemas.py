"""OpenAPI schemas of OpenAI bodies and of routing headers, as plain JSON Schema.

Objects are open: fields that are not named here are the engine's, or come with a later release.
"""

from penstock.frontend.prompt.request_body import DEPTH_MAX
from penstock.frontend.prompt.routing_hints import CACHE_TTL_MAX, EXTRA_FIELDS, TEXT_MAX
from penstock.kernel.values import JsonObject

_WORD: JsonObject = {"type": "string", "minLength": 1, "maxLength": TEXT_MAX}
_COUNT: JsonObject = {"type": "integer", "minimum": 0}
_TEXT: JsonObject = {"type": "string"}
_TRUTH: JsonObject = {"type": "boolean"}
_TOKENS: JsonObject = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_PRIORITY: JsonObject = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
_WHOLE32: JsonObject = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}


def _open_object(properties: JsonObject, required: tuple[str, ...] = (), text: str | None = None) -> JsonObject:
    schema: JsonObject = {"type": "object", "properties": properties}
    if required:
        schema["required"] = [*required]
    return schema if text is None else {**schema, "description": text}


def _maybe(schema: JsonObject) -> JsonObject:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: JsonObject) -> JsonObject:
    return {"type": "array", "items": schema}


def _hint(schema: JsonObject, text: str) -> JsonObject:
    return {**schema, "description": text}


_HEADER_WORD: JsonObject = {"type": "string", "pattern": f"^[!-~]([ -~]{{0,{TEXT_MAX - 2}}}[!-~])?$"}

HEADERS: dict[str, JsonObject] = {
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

_NVEXT: JsonObject = _open_object(
    {
        "agent_hints": _open_object({"priority": _PRIORITY, "strict_priority": _WHOLE32, "osl": _WHOLE32}),
        "agent_context": _open_object({"session_id": _WORD, "program_id": _WORD, "context_type": _WORD}),
        "session_control": _open_object({"session_id": _WORD}),
        "cache_control": _open_object(
            {
                "type": {"const": "ephemeral"},
                "ttl": {
                    "anyOf": [
                        {"type": "number", "exclusiveMinimum": 0, "maximum": CACHE_TTL_MAX},
                        {"enum": ["5m", "1h"]},
                    ]
                },
            },
            ("type",),
        ),
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
_COMMON: JsonObject = {
    "model": _hint({"type": "string", "minLength": 1}, "One of GET /v1/models."),
    "stream": _TRUTH,
    "stream_options": _open_object({"include_usage": _TRUTH}),
    "max_tokens": _COUNT,
    "n": _COUNT,
    "cache_salt": _WORD,
    "nvext": _NVEXT,
}
_PART: JsonObject = {"anyOf": [{"type": "object"}, _TEXT]}
_MESSAGE: JsonObject = _open_object(
    {"role": _TEXT, "content": {"anyOf": [_TEXT, _list(_PART), {"type": "null"}]}}, ("role",)
)
_USAGE: JsonObject = _open_object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _maybe(_open_object({"cached_tokens": _maybe(_COUNT)})),
    }
)
SCHEMAS: JsonObject = {
    "Open": {"type": "object"},
    "ChatRequest": _open_object(
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
    "CompletionRequest": _open_object(
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
    "ProxiedRequest": _open_object({"model": {"type": "string", "minLength": 1}, "stream": _TRUTH}),
    "ChatCompletion": _open_object(
        {
            "id": _TEXT,
            "choices": _list(
                _open_object({"index": _COUNT, "message": {"type": "object"}, "finish_reason": _maybe(_TEXT)})
            ),
            "usage": _maybe(_USAGE),
            "nvext": {"type": "object"},
        },
        ("choices",),
    ),
    "Completion": _open_object(
        {
            "id": _TEXT,
            "choices": _list(_open_object({"index": _COUNT, "text": _TEXT, "finish_reason": _maybe(_TEXT)})),
            "usage": _maybe(_USAGE),
            "nvext": {"type": "object"},
        },
        ("choices",),
    ),
}
