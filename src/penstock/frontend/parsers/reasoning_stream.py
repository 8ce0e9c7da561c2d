"""Reasoning stream: parts a model's reasoning, which stands between two tags, from its answer."""

from collections.abc import Collection
from typing import NamedTuple

from penstock.frontend.parsers.text_markers import begun, earliest
from penstock.frontend.parsers.tool_format import ContentDelta, ParsedDelta, ReasoningDelta, joined


class ReasoningTags(NamedTuple):
    """The tags of one family of models.

    Args:
        opening: may stand at the beginning of the text.
        inside: the text begins within the reasoning, since the prompt's template ends with the opening tag.
        special: they are special tokens, which engines leave out of their text unless asked.
    """

    opening: str
    closing: str
    inside: bool = False
    special: bool = False


class ReasoningStream:
    """Text of one answer in, reasoning and content out: reasoning comes first, and once.

    Reasoning that does not end is reasoning to the end of the text; without an opening tag, where one is needed, all of
    it is content.

    Args:
        starts: texts with which a call begins. Behind one, nothing is passed on before the reasoning ends: where it
            does not, the model may have called a tool without ending it.
    """

    __slots__ = ("_inside", "_opened", "_starts", "_tags", "_text", "over", "pending")

    def __init__(self, tags: ReasoningTags, *, thinks: bool = True, starts: Collection[str] = ()) -> None:
        self.pending = ""
        """What stands behind a call's beginning in reasoning that did not end; known at the end of the text."""
        self._starts = starts
        self.over = False
        """Whether only content follows."""
        self._tags = tags
        self._inside = tags.inside and thinks
        self._opened = False
        """Whether the beginning has been looked at."""
        self._text = ""

    def feed(self, text: str) -> list[ParsedDelta]:
        """Take a piece of the text."""
        return self._read_text(text, final=False)

    def finish(self) -> list[ParsedDelta]:
        """The text has ended: return the rest."""
        return self._read_text("", final=True)

    def _read_text(self, text: str, final: bool) -> list[ParsedDelta]:
        if self.over:
            return [ContentDelta(text)] if text else []
        self._text += text
        if not self._opened and not self._open(final):
            return []
        if self.over:
            rest, self._text = self._text, ""
            return joined([ContentDelta(rest)])
        reasoning, closing, content = self._text.partition(self._tags.closing)
        if closing:
            self.over, self._text = True, ""
            return joined([ReasoningDelta(reasoning), ContentDelta(content)])
        start = earliest(self._text, self._starts)
        if start is not None:
            cut = start[0]
        else:
            cut = len(self._text) - (0 if final else begun(self._text, (self._tags.closing, *self._starts)))
        out = joined([ReasoningDelta(self._text[:cut])])
        self._text = self._text[cut:]
        if final:
            self.pending, self._text = self._text, ""
        return out

    def _open(self, final: bool) -> bool:
        """Look for the opening tag; False where more text is needed."""
        opening = self._tags.opening
        rest = self._text.lstrip()
        if opening and rest.startswith(opening):
            self._text = rest[len(opening) :]
        elif not final and opening.startswith(rest) and opening:
            return False
        elif not self._inside:
            self.over = True
        self._opened = True
        return True
