"""How does what the client asked to know of routing get into the answer? ``nvext``, without re-encoding the rest."""

import time
from typing import Any

import msgspec

from penstock.frontend.body import Parsed


def with_nvext(body: bytes, extra: dict[str, Any]) -> bytes:
    """Return a JSON object with ``nvext`` added at its end; what is no object comes back as it is."""
    end = body.rstrip()
    if not end.startswith(b"{") or not end.endswith(b"}") or len(end) < 3:
        return body
    return end[:-1] + b',"nvext":' + msgspec.json.encode(extra) + b"}"


def nvext_chunk(parsed: Parsed, request: str, extra: dict[str, Any]) -> bytes:
    """Return one event of a stream that holds ``nvext`` and no choice, as the usage chunk does."""
    chat = parsed.endpoint == "chat_completions"
    chunk: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(time.time()),
        "model": parsed.model,
        "choices": [],
        "nvext": extra,
    }
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
