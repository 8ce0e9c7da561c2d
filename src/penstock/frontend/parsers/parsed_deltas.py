"""Parsed deltas: what a model's text turns out to be, piece by piece."""

from typing import NamedTuple


class ContentDelta(NamedTuple):
    """Text for the reader of the answer."""

    text: str


class ReasoningDelta(NamedTuple):
    """Text of the model's reasoning."""

    text: str


class ToolCallDelta(NamedTuple):
    """One whole call.

    Args:
        arguments: a JSON object as text.
    """

    name: str
    arguments: str


ParsedDelta = ContentDelta | ReasoningDelta | ToolCallDelta


def joined(deltas: list[ParsedDelta]) -> list[ParsedDelta]:
    """Return deltas in which texts of one kind that follow each other are one, and empty ones are left out."""
    out: list[ParsedDelta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, ToolCallDelta):
            out.append(delta)
        elif not delta.text:
            continue
        elif isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            out[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + delta.text)
        else:
            out.append(delta)
    return out
