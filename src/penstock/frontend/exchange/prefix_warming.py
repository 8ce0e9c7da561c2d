"""Prefix warming: has a worker compute the beginning of a chat's next turn as soon as the present turn has ended.

A caller asks for it with ``nvext.agent_hints.speculative_prefill``. The conversation and the answer go to the worker
that served the chat, after a hand-off to the one that did the prefill, as a chat of one output token that nobody reads.
The router does not place or count it: it is sent only where no prompt waits, with the lowest priority, and the next
turn's own request ends it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.http.engine_call import EngineCall, EngineCalls
from penstock.adapters.engines.http.event_stream import chunks_of, object_in
from penstock.adapters.telemetry.request_span import NO_SPAN
from penstock.frontend.cluster_view import ClusterView
from penstock.frontend.exchange.migration import TEXT_BYTES_MAX
from penstock.frontend.exchange.upstream_request import (
    UpstreamRequest,
    engine_fields,
    engine_headers,
    error_text,
    warming_card,
)
from penstock.frontend.parsers.chat_speech import StreamedCalls, choices_in, speech_in
from penstock.frontend.prompt.request_body import Parsed
from penstock.kernel.errors import EngineError
from penstock.kernel.values import JsonObject, Target, WorkerCard
from penstock.router.events import Closed, Dispatch


class SpokenMessage:
    """The answer to one chat, in the bytes that its client gets."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def take(self, data: bytes) -> None:
        """Take a piece of the answer."""
        self._size += len(data)
        if self._size <= TEXT_BYTES_MAX:
            self._pieces.append(data)

    def message(self, *, streamed: bool) -> JsonObject | None:
        """Return what callers send back with the next turn; None where it was too long to collect, or empty.

        Reasoning is left out, as callers and templates do.
        """
        if self._size > TEXT_BYTES_MAX:
            return None
        body = b"".join(self._pieces)
        content, calls = "", StreamedCalls()
        try:
            chunks = chunks_of(body) if streamed else [object_in(body) or {}]
            for choice in (each for chunk in chunks for each in choices_in(chunk)):
                speech = speech_in(choice.get("delta") or choice.get("message") or {})
                content += speech.text
                for fragment in speech.calls:
                    calls.take(fragment)
        except EngineError:
            return None  # it went to the client as it is, and is no chat that a next turn could be prepared with
        if not content and not calls.calls:
            return None
        made = [
            {"id": call.id or None, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls.calls
        ]
        return {"role": "assistant", "content": content or None, **({"tool_calls": made} if made else {})}


OPEN_MAX = 32
"""Most that run at a time, one per worker: each holds a connection and a conversation."""
LIMIT = 30.0
"""Seconds that one may take: a longer prefill disturbs others, and the next turn has mostly come by then."""
PRIORITY = -(2**31)
"""Below every request's."""
ONLY_OUTPUT = frozenset(
    {
        *("max_completion_tokens", "min_tokens", "stream_options", "logprobs", "top_logprobs", "ignore_eos"),
        *("response_format", "structured_outputs", "priority"),
    }
)
"""Fields of a chat that say nothing of its prompt."""


@dataclass(slots=True)
class _OpenWarming:
    """One conversation on its way through a worker's prefill."""

    model: str
    messages: list[object]
    """Those of the turn that has ended, without its answer."""
    call: EngineCall
    overtaken: bool = False


class PrefixWarming:
    """All of one frontend process.

    Args:
        note: enters what came of one: the request whose answer it continues, its model, one word, and text for people.
    """

    def __init__(self, engines: EngineCalls, cluster: ClusterView, note: Callable[[str, str, str, str], None]) -> None:
        self._engines = engines
        self._cluster = cluster
        self._note = note
        self._tasks = BackgroundTasks()
        self.open: dict[Target, _OpenWarming] = {}

    def begin(
        self,
        job: UpstreamRequest,
        spoken: SpokenMessage,
        dispatch: Dispatch,
        closed: Closed,
        adapter: str | None,
        headers: Mapping[str, str],
    ) -> None:
        """A chat with the hint has been answered: send its next turn's beginning, or note why not.

        Args:
            adapter: the LoRA adapter that was asked for.
            headers: the client's.
        """
        card = warming_card(job, dispatch)
        if card is None or job.parsed is None:
            return
        target = next((leg.target for leg in reversed(closed.legs) if leg.target.worker == card.id), dispatch.target)
        message = spoken.message(streamed=job.streamed)
        reason = "the answer is too long, or has neither text nor tool calls" if message is None else ""
        reason = reason or self._obstacle(target, card)
        if reason:
            return self._note(closed.id, closed.model, "skipped", f"skipped, since {reason}")
        messages = job.parsed.fields["messages"]
        dispatch = msgspec.structs.replace(dispatch, target=target, card=card, handoff=None)
        dialect = dialect_of(card.engine)
        following = next_turn(job, job.parsed, [*messages, message])
        fields = {**engine_fields(following, dispatch, adapter), "stream": False, "max_tokens": 1}
        if any(name == "add_generation_prompt" for name, _ in dialect.continue_fields):
            fields["add_generation_prompt"] = (
                False  # else its last tokens would be those of an answer, not of a question
            )
        sent = engine_headers(following, dialect, dispatch, f"{closed.id}-next", headers, NO_SPAN)
        call = self._engines.call(card.url, job.path, msgspec.json.encode(fields), sent)
        warming = self.open[target] = _OpenWarming(closed.model, messages, call)
        self._tasks.spawn(self._carry(warming, target, closed.id), f"warming-{closed.id}")

    def overtaken(self, parsed: Parsed) -> None:
        """A chat has arrived: end what was to prepare it, since it computes the same itself now."""
        messages = parsed.fields.get("messages") or []
        for warming in self.open.values():
            if len(messages) > len(warming.messages) and messages[: len(warming.messages)] == warming.messages:
                warming.overtaken = True
                warming.call.stop("the next turn has come")

    async def close(self) -> None:
        """Cancel all."""
        await self._tasks.close()

    def _obstacle(self, target: Target, card: WorkerCard) -> str:
        """Return why none is sent; nothing where one may be."""
        if not self._cluster.is_current(card):
            return f"worker {target} is gone"
        if target in self.open:
            return f"worker {target} computes another chat's next turn"
        if len(self.open) >= OPEN_MAX:
            return f"{OPEN_MAX} others are under way"
        waiting = self._cluster.prefill_tokens(card.model, target)
        return f"worker {target} is busy: {waiting:,} prompt tokens wait there" if waiting else ""

    async def _carry(self, warming: _OpenWarming, target: Target, request: str) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(LIMIT):
                await warming.call.begin()
                body = await warming.call.read()
            if warming.call.status >= 400:
                raise EngineError(f"it answered {warming.call.status}: {error_text(body)}")
            took = time.monotonic() - began
            self._note(request, warming.model, "done", f"computed by {target} in {took:.3f} s")
        except TimeoutError:
            self._note(request, warming.model, "failed", f"worker {target} did not end it within {LIMIT:g} s")
        except EngineError as error:
            if warming.overtaken:
                self._note(request, warming.model, "overtaken", f"stopped at {target}: the next turn had come")
            else:
                self._note(request, warming.model, "failed", f"worker {target}: {error}")
        finally:
            del self.open[target]
            warming.call.close()


def next_turn(job: UpstreamRequest, parsed: Parsed, messages: list[object]) -> UpstreamRequest:
    """Return a chat's request with a longer conversation, of the lowest priority and for one piece of output."""
    fields = {name: value for name, value in parsed.fields.items() if name not in ONLY_OUTPUT}
    assert job.hints is not None
    preferences = msgspec.structs.replace(job.hints.preferences, priority=PRIORITY)
    return replace(
        job,
        parsed=replace(parsed, fields={**fields, "messages": messages}),
        hints=replace(job.hints, preferences=preferences),
        streamed=False,
        adds_usage=False,
        strip_usage=False,
    )
