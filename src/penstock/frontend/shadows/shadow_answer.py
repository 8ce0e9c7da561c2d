"""Shadow answer: what an answer says, read from its bytes, so that two can be compared."""

from dataclasses import dataclass, field

import msgspec

from penstock.adapters.engines.http.event_stream import DONE, payload_of, split_events
from penstock.frontend.exchange.sse import output_tokens
from penstock.kernel.values import JsonObject


class _ComparedFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ComparedCall(msgspec.Struct):
    index: int | None = None
    function: _ComparedFunction | None = None


class _ComparedSpeech(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_ComparedCall] | None = None


class _ComparedChoice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _ComparedSpeech | None = None
    message: _ComparedSpeech | None = None
    finish_reason: str | None = None


class _ComparedAnswer(msgspec.Struct):
    choices: list[_ComparedChoice] = []
    usage: JsonObject | None = None


_decoder = msgspec.json.Decoder(_ComparedAnswer)


@dataclass(slots=True)
class ReadAnswer:
    """The choices of an answer, each by its number: text, tool calls as name and arguments, finish reason."""

    texts: dict[int, str] = field(default_factory=dict)
    calls: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    tokens: int | None = None

    def differs_in(self, other: "ReadAnswer") -> tuple[str, ...]:
        """Return in what two answers differ; none where they are the same."""
        compared = (("text", self.texts, other.texts), ("tool_calls", self.calls, other.calls))
        found = [name for name, mine, theirs in compared if mine != theirs]
        if "text" in found and _characters(self) != _characters(other):
            found.append("length")
        return (*found, *(("finish_reason",) if self.finish != other.finish else ()))


def read_answer(raw: bytes, *, streamed: bool) -> ReadAnswer:
    """Read a chat's or a text completion's answer.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    answer = ReadAnswer()
    parts = map(payload_of, split_events(raw)) if streamed else (raw,)
    for part in parts:
        if part not in (b"", DONE):
            _take(answer, _decoder.decode(part))
    return answer


def _take(answer: ReadAnswer, part: _ComparedAnswer) -> None:
    if part.usage is not None:
        answer.tokens = output_tokens(part.usage)
    for choice in part.choices:
        speech = choice.delta or choice.message
        text = choice.text if speech is None else speech.content
        answer.texts[choice.index] = answer.texts.get(choice.index, "") + (text or "")
        for place, call in enumerate((speech and speech.tool_calls) or ()):
            at = (choice.index, place if call.index is None else call.index)
            name, arguments = answer.calls.get(at, ("", ""))
            function = call.function or _ComparedFunction()
            answer.calls[at] = (name + (function.name or ""), arguments + (function.arguments or ""))
        if choice.finish_reason is not None:
            answer.finish[choice.index] = choice.finish_reason


def _characters(answer: ReadAnswer) -> int:
    return sum(map(len, answer.texts.values()))
