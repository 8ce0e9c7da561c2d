"""Parser registry: the parsers of ours by name, and the parsing of one choice of an answer."""

from collections.abc import Mapping
from functools import lru_cache

from penstock.config.settings.parser_names import OWN_PREFIX, PAIR_MARK
from penstock.frontend.parsers.json_calls import DEEPSEEK, HERMES, LLAMA3_JSON, MISTRAL
from penstock.frontend.parsers.reasoning_stream import ReasoningStream, ReasoningTags
from penstock.frontend.parsers.tool_call_stream import ToolCallStream
from penstock.frontend.parsers.tool_format import (
    ContentDelta,
    ParsedDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolFormat,
    ToolSchemas,
    joined,
)
from penstock.frontend.parsers.written_calls import PYTHONIC, QWEN3_CODER

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "qwen3_coder": QWEN3_CODER,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "pythonic": PYTHONIC,
}
REASONING_TAGS: dict[str, ReasoningTags] = {
    "think": ReasoningTags("<think>", "</think>"),
    "qwen3": ReasoningTags("<think>", "</think>", inside=True),
    "deepseek_r1": ReasoningTags("<think>", "</think>", inside=True),
    "mistral": ReasoningTags("[THINK]", "[/THINK]", special=True),
}


def tool_format(name: str | None) -> ToolFormat | None:
    """Return the format of a name; None where there is none, as where a newer settings file has one."""
    return None if name is None else TOOL_FORMATS.get(name.removeprefix(OWN_PREFIX))


@lru_cache(maxsize=64)
def reasoning_tags(name: str | None) -> ReasoningTags | None:
    """Return the tags of a name, or of a pair such as ``<a>...</a>``; without the first the text begins inside."""
    if name is None:
        return None
    name = name.removeprefix(OWN_PREFIX)
    opening, mark, closing = name.partition(PAIR_MARK)
    if mark:
        return ReasoningTags(opening, closing, inside=not opening, special=True) if closing else None
    return REASONING_TAGS.get(name)


class ChoiceParser:
    """Parses the text of one choice.

    Args:
        calls: the format of its calls; None: it can call nothing.
        single: pass on one call at most.
    """

    __slots__ = ("_reasoning", "_single", "_tools", "calls", "ended")

    def __init__(
        self,
        calls: ToolFormat | None,
        tags: ReasoningTags | None,
        schemas: ToolSchemas,
        *,
        thinks: bool = True,
        single: bool = False,
    ) -> None:
        self.calls = 0
        """Calls that were passed on."""
        self.ended = False
        starts = () if calls is None else (*calls.starts, *(mark for mark in calls.wrappers if len(mark) > 1))
        self._reasoning = None if tags is None else ReasoningStream(tags, thinks=thinks, starts=starts)
        self._tools = None if calls is None else ToolCallStream(calls, schemas)
        self._single = single

    def feed(self, text: str) -> list[ParsedDelta]:
        """Take a piece of the text."""
        return self._called([ContentDelta(text)] if self._reasoning is None else self._reasoning.feed(text))

    def finish(self) -> list[ParsedDelta]:
        """The text has ended: return the rest; once."""
        if self.ended:
            return []
        self.ended = True
        out = self._called([] if self._reasoning is None else self._reasoning.finish())
        if self._tools is None:
            return joined(out)
        held = "" if self._reasoning is None else self._reasoning.pending
        deltas = [*self._tools.feed(held), *self._tools.finish()]
        if held:  # what is not a call of it is reasoning that did not end
            deltas = [ReasoningDelta(each.text) if isinstance(each, ContentDelta) else each for each in deltas]
        return joined([*out, *self._limited(deltas)])

    def _called(self, deltas: list[ParsedDelta]) -> list[ParsedDelta]:
        if self._tools is None:
            return joined(deltas)
        out: list[ParsedDelta] = []
        for delta in deltas:
            out += self._limited(self._tools.feed(delta.text)) if isinstance(delta, ContentDelta) else [delta]
        return joined(out)

    def _limited(self, deltas: list[ParsedDelta]) -> list[ParsedDelta]:
        out: list[ParsedDelta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                if self._single and self.calls:
                    continue
                self.calls += 1
            out.append(delta)
        return out


def whole_text(parser: ChoiceParser, text: str) -> list[ParsedDelta]:
    """Return the deltas of a text that is whole."""
    return joined([*parser.feed(text), *parser.finish()])


def thinks(template_options: object) -> bool:
    """Return whether a request's ``chat_template_kwargs`` leave reasoning on."""
    if not isinstance(template_options, Mapping):
        return True
    return template_options.get("enable_thinking") is not False and template_options.get("thinking") is not False
