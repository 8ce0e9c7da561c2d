"""Tool call stream: reads the calls out of a model's text, whatever the pieces in which the text comes.

A call is passed on when it is whole. So text that looks like a call and turns out to be none is content again, to the
last character, and an answer that is cut anywhere reads as the whole one does.
"""

from penstock.frontend.parsers.text_markers import begun, earliest
from penstock.frontend.parsers.tool_format import (
    NO_CALL,
    CallReader,
    ContentDelta,
    ParsedDelta,
    ToolFormat,
    ToolSchemas,
    joined,
)

CALL_MAX = 256 * 1024
"""Most characters of one call; a longer one is content. Larger than any model's longest answer in practice."""
FALSE_MAX = 100
"""Most markers of one answer at which no call stands; behind them all is content. Each may have been read to the end of
the text: a model that repeats the beginning of a call thousands of times would stop its frontend for a minute."""

_NOT_PROSE = ("{", "[", "`", "<")
"""Signs behind which an object may be part of code, of JSON or of an example."""


class ToolCallStream:
    """Text of one answer in, content and calls out."""

    __slots__ = (
        "_bare",
        "_beside",
        "_false",
        "_format",
        "_markers",
        "_padding",
        "_reader",
        "_schemas",
        "_text",
        "calls",
    )

    def __init__(self, tool_format: ToolFormat, schemas: ToolSchemas) -> None:
        self.calls = 0
        """Calls so far."""
        self._format = tool_format
        self._schemas = schemas
        self._markers = (*tool_format.starts, *tool_format.wrappers)
        self._text = ""
        """What is not decided yet; begins with a marker while there is a reader."""
        self._reader: CallReader | None = None
        self._padding = ""
        """Space and wrappers that are left out where a call is beside them."""
        self._beside = True
        """Whether only padding came since the beginning, the last call or a wrapper."""
        self._false = 0
        self._bare = bool(tool_format.bare)
        """Whether a call without a marker may begin: only calls and padding came so far, or text, by the format."""

    def feed(self, text: str) -> list[ParsedDelta]:
        """Take a piece of the text."""
        self._text += text
        return self._read_calls(final=False)

    def finish(self) -> list[ParsedDelta]:
        """The text has ended: return the rest."""
        out = self._read_calls(final=True)
        if self._padding and not self.calls:
            out.append(ContentDelta(self._padding))
        self._padding = ""
        return joined(out)

    def _read_calls(self, final: bool) -> list[ParsedDelta]:
        out: list[ParsedDelta] = []
        while self._text:
            if self._reader is None and not self._seek(out, final):
                break
            if self._reader is not None and not self._take_call(out, final):
                break
        return joined(out)

    def _seek(self, out: list[ParsedDelta], final: bool) -> bool:
        """Pass on text up to the next marker; False where more text is needed."""
        if self._beside:
            rest = self._text.lstrip()
            space = len(self._text) - len(rest)
            self._padding += self._text[:space]
            self._text = rest
            if not rest:
                return False
        bare = self._format.bare
        if not self._bare or not (self._format.behind_text or self._text.startswith(bare)):
            bare = ()
        place = earliest(self._text, (*self._markers, *bare))
        if place is not None and place[1] in bare and any(sign in self._text[: place[0]] for sign in _NOT_PROSE):
            place = earliest(self._text, self._markers)
        if place is None:
            cut = len(self._text) - (0 if final else begun(self._text, self._markers))
            self._emit_text(out, self._text[:cut])
            self._text = self._text[cut:]
            return False
        at, marker = place
        if not final and any(
            longer.startswith(self._text[at:]) for longer in self._markers if len(longer) > len(marker)
        ):
            return False
        self._emit_text(out, self._text[:at])
        self._text = self._text[at:]
        if marker in self._format.wrappers:
            if marker == ";" and not self._beside:  # a mere semicolon in a sentence
                self._emit_text(out, marker)
            elif not (self.calls and self._beside and not self._padding.strip()):  # which ends the call before it
                self._padding += marker
                self._beside = True
            self._text = self._text[len(marker) :]
        else:
            self._reader = self._format.reader(marker, self._schemas)
        return True

    def _take_call(self, out: list[ParsedDelta], final: bool) -> bool:
        """Read at the marker; False where more text is needed."""
        assert self._reader is not None
        read = self._reader.read(self._text, final)
        if read is None:
            if len(self._text) < CALL_MAX:
                return False
            read = NO_CALL
        elif read.end > CALL_MAX:
            read = NO_CALL
        self._reader = None
        if read.calls:
            out += read.calls
            self.calls += len(read.calls)
            self._padding, self._beside = "", True
            self._text = self._text[read.end :]
        else:
            self._false += 1
            if self._false == FALSE_MAX:
                self._markers, self._bare = (), False
            # Not the whole of it: behind this marker another call may begin.
            cut = read.end or 1
            self._emit_text(out, self._text[:cut])
            self._text = self._text[cut:]
        return True

    def _emit_text(self, out: list[ParsedDelta], text: str) -> None:
        if text:
            out.append(ContentDelta(self._padding + text))
            self._padding, self._beside = "", False
            self._bare = self._bare and self._format.behind_text and not any(sign in text for sign in _NOT_PROSE)
