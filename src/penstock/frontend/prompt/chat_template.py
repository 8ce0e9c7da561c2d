"""Chat template: renders a chat with the model's own jinja template, in a sandbox.

Templates come with the model, so they are the operator's; the sandbox keeps a downloaded one from reaching anything
but its arguments, and from exhausting the process (`penstock.frontend.prompt.template_sandbox`). Clients' text is only
ever data here, never a template.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from penstock.frontend.prompt.request_body import is_media, media_id
from penstock.frontend.prompt.template_sandbox import SOURCE_MAX, BoundedEnvironment, TooSlow
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import JsonObject

_ITERATES_CONTENT = re.compile(r"for\s+\w+\s+in\s+\w+(\.content\b|\[\s*['\"]content['\"]\s*\])")
RENDERED_MAX = 64 * 1024 * 1024
"""Most characters that a template may produce; a runaway loop is stopped here."""


MARK = "\ufffc"
"""Stands for an image in a text: Unicode's own character for an object."""

log = logging.getLogger("penstock.frontend")

SECONDS = 5.0
"""How long one rendering may take: a thousand times what a long chat needs."""
GIVE_UP_AFTER = 3
KINDS_MAX = 16
"""Kinds of media whose place in a template is remembered: clients name them."""
_STRFTIME = re.compile(r"(?:[^%]|%[-A-Za-z%]){0,200}\Z")


class TemplateFailed(PenstockError):
    """The template refused the messages or is wrong; the engine, whose template counts, reports that to the client."""


class TemplateSlow(TemplateFailed):
    """The template took longer than its time limit."""


