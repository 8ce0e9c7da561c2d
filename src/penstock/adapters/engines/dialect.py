"""What does one kind of engine do in its own way? A frozen value per kind, read by whoever speaks to an engine."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.adapters.engines.asking import Server

Resume = Literal["ids", "message"]
Refusal = Literal["client", "busy", "leaving", "fault"]
"""Why an engine answered with an error status.

    client    the request's own fault: pass it on
    busy      it has no room now: elsewhere, and nothing counts against it
    leaving   it is ending or dead while its health still says otherwise: elsewhere, and take it out
    fault     it broke: elsewhere, and count it
"""
Told = dict[str, Any]
"""Fields of a `WorkerCard`."""

_BUSY = (408, 429, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Names under ``/metrics`` (Prometheus); None where the engine does not count that."""

    running: str | None = None
    waiting: str | None = None
    kv_usage: str | None = None
    prompt_tokens: str | None = None
    cached_tokens: str | None = None
    """Of these, those that came from a cache; counted when a prompt is done, as ``prompt_tokens`` is."""
    hits: str | None = None
    """Tokens found in its own prefix cache; counted when a request is let in."""
    generation_tokens: str | None = None
    preemptions: str | None = None
    passes: str | None = None
    """Forward passes."""
    first_tokens: str | None = None
    """Requests that had their first token."""
    itl_sum: str | None = None
    itl_count: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One kind of engine.

    Only what differs is here: all of them take ``/v1/completions`` and ``/v1/chat/completions``, stream server-sent
    events, and stop a request whose client closes the connection.
    """

    name: str
    """The ``engine`` of a `WorkerCard`."""
    title: str
    """Its name for people."""
    card: Callable[[Server, Mapping[str, Any]], Awaitable[Told | None]]
    """Read a card from a server and its entry in ``/v1/models``; None where the server is of another kind."""

    resume: Resume | None = None
    """How another engine of this kind can go on with an answer that was cut off: ``ids`` by a prompt of token ids (the
    engine tells those of its output where ``return_token_ids`` is set), ``message`` by a last assistant message that
    is to be continued (``continue_fields``), None not at all."""
    continue_fields: tuple[tuple[str, Any], ...] = ()
    """What makes it go on with the last message of a chat."""
    gave_up: frozenset[str] = frozenset()
    """Finish reasons by which the engine says that it dropped the request itself; the answer is not whole."""

    priority_field: str | None = None
    priority_sign: int = 1
    """-1 where a lower number goes first: ours go by higher first."""
    salt_field: str | None = None
    lora_field: str | None = None
    """Field that names an adapter; None where the adapter's name is given as the model."""
    rank_header: str | None = None
    rank_field: str | None = None
    """Where the data-parallel rank that is meant travels."""

    clear_cache: str | None = None
    """POST to this route drops what no request holds, where the server allows it."""
    clear_is_late: bool = False
    """Whether a clear is announced only at the engine's next step, so that an idle one keeps it to itself."""
    counters: Counters = Counters()
    leaving_words: tuple[str, ...] = ()
    """Texts by which an engine that is ending refuses work, whatever the status."""

    def priority(self, ours: int) -> int:
        """Return a priority as the engine counts: ours is higher first."""
        return ours * self.priority_sign

    def fields(
        self, model: str, *, adapter: str | None = None, priority: int = 0, salt: str | None = None
    ) -> dict[str, Any]:
        """Return what a request's body must hold so that this engine understands it.

        Args:
            model: the model that the engine serves.
            adapter: LoRA adapter of it that is meant.
            priority: as we count; 0 says nothing, since an engine may refuse one where it does not schedule by them.
            salt: keeps this request's cached blocks apart from everybody else's.
        """
        told: dict[str, Any] = {}
        if adapter is not None and self.lora_field is not None:
            told["model"], told[self.lora_field] = model, adapter
        if priority and self.priority_field is not None:
            told[self.priority_field] = self.priority(priority)
        if salt is not None and self.salt_field is not None:
            told[self.salt_field] = salt
        return told

    def refusal(self, status: int, said: str) -> Refusal:
        """Tell what an answer with an error status means.

        Args:
            said: the answer's text, or its beginning.
        """
        if status >= 400 and any(words in said for words in self.leaving_words):
            return "leaving"
        if status in _BUSY:
            return "busy"
        return "client" if 400 <= status < 500 else "fault"


SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}\n]*\})?\s+(\S+)", re.MULTILINE)


def samples(metrics: str) -> dict[str, float]:
    """Read a Prometheus text: name -> sum over its label sets. What is no number is left out."""
    found: dict[str, float] = {}
    for name, value in SAMPLE.findall(metrics):
        try:
            found[name] = found.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return found
