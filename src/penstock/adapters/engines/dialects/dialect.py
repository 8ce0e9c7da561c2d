"""`Dialect`: the differences of one kind of engine in requests, errors, metrics and cards, as a frozen value."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.adapters.engines.http.engine_http import EngineServer
from penstock.kernel.values import JsonObject

Resume = Literal["ids", "message"]
Refusal = Literal["client", "busy", "leaving", "fault"]
"""Why an engine answered with an error status.

    client    the request's own fault: pass the error on
    busy      no room now: place elsewhere, count no failure
    leaving   ending or dead although its health is 200: place elsewhere, take the worker out
    fault     it broke: place elsewhere, count a failure
"""
CardFields = dict[str, Any]
"""Fields of a `WorkerCard`."""

GAVE_UP = frozenset({"abort", "error"})
"""Finish reasons that mean a dropped request at most engines, and an end at none."""
_BUSY = (408, 429, 503)
_OTHER_MODEL = ("model not found", "model_not_found", "invalid model name", "server is pinned to")
"""Texts of servers (LM Studio, LiteLLM, Transformers) that answer 400 where they do not serve the model."""
OVERFLOW_WORDS = (
    "maximum context length",
    "model's context length",
    "maximum model length",
    "available context size",
    "max_seq_len",
    "max_num_tokens",
    "context_length_exceeded",
)
"""Texts of engines for a prompt and output longer than the model's context: vLLM (two ways), SGLang (two),
llama.cpp's server and its Python one, TensorRT-LLM (two)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """Names under ``/metrics`` (Prometheus); None where the engine has no such counter."""

    running: str | None = None
    waiting: str | None = None
    kv_usage: str | None = None
    prompt_tokens: str | None = None
    cached_tokens: str | None = None
    """Prompt tokens that came from a cache; counted when a prompt is done, as ``prompt_tokens`` is."""
    hits: str | None = None
    """Tokens found in the engine's own prefix cache; counted when a request is admitted."""
    generation_tokens: str | None = None
    preemptions: str | None = None
    passes: str | None = None
    """Forward passes."""
    first_tokens: str | None = None
    """Requests that had their first token."""
    itl_sum: str | None = None
    itl_count: str | None = None
    kv_expired: str | None = None
    """Requests whose KV no other engine fetched within its lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One kind of engine.

    Only differences are here: every engine takes ``/v1/completions`` and ``/v1/chat/completions``, stream server-sent
    events, and stop a request whose client closes the connection.
    """

    name: str
    """The ``engine`` of a `WorkerCard`."""
    title: str
    """Its name for people."""
    card: Callable[[EngineServer, Mapping[str, Any]], Awaitable[CardFields | None]]
    """Read a card from a server and its entry in ``/v1/models``; None where the server is of another kind."""

    health: str = "/health"
    """Route that costs nothing and is 200 where the server takes requests."""
    probe_fields: Mapping[str, Any] = field(default_factory=dict)
    """Request fields with which an engine whose role is fixed makes a token without another one."""
    resume: Resume | None = None
    """How another engine of this kind can continue an answer that was cut off: ``ids`` by a prompt of token ids (the
    engine returns those of its output where ``return_token_ids`` is set), ``message`` by a last assistant message that
    is to be continued (``continue_fields``), None: it can't."""
    continue_fields: tuple[tuple[str, Any], ...] = ()
    """Request fields that make the engine continue the last message of a chat."""
    gave_up: frozenset[str] = GAVE_UP
    """Finish reasons of a request that the engine dropped itself; the answer is not whole."""

    priority_field: str | None = None
    priority_sign: int = 1
    """-1 where the engine serves lower numbers first; Penstock serves higher ones first."""
    priority_needed: bool = False
    """Whether the engine serves a request without a number after all others, so that our usual one, 0, is sent too."""
    salt_field: str | None = None
    salts_chats_only: bool = False
    """Whether it refuses that field in a completion."""
    lora_field: str | None = None
    """Field that names an adapter; None where the adapter's name is given as the model."""
    request_ids: bool = True
    """Whether it takes an ``x-request-id`` of any form."""
    rank_header: str | None = None
    session_header: str | None = None
    """Header that names a request's session, for engines that keep or report something by session."""
    media_uuid: bool = False
    """Whether it takes a ``uuid`` beside an image, and keys its cache by that."""
    rank_field: str | None = None
    """Where a request carries its data-parallel rank."""

    raw_tool_choice: str | None = None
    """``tool_choice`` with which a server without a tool-call parser shows the tools to the model and passes on its
    text; None: it does so whatever the request says."""
    special_tokens_field: str | None = None
    """Field that, when false, leaves special tokens in the text."""

    clear_cache: str | None = None
    """POST to this route drops the cached blocks that no request holds, where the server allows it."""
    lora_missing: str | None = None
    """Text with which it refuses a request for an adapter that it does not hold, where that is no 404."""
    lora_routes: tuple[str, str] | None = None
    """Routes (POST, ``lora_name`` and ``lora_path``) that load and unload an adapter; None where it has none."""
    clear_is_late: bool = False
    """Whether a clear is published only at the engine's next step, so that an idle engine does not report it."""
    counters: MetricNames = MetricNames()
    leaving_words: tuple[str, ...] = ()
    """Texts with which an ending engine refuses work, whatever the status."""

    def priority(self, ours: int) -> int:
        """Return a priority as the engine counts: ours is higher first."""
        return ours * self.priority_sign

    def fields(
        self,
        model: str,
        *,
        adapter: str | None = None,
        priority: int | None = None,
        salt: str | None = None,
        chat: bool = True,
    ) -> JsonObject:
        """Return what a request's body must hold so that this engine understands it.

        Args:
            model: the model that the engine serves.
            adapter: the requested LoRA adapter of that model.
            priority: as we count; None is for an engine that does not schedule by priority, and may refuse one.
            salt: keeps this request's cached blocks apart from those of all others.
            chat: whether it is a chat, and no completion.
        """
        body: JsonObject = {}
        if adapter is not None and self.lora_field is not None:
            body["model"], body[self.lora_field] = model, adapter
        if self.priority_field is not None and (priority or (self.priority_needed and priority is not None)):
            body[self.priority_field] = self.priority(priority)
        if salt is not None and self.salt_field is not None and (chat or not self.salts_chats_only):
            body[self.salt_field] = salt
        return body

    def headers(self, request: str) -> dict[str, str]:
        """Return the headers that name a request to this engine."""
        return {"x-request-id": request} if self.request_ids else {}

    def lacks_adapter(self, status: int, body: str) -> bool:
        """Return whether an engine that was asked for an adapter refuses because it does not hold it."""
        return status == 404 or (status == 400 and self.lora_missing is not None and self.lora_missing in body)

    def refusal(self, status: int, body: str) -> Refusal:
        """Return what an answer with an error status means.

        Args:
            body: the answer's text, or its beginning.
        """
        if status >= 400 and any(words in body for words in self.leaving_words):
            return "leaving"
        if overflows(body):
            return "client"
        if status in _BUSY:
            return "busy"
        if status in (401, 499):
            return "fault"  # it asks us for a key, or says that we hung up: neither is the client's doing
        if (status == 404 and "model" in body.lower()) or (
            status == 400 and any(map(body.lower().count, _OTHER_MODEL))
        ):
            return "fault"  # requests name the model that the worker was described with: it serves another one now
        return "client" if 400 <= status < 500 else "fault"


def overflows(message: str) -> bool:
    """Return whether a refusal says that a request is longer than the model's context."""
    lower = message.lower()
    return any(words in lower for words in OVERFLOW_WORDS)


SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}\n]*\})?\s+(\S+)", re.MULTILINE)


def samples(metrics: str) -> dict[str, float]:
    """Read a Prometheus text: name -> sum over its label sets. Values that are no numbers are left out."""
    totals: dict[str, float] = {}
    for name, value in SAMPLE.findall(metrics):
        try:
            totals[name] = totals.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return totals
