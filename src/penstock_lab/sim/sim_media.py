"""Media of a chat at the simulated engine: their ids, how many tokens each takes, and which are encoded already."""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from pathlib import Path

from penstock.kernel.hashing import MediaSpan
from penstock.kernel.media.media_headers import recognise
from penstock.kernel.media.media_tokens import AUDIO_TOKENS_PER_SECOND, image_tokens, video_tokens
from penstock.kernel.values import JsonObject
from penstock_lab.engine.timing.encoder_timing import EMBEDDING_BYTES
from penstock_lab.sim.sim_tokenizer import IMAGE_TOKENS

FILE = "encoder_cache.safetensors"
"""File of one medium's embeddings, in a folder of its name, as vLLM's ECExampleConnector has it."""
_BYTES_PER_SECOND = 32_000
"""Of sound: 16,000 samples of 16 bits."""
_FILM_FRAMES = 16
"""Frames that a film counts as: what the engine samples of one, whatever its length."""


def media_in(messages: list[JsonObject]) -> list[tuple[str, int]]:
    """Return (id, tokens) of a chat's images and other media: the ``uuid``, else a digest of the part."""
    found = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and "text" not in part:
                own = part.get("uuid")
                id = own if isinstance(own, str) else hashlib.sha256(repr(part).encode()).hexdigest()
                found.append((id, _tokens_of_part(part)))
    return found


def _tokens_of_part(part: JsonObject) -> int:
    """Return how many tokens stand for a part; as many as usual where its size can't be read."""
    inner = part.get(str(part.get("type")))
    url = inner.get("url") if isinstance(inner, dict) else inner
    if isinstance(inner, dict) and isinstance(inner.get("data"), str):
        url = f"data:;base64,{inner['data']}"
    if not isinstance(url, str) or not url.startswith("data:"):
        return IMAGE_TOKENS
    texts = url.partition(",")[2].split(",")
    try:
        data = base64.b64decode(texts[0])
    except (binascii.Error, ValueError):
        return IMAGE_TOKENS
    format = recognise(data)
    if format is None:
        return IMAGE_TOKENS
    if format.modality == "audio":
        return max(1, len(data) * AUDIO_TOKENS_PER_SECOND // _BYTES_PER_SECOND)
    if part.get("type") == "video_url":
        return video_tokens(format.width, format.height, len(texts) if len(texts) > 1 else _FILM_FRAMES)
    return image_tokens(format.width, format.height)


class SimEmbeddings:
    """What encode workers have put into a folder; None: nothing is shared."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def present(self, media: Sequence[MediaSpan]) -> list[str]:
        """Return the ids of the media that are in the folder."""
        folder = self._folder
        return [] if folder is None else [span.id for span in media if (folder / span.id / FILE).exists()]

    def put(self, media: Sequence[MediaSpan]) -> None:
        """Put what was encoded into the folder: files as large as the embeddings, with holes in place of bytes."""
        if self._folder is None:
            return
        for span in media:
            place = self._folder / span.id
            place.mkdir(parents=True, exist_ok=True)
            with (place / FILE).open("wb") as file:
                file.truncate(span.length * EMBEDDING_BYTES)