class _Generation(Extension):
    """Accept ``{% generation %}`` blocks, with which training marks the assistant's text; their body is kept."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_keep"), [], [], body).set_lineno(line)

    def _keep(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """One model's chat template.

    Args:
        source: jinja text.
        tokens: names such as ``bos_token`` that the template may use.
    Raises:
        TemplateFailed: the source is not a template.
    """

    def __init__(self, source: str, tokens: dict[str, str] | None = None) -> None:
        if len(source) > SOURCE_MAX:
            raise TemplateFailed(f"the chat template has {len(source)} characters; at most {SOURCE_MAX}")
        self.given_up = False
        """Set when it was too slow `GIVE_UP_AFTER` times in a row: it would only block the threads."""
        self._slow = 0
        self._source = source
        # Limits are counted in the environment, so each rendering thread has its own.
        self._threads = threading.local()
        self._compiled()
        self._tokens = tokens or {}
        self.takes_parts = _ITERATES_CONTENT.search(source) is not None
        """Whether it takes a message's parts one by one, and writes an image's placeholder itself."""
        self._written: dict[str, str] = {}

    def written(self, part: JsonObject, seconds: float = SECONDS) -> str:
        """Return what it writes for an image, a sound or a video; nothing where that can't be told.

        Args:
            seconds: time limit of the rendering, which is done once for each kind.
        Raises:
            TemplateSlow: it took longer.
        """
        kind = str(_media_part(part, False)["type"])
        if kind not in self._written and len(self._written) < KINDS_MAX:
            mark = {"type": "text", "text": MARK}
            try:
                pieces = self.render(
                    [{"role": "user", "content": [mark, {"type": kind}, mark]}], seconds=seconds
                ).split(MARK)
            except TemplateSlow:
                raise
            except TemplateFailed:
                pieces = []
            self._written[kind] = pieces[1].strip() if len(pieces) == 3 else ""
        return self._written.get(kind, "")

    def _count_slow(self, seconds: float) -> None:
        if seconds < SECONDS:
            return
        self._slow += 1
        if self._slow >= GIVE_UP_AFTER and not self.given_up:
            self.given_up = True
            log.warning("a chat template was too slow %d times: its model is routed by plain text", self._slow)

    def _compiled(self) -> tuple[BoundedEnvironment, jinja2.Template]:
        """Return this thread's own copy; a few milliseconds for each thread's first."""
        compiled: tuple[BoundedEnvironment, jinja2.Template] | None = getattr(self._threads, "copy", None)
        if compiled is None:
            compiled = self._threads.copy = _compile(self._source)
        return compiled

    def render(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: JsonObject | None = None,
        seconds: float = SECONDS,
        mark: bool = False,
    ) -> str:
        """Return the prompt's text.

        Args:
            mark: put `MARK` where an image stands, whatever the template would.
            continue_final_message: end right after the last message's text, so that the model continues it.
            kwargs: ``chat_template_kwargs`` of the request.
            seconds: its time limit.
        Raises:
            TemplateSlow: it took longer.
            TemplateFailed: the template refused, failed, or grew past `RENDERED_MAX`.
        """
        prepared = [_prepared(message, self.takes_parts, mark) for message in messages]
        names = {**self._tokens, **(kwargs or {})}
        names.update(messages=prepared, tools=tools or None, add_generation_prompt=add_generation_prompt)
        names.setdefault("documents", None)
        parts: list[str] = []
        size = 0
        environment, template = self._compiled()
        environment.allow(seconds)
        try:
            for part in template.generate(names):
                parts.append(part)
                size += len(part)
                if size > RENDERED_MAX:
                    raise TemplateFailed(f"the chat template wrote more than {RENDERED_MAX} characters")
        except TemplateFailed:
            raise
        except TooSlow as error:
            self._count_slow(seconds)
            raise TemplateSlow(f"the chat template took longer than {seconds:g} s") from error
        except Exception as error:  # a template is a foreign program: it can raise anything
            raise TemplateFailed(f"the chat template failed: {type(error).__name__}: {error}") from error
        self._slow = 0
        text = "".join(parts)
        return _cut_after_last(text, prepared) if continue_final_message else text


def _compile(source: str) -> tuple[BoundedEnvironment, jinja2.Template]:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    environment.allow(SECONDS)
    try:
        template = environment.from_string(source)
    except Exception as error:  # its constants are computed now: that can raise anything
        raise TemplateFailed(f"the chat template can't be read: {type(error).__name__}: {error}") from error
    # Each rendering copies them; as the library's chain of mappings that costs as much as a short chat itself.
    template.globals = dict(template.globals)
    return environment, template


def plain_text(messages: Sequence[JsonObject], tools: list[Any] | None = None) -> str:
    """Return the canonical text of a chat for a model without its template here: equal chats give equal text."""
    parts = [] if not tools else [f"\x01tools\x02{_tojson(tools)}"]
    for message in messages:
        content = message.get("content")
        body = content if isinstance(content, str) else _joined_content(content)
        calls = message.get("tool_calls")
        parts.append(f"\x01{message.get('role', '')}\x02{body}" + (f"\x03{_tojson(calls)}" if calls else ""))
    return "".join(parts)


def _prepared(message: JsonObject, takes_parts: bool, mark: bool = False) -> JsonObject:
    """Give a message the shape that templates expect: text content, and tool arguments as objects."""
    out = dict(message)
    content = out.get("content")
    if isinstance(content, list) and not takes_parts:
        out["content"] = _joined_content(content)
    elif isinstance(content, list):
        out["content"] = [_media_part(part, mark) if is_media(part) else part for part in content]
    calls = out.get("tool_calls")
    if isinstance(calls, list):
        out["tool_calls"] = [_decoded_call(call) for call in calls]
    return out


def _media_part(part: JsonObject, mark: bool) -> JsonObject:
    """Return an image, a sound or a video as vLLM passes it to a template: its kind and nothing else."""
    kind = next((each for each in ("image", "audio", "video") if each in str(part.get("type"))), part.get("type"))
    return {"type": "text", "text": MARK} if mark else {"type": kind}


def _decoded_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            return call
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return call


def _joined_content(content: Any) -> str:
    """Return the text of a message's parts."""
    if not isinstance(content, list):
        return ""
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            text = part.get("text", part.get("refusal"))
            # An image has no text, but two chats that differ in it must not look the same.
            texts.append(text if isinstance(text, str) else f"{MARK}{media_id(part) or _tojson(part)}{MARK}")
    return "\n".join(texts)


def _cut_after_last(text: str, messages: Sequence[JsonObject]) -> str:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):
        content = _joined_content(content)
    wanted = (content or "").strip()
    at = text.rfind(wanted) if wanted else -1
    return text if at < 0 else text[: at + len(wanted)]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON, without the HTML escaping of jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=str
    )


def _raise(message: str) -> None:
    raise TemplateFailed(f"the chat template refused the messages: {message}")


def _strftime_now(pattern: str) -> str:
    # The C library accepts widths, such as %99999999Y, and fills them.
    if not _STRFTIME.match(pattern):
        raise TemplateFailed("the chat template asks for the date in a way that is not understood here")
    return time.strftime(pattern)
