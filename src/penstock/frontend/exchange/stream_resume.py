"""Stream resume: how another engine continues a streamed answer, in the chunks of the first."""

import asyncio
import time
from collections.abc import Collection

import msgspec

from penstock.adapters.engines.dialects.dialect import GAVE_UP, Dialect
from penstock.frontend.exchange.exchange_context import ExchangeContext
from penstock.frontend.exchange.migration import (
    MigrationImpossible,
    StreamLeg,
    Transcript,
    leg_of,
    obstacle,
    transcript_for,
)
from penstock.frontend.exchange.sse import SseTap
from penstock.frontend.exchange.upstream_request import UpstreamRequest
from penstock.frontend.parsers.answer_parsing import AnswerParsing
from penstock.frontend.parsers.chat_speech import choices_in, speech_in
from penstock.frontend.prompt.model_catalog import ResolvedModel
from penstock.frontend.prompt.request_body import choices_of
from penstock.kernel.errors import EngineError
from penstock.kernel.values import JsonObject, Prompt
from penstock.router.events import Resume


class ContinuationTap(SseTap):
    """Rewrite each chunk of a later leg.

    Chunks get the id, time and model of the first leg's, in the client's own dialect; usage counts the prompt as it
    arrived and the output of all legs.

    Args:
        chat: the client requested a chat, whatever route the engine got.
        usage: the client requested the usage chunk; ``always``: usage in every chunk.
        ids: the client requested token ids.
    """

    __slots__ = ("_always", "_before", "_chat", "_ids", "_leg", "_made", "_owed", "_transcript", "_wants_usage")

    def __init__(
        self,
        leg: StreamLeg,
        transcript: Transcript,
        *,
        chat: bool,
        usage: bool,
        always: bool = False,
        ids: bool = False,
        gave_up: Collection[str] = GAVE_UP,
    ) -> None:
        super().__init__(strip_usage=not usage, gave_up=gave_up)
        self._leg = leg
        self._transcript = transcript
        self._chat = chat
        self._wants_usage = usage
        self._always = always
        self._ids = ids
        self._owed = leg.unsent_text
        self._before = leg.point.tokens
        self._made = 0
        self.tokens = self._before

    def _passed(self, event: bytes, chunk: JsonObject) -> bytes:
        choices = choices_in(chunk)
        usage = chunk.get("usage")
        if isinstance(usage, dict) and not choices:
            self.usage = self._total(usage)
            return self._chunk({"choices": [], "usage": self.usage}) if self._wants_usage else b""
        return b"".join(map(self._in_client_form, choices))

    def _in_client_form(self, choice: JsonObject) -> bytes:
        """Return one choice's output in the client's form; b"" where it has none."""
        text = speech_in(choice.get("delta") or {"content": choice.get("text")}).text
        made = choice.get("token_ids") or []
        reason = choice.get("finish_reason")
        if not (text or made or reason):
            return b""
        self.started = True
        self._made += len(made) if self._transcript.mode == "ids" else 1
        self.tokens = self._before + self._made
        text, self._owed = self._owed + text, ""
        output: JsonObject = {"index": 0}
        output |= {"delta": {"content": text}} if self._chat else {"text": text}
        output |= {"logprobs": None, "finish_reason": reason}
        if reason is not None:
            output["stop_reason"] = choice.get("stop_reason")
        if self._ids:
            output["token_ids"] = made
        body: JsonObject = {"choices": [output]}
        if self._always:  # a leg is asked for its usage at its end only
            body["usage"] = self._total({})
        out = self._chunk(body)
        self._transcript.wrote(made, out, reason)
        return out

    def _chunk(self, body: JsonObject) -> bytes:
        return b"data: " + msgspec.json.encode({**self._leg.head, **body}) + b"\n\n"

    def _total(self, usage: JsonObject) -> JsonObject:
        """Return usage over all legs, from the usage of this leg's engine."""
        made = usage.get("completion_tokens")
        output = self._before + (made if isinstance(made, int) else self._made)
        return usage_of_all(self._leg.prompt_tokens, output)


def usage_of_all(prompt: int, output: int) -> JsonObject:
    """Return the usage of an answer that several engines made."""
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def last_words(leg: StreamLeg, transcript: Transcript, *, chat: bool, usage: bool) -> bytes:
    """Return the end of a stream whose output is whole but whose engine was lost before its end mark."""
    out = b""

    def chunk(body: JsonObject) -> bytes:
        return b"data: " + msgspec.json.encode({**leg.head, **body}) + b"\n\n"

    if transcript.finish_reason is None:
        text: JsonObject = {"delta": {"content": leg.unsent_text}} if chat else {"text": leg.unsent_text}
        output = {"index": 0, **text}
        out += chunk({"choices": [{**output, "logprobs": None, "finish_reason": "length", "stop_reason": None}]})
    if usage:
        out += chunk({"choices": [], "usage": usage_of_all(leg.prompt_tokens, leg.point.tokens)})
    return out + b"data: [DONE]\n\n"


