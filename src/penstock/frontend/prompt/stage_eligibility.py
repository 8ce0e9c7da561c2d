"""Stage eligibility of a request: whether several workers can share it, and which media it has, read from its body."""

import hashlib
import re
from typing import Any

from penstock.frontend.prompt.request_body import Parsed
from penstock.kernel.values import JsonObject

_WHOLE = ("use_beam_search", "echo", "prompt_embeds", "suffix")
_SEVERAL = ("n", "best_of")
_RARE = frozenset((*_SEVERAL, *_WHOLE, "prompt_logprobs", "prompt"))
_TEXT = ("text", "refusal")
_REFERENCE = re.compile(r"(?i)(https?|file|s3|gs)://")


def is_whole(parsed: Parsed) -> bool:
    """Return whether one worker has to do all of it: several answers or prompts can't be handed over as one."""
    fields = parsed.fields
    if _RARE.isdisjoint(fields):
        return False
    if any((fields.get(name) or 1) != 1 for name in _SEVERAL):
        return True
    if any(fields.get(name) for name in _WHOLE) or fields.get("prompt_logprobs") is not None:
        return True
    prompt = fields.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def media_of(parsed: Parsed) -> list[JsonObject]:
    """Return the parts of a chat that are an image, a sound or a video, in order."""
    if parsed.endpoint != "chat_completions":
        return []
    found: list[dict[str, Any]] = []
    for message in parsed.fields["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            found += filter(is_media, content)
    return found


def is_media(part: Any) -> bool:
    """Return whether a part of a message is an image, a sound or a video."""
    return isinstance(part, dict) and part.get("type", "text") not in _TEXT


def media_id(part: JsonObject) -> str | None:
    """Return the id by which engines know a part: the client's own ``uuid``, else a digest of its data.

    A URL gives None: the image at a URL may change while an engine's cache stays.
    """
    own = part.get("uuid")
    if isinstance(own, str) and own:
        return own
    kind = str(part.get("type"))
    inner = part.get(kind)
    if isinstance(inner, dict):
        inner = inner.get("url") or inner.get("data")
    if not isinstance(inner, str) or _REFERENCE.match(inner):
        return None
    return hashlib.blake2b(f"{kind}:{inner}".encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def with_uuids(parsed: Parsed) -> list[Any] | None:
    """Return a chat's messages with each image's id beside it, so that the engine uses the same; None: no need."""
    ids = iter(parsed.media)
    changed = False
    messages: list[Any] = []
    for message in parsed.fields["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                id = next(ids, None) if is_media(part) else None
                named = id is not None and not part.get("uuid")
                parts.append({**part, "uuid": id} if named else part)
                changed = changed or named
            message = {**message, "content": parts}
        messages.append(message)
    return messages if changed else None
