"""Shadow answer: what an answer says, read from its bytes, so that two can be compared."""

from dataclasses import dataclass, field

from penstock.adapters.engines.http.event_stream import DONE, object_in, payload_of, split_events
from penstock.frontend.exchange.sse import output_tokens
from penstock.frontend.exchange.upstream_request import error_text
from penstock.frontend.parsers.chat_speech import StreamedCalls, choices_in, speech_in
from penstock.kernel.errors import EngineError


@dataclass(slots=True)
class ReadAnswer:
    """The choices of an answer, each by its number: text, tool calls as name and arguments, finish reason."""

    texts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
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
        EngineError: it is none.
    """
    answer = ReadAnswer()
    parts = map(payload_of, split_events(raw)) if streamed else (raw,)
    streams: dict[int, StreamedCalls] = {}
    for part in parts:
        if part not in (b"", DONE):
            _add_chunk(answer, part, streams)
    answer.calls = {
        index: [(call.name, call.arguments) for call in made.calls] for index, made in streams.items() if made.calls
    }
    return answer


def _add_chunk(answer: ReadAnswer, part: bytes, streams: dict[int, StreamedCalls]) -> None:
    chunk = object_in(part)
    if chunk is None or not isinstance(chunk.get("choices"), list):
        raise EngineError(f"no completion: {error_text(part)}")
    if chunk.get("usage"):
        answer.tokens = output_tokens(chunk["usage"])
    for choice in choices_in(chunk):
        index = choice["index"] if isinstance(choice.get("index"), int) else 0
        speech = speech_in(choice.get("delta") or choice.get("message") or {"content": choice.get("text")})
        answer.texts[index] = answer.texts.get(index, "") + speech.text
        calls = streams.setdefault(index, StreamedCalls())
        for fragment in speech.calls:
            calls.take(fragment)
        if choice.get("finish_reason") is not None:
            answer.finish[index] = choice["finish_reason"]


def _characters(answer: ReadAnswer) -> int:
    return sum(map(len, answer.texts.values()))
