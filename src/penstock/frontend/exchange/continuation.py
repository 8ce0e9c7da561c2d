"""Continuation of a stream on another engine: rewrites the later legs' chunks as those of the first."""

from collections.abc import Collection

import msgspec

from penstock.adapters.engines.dialects.dialect import GAVE_UP
from penstock.frontend.exchange.migration import StreamLeg
from penstock.frontend.exchange.sse import SseTap
from penstock.frontend.exchange.transcript import Transcript
from penstock.frontend.parsers.chat_speech import choices_in, speech_in
from penstock.kernel.values import JsonObject


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
