"""Usage of a whole answer: reads its token counts and finish reasons, and nothing else."""

from typing import Annotated, Any

import msgspec

from penstock.adapters.engines.http.event_stream import object_in
from penstock.kernel.values import JsonObject

DAY_MS = 86_400_000


class _EndedChoice(msgspec.Struct):
    finish_reason: Any = None
    message: dict[str, msgspec.Raw] = {}
    error: Any = None


class AnswerEnd(msgspec.Struct):
    """What of an answer says how it ended."""

    choices: Annotated[list[_EndedChoice], msgspec.Meta(min_length=1)]
    counts: Any = msgspec.field(default=None, name="usage")
    error: Any = None
    metrics: Any = None

    @property
    def generation(self) -> float:
        """Seconds from the first token to the last, where the engine says so (vLLM's per-request metrics), else 0."""
        took = self.metrics.get("generation_time_ms") if isinstance(self.metrics, dict) else None
        return took / 1e3 if isinstance(took, int | float) and 0 < took < DAY_MS else 0.0

    @property
    def failed(self) -> bool:
        """Whether it reports an error in place of an answer."""
        return bool(self.error or any(choice.error for choice in self.choices))

    @property
    def usage(self) -> JsonObject | None:
        return self.counts if isinstance(self.counts, dict) else None

    @property
    def reasons(self) -> set[str]:
        """The finish reasons of its choices."""
        return {choice.finish_reason for choice in self.choices if isinstance(choice.finish_reason, str)}


class _UsageAnswer(msgspec.Struct):
    usage: JsonObject | None = None


_decoder = msgspec.json.Decoder(_UsageAnswer)
_ends = msgspec.json.Decoder(AnswerEnd)


def end_of(body: bytes) -> AnswerEnd | None:
    """Return the end of a completion's answer, or None where it is none."""
    try:
        return _ends.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        try:
            return _ends.decode(msgspec.json.encode(object_in(body)))  # which reads more
        except msgspec.DecodeError:
            return None


def usage_of(body: bytes) -> JsonObject | None:
    """Return the usage object of an answer, or None where it has none or is not JSON."""
    try:
        return _decoder.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
