"""Harmony text: what gpt-oss writes, its analysis before its answer; recognised where an engine passes it on as it is.

A parser of it belongs to the engine. Without one the analysis would be shown as the answer, so that is a failure.
"""

from collections.abc import Sequence
from typing import Any

from penstock.adapters.engines.dialects.engine_failure import EngineFailure
from penstock.adapters.engines.http.event_stream import object_in
from penstock.config.settings.parser_names import flags_of

_BEGINNINGS = ("<|channel|>", "<|start|>assistant<|channel|>")
PASSED_ON = EngineFailure(
    f"it passes on gpt-oss's own text, in which the analysis stands before the answer: {flags_of('gpt-oss')}", 500
)


class HarmonyWatch:
    """Looks at the first characters of each choice's text, however they are cut."""

    __slots__ = ("_texts",)

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def verdict(self, choices: Sequence[Any]) -> bool | None:
        """Return whether a chunk's choices begin as Harmony text does; None while they may."""
        pending = False
        for choice in choices:
            delta = choice.get("delta") if isinstance(choice, dict) else None
            text = delta.get("content") if isinstance(delta, dict) else None
            if not isinstance(delta, dict) or not isinstance(text, str):
                continue
            index = str(choice.get("index"))
            text = self._texts[index] = (self._texts.get(index, "") + text).lstrip()
            if text.startswith(_BEGINNINGS):
                return True
            more = choice.get("finish_reason") or any(delta[name] for name in delta if name not in ("role", "content"))
            pending |= not more and any(mark.startswith(text) for mark in _BEGINNINGS)
        return None if pending else False


def passed_on(body: bytes) -> bool:
    """Return whether a whole chat answer has Harmony text in the place of its content."""
    if b"|channel|" not in body:
        return False
    choices = (object_in(body) or {}).get("choices")
    messages = [choice.get("message") for choice in choices or () if isinstance(choice, dict)]
    texts = [message.get("content") for message in messages if isinstance(message, dict)]
    return any(isinstance(text, str) and text.lstrip().startswith(_BEGINNINGS) for text in texts)