class ResumableStream:
    """Resumption of one streamed answer. Before its first output every attempt begins anew."""

    __slots__ = (
        "_chat",
        "_context",
        "_job",
        "_leg_fields",
        "_lost_at",
        "_prompt",
        "_raw_calls",
        "_resolved",
        "_unfit",
        "leg",
        "transcript",
        "why",
    )

    def __init__(self, context: ExchangeContext, resolved: ResolvedModel, job: UpstreamRequest, prompt: Prompt) -> None:
        self.leg: StreamLeg | None = None
        """Where the present attempt continues; None where it starts from the beginning."""
        self.transcript: Transcript | None = None
        """The output so far; None where no other engine could continue it."""
        self.why: str | None = None
        """Why a broken answer can't migrate, where that is known already."""
        self._unfit: Dialect | None = None
        """Dialect of the engine whose answer could not migrate."""
        self._context = context
        self._resolved = resolved
        self._job = job
        self._chat = job.parsed is not None and job.parsed.endpoint == "chat_completions"
        self._prompt = prompt
        self._lost_at: float | None = None
        self._raw_calls = False
        """Whether the engine's text has the calls of tools in it, as the model wrote them."""
        self._leg_fields: JsonObject = {}

    @property
    def job(self) -> UpstreamRequest:
        """The present request: the client's, or the rest of it."""
        return self._job if self.leg is None else self.leg.job

    def start(self, dialect: Dialect, parsing: AnswerParsing | None) -> tuple[UpstreamRequest, Transcript | None]:
        """Return the request for an engine, and the transcript that follows its answer from the beginning."""
        if self.leg is not None:
            return self.leg.job, None
        if self._context.settings.router.migration.limit == 0:
            self.why = "router.migration.limit is 0"
            return self._job, None
        # Whatever the engine, another one can go on with a text; with a chat only some can.
        wanted = self._job.streamed and (dialect.resume is not None or not self._chat)
        self._raw_calls = parsing is not None and parsing.plan.calls is not None
        self._leg_fields = {"skip_special_tokens": False} if parsing is not None and parsing.plan.special else {}
        transcript = transcript_for(self._job, dialect, raw_calls=self._raw_calls) if wanted else None
        if transcript is None:
            self._unfit = dialect
        return self._job, transcript

    @property
    def why_not(self) -> str:
        """Why a broken answer can't migrate; computed only on request."""
        if self.why is not None or self._unfit is None:
            return self.why or ""
        return obstacle(self._job, raw_calls=self._raw_calls) or f"{self._unfit.title} can't take up an answer"

    def tap(self, dialect: Dialect) -> SseTap:
        """Return the tap on the stream of a new attempt."""
        parsed = self._job.parsed
        if self.leg is None or self.transcript is None or parsed is None:
            return SseTap(
                strip_usage=self._job.strip_usage,
                openai=parsed is not None,
                gave_up=dialect.gave_up,
                choices=1 if parsed is None else choices_of(parsed),
            )
        return ContinuationTap(
            self.leg,
            self.transcript,
            chat=self._chat,
            usage=parsed.wants_usage,
            always=bool((parsed.fields.get("stream_options") or {}).get("continuous_usage_stats")),
            ids=bool(parsed.fields.get("return_token_ids")),
            gave_up=dialect.gave_up,
        )

    async def drop(self, counted: int) -> Resume | None:
        """The answering engine is lost: return where another can continue, or None where none can.

        Args:
            counted: output tokens that passed.
        """
        transcript = self.transcript
        if transcript is None:
            return None
        self._lost_at = time.monotonic()
        transcript.settle()
        hints = self._job.hints
        try:
            # Long prompts are some ms of work, and an engine that dies takes many streams with it.
            self.leg = await asyncio.to_thread(
                leg_of,
                transcript,
                self._job,
                self._prompt,
                self._resolved,
                self._context.catalog.hashing(self._resolved, None if hints is None else hints.salt),
                self._context.settings.router.migration.tokens_max,
                counted,
                self._leg_fields,
            )
        except (MigrationImpossible, EngineError) as error:
            self.why = str(error)
            return None
        return self.leg.point

    @property
    def complete(self) -> bool:
        """Whether all output had come before the engine was lost, and only the end is missing."""
        if self.leg is None or self.transcript is None:
            return False
        return self.transcript.finish_reason is not None or (self.leg.left is not None and self.leg.left <= 0)

    def last_words(self) -> tuple[bytes, dict[str, object]]:
        """Return the end of the stream of a `complete` answer, and its usage."""
        parsed = self._job.parsed
        assert parsed is not None and self.leg is not None and self.transcript is not None
        ending = last_words(self.leg, self.transcript, chat=self._chat, usage=parsed.wants_usage)
        return ending, usage_of_all(self.leg.prompt_tokens, self.leg.point.tokens)

    def taken(self) -> None:
        """The next engine has begun its output."""
        if self._lost_at is not None:
            self._context.metrics.migrated(self._resolved.model, time.monotonic() - self._lost_at)
            self._lost_at = None
