"""Transcript of a streamed answer: as much of its output as another engine needs to continue it.

While a stream runs this costs a search per piece: of the engine's chunks only the token ids are kept, which
Penstock requests from the engine and cuts out of the client's stream.
"""

import re
from array import array
from collections.abc import Sequence
from typing import Any, Literal

from penstock.adapters.engines.http.event_stream import chunks_of
from penstock.frontend.parsers.chat_speech import speech_in
from penstock.kernel.values import JsonObject

Mode = Literal["ids", "text"]
"""How another engine receives the output so far: as token ids, or as text that it tokenises again."""

TEXT_BYTES_MAX = 1 << 20
"""Most bytes of a stream that are kept where its text may be needed; a longer one does not migrate."""
# Inside a JSON string every quote is escaped, so these can only match a field.
_OUTPUT = re.compile(rb'"token_ids"\s*:\s*\[([\d,\s]*)\]')
_FIELDS = re.compile(rb',\s*"(?:prompt_)?token_ids"\s*:\s*(?:\[[\d,\s]*\]|null)')


class Transcript:
    """Records what the client gets.

    Args:
        mode: what another engine will receive.
        keep_text: the text may be needed although ids are sent.
        strip: cut the token ids out, because the client did not request them.
        continue_fields: fields of a chat's body that make the engine continue its last message.
    """

    __slots__ = (
        "_keep",
        "_last",
        "_opening",
        "_strip",
        "continue_fields",
        "count",
        "finish_reason",
        "ids",
        "mode",
        "pieces",
        "size",
    )

    def __init__(
        self, mode: Mode, *, keep_text: bool, strip: bool, continue_fields: Sequence[tuple[str, Any]] = ()
    ) -> None:
        self.mode = mode
        self.continue_fields = continue_fields
        self.ids: array[int] = array("I")
        """Output tokens so far."""
        self.count = 0
        """Output chunks so far: the only measure of length where there are no ids."""
        self.finish_reason: str | None = None
        """Set where the answer had ended and only the end of its stream is missing; see `settle`."""
        self.pieces: list[bytes] = []
        self.size = 0
        self._keep = keep_text or mode == "text"
        self._strip = strip
        self._opening = b""
        self._last = b""

    def take(self, out: bytes) -> bytes:
        """Take whole events of the engine; return them in the client's form."""
        if not self._opening:
            self._opening = out
        self._last = out
        if self.mode == "ids" and b'token_ids"' in out:
            for ids in _OUTPUT.findall(out):
                if ids:
                    self.ids.extend(map(int, ids.split(b",")))
            if self._strip:
                out = _FIELDS.sub(b"", out)
        if self._keep and self.size <= TEXT_BYTES_MAX:
            self.pieces.append(out)
            self.size += len(out)
        return out

    def wrote(self, tokens: Sequence[int], out: bytes, finish_reason: str | None) -> None:
        """Record the output of a later leg."""
        self.ids.extend(tokens)
        self._last = b""
        self.finish_reason = finish_reason
        if self._keep and self.size <= TEXT_BYTES_MAX:
            self.pieces.append(out)
            self.size += len(out)

    def settle(self) -> None:
        """Determine whether the answer had ended; called when a leg broke off."""
        for chunk in chunks_of(self._last):
            for choice in chunk.get("choices") or ():
                self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def head(self) -> JsonObject:
        """Fields that every chunk of the answer carries: id, object, created, model."""
        for chunk in chunks_of(self._opening):
            if chunk.get("choices"):
                return {k: v for k, v in chunk.items() if k not in ("choices", "usage", "prompt_token_ids")}
        return {}

    @property
    def prompt(self) -> list[int] | None:
        """The prompt's token ids as the first engine counted them, or None where it did not report them."""
        for chunk in chunks_of(self._opening):
            places = [chunk, *(chunk.get("choices") or ())]
            for place in places:
                ids = place.get("prompt_token_ids")
                if isinstance(ids, list):
                    return ids
        return None

    @property
    def reasons(self) -> bool:
        """Whether the engine parses the model's reasoning out of its text: then text and tokens do not agree."""
        return b'"reasoning' in self._opening and any(
            choice["delta"].get(name)
            for chunk in chunks_of(self._opening)
            for choice in chunk.get("choices") or ()
            if isinstance(choice.get("delta"), dict)
            for name in ("reasoning", "reasoning_content")
        )

    @property
    def text(self) -> str | None:
        """The text that the client has received, or None where it was too long to keep."""
        if self.size > TEXT_BYTES_MAX:
            return None
        parts: list[str] = []
        for chunk in chunks_of(b"".join(self.pieces)):
            for choice in chunk.get("choices") or ():
                parts.append(speech_in(choice.get("delta") or {"content": choice.get("text")}).text)
        return "".join(parts)
