"""Can a request pass several stages, and what is in it beside text? Asked of its body, before it is routed."""

import hashlib
from typing import Any

from penstock.frontend.body import Parsed

_WHOLE = ("use_beam_search", "echo", "prompt_embeds", "suffix")
_TEXT = ("text", "refusal")


def is_whole(parsed: Parsed) -> bool:
    """Tell whether one worker has to do all of it: several answers or prompts can't be handed over as one."""
    fields = parsed.fields
    if any((fields.get(name) or 1) != 1 for name in ("n", "best_of")):
        return True
    if any(fields.get(name) for name in _WHOLE) or fields.get("prompt_logprobs") is not None:
        return True
    prompt = fields.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def media_of(parsed: Parsed) -> list[dict[str, Any]]:
    """Return the parts of a chat that are an image, a sound or a video, in order."""
    if parsed.endpoint != "chat_completions":
        return []
    return [
        part
        for message in parsed.fields["messages"]
        if isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, dict) and part.get("type", "text") not in _TEXT
    ]


def digest_of(part: dict[str, Any]) -> bytes:
    """Return what tells a part from others: 16 bytes, of its data or of the URL that names it."""
    kind = str(part.get("type"))
    inner = part.get(kind)
    if isinstance(inner, dict):
        inner = inner.get("url") or inner.get("data") or sorted(inner.items())
    return hashlib.blake2b(f"{kind}:{inner}".encode(), digest_size=16).digest()
