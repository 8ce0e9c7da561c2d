"""Media content: reads what a part of a chat contains, checks it from its headers, and names it by its bytes.

The name is the same however the bytes came: by any URL, as a data URL, or as the base64 text of ``input_audio``.
"""

import base64
import binascii
import hashlib
from typing import Any, NamedTuple

from penstock.kernel.errors import ClientError
from penstock.kernel.media.media_headers import MediaFormat, Modality, recognise
from penstock.kernel.values import JsonObject

PIXELS_MAX = 89_478_485
"""Pixels of one picture: where Pillow begins to warn of a decompression bomb (a quarter of a GiB at three bytes)."""
ITEMS_MAX = 128
"""Images, sounds and videos of one request, the frames of a video included."""
TYPES: dict[str, Modality] = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Type of a part -> what it holds. Others (embeddings, files) are the engine's own business."""
FRAMES = "video/jpeg"
"""Media type of a video as its frames: JPEG pictures in base64, with commas between them, as vLLM takes it."""
_KINDS: dict[Modality, str] = {
    "image": "PNG, JPEG, GIF, WebP or BMP",
    "video": "MP4, WebM, AVI or GIF, or JPEG frames as data:video/jpeg;base64,FRAME,FRAME",
    "audio": "WAV, MP3, FLAC, Ogg or M4A",
}


class MediaContent(NamedTuple):
    """Checked bytes. ``id``: names them; ``frames``: pictures of a video that came as such, else 1."""

    id: str
    format: MediaFormat
    size: int
    frames: int = 1


class MediaPart(NamedTuple):
    """Where the content of one part is. ``param``: names it in errors; ``url``: None for ``input_audio``."""

    part: JsonObject
    modality: Modality
    param: str
    url: str | None
    data: str | None = None


def part_of(part: JsonObject, param: str) -> MediaPart | None:
    """Return a part that holds media of a known type, or None.

    Raises:
        ClientError: 400: it holds none.
    """
    kind = str(part.get("type"))
    modality = TYPES.get(kind)
    if modality is None:
        return None
    inner: Any = part.get(kind if kind != "input_image" else "image_url")
    where = f"{param}.{kind}"
    if kind == "input_audio":
        data = inner.get("data") if isinstance(inner, dict) else None
        if not isinstance(data, str) or not data:
            raise ClientError(f"{where} must have its sound as base64 text in data", param=where)
        return MediaPart(part, modality, where, None, data)
    url = inner.get("url") if isinstance(inner, dict) else inner
    if url is None and part.get("uuid"):
        raise ClientError(
            f"{where} has a uuid and no data: the engines of a cluster do not share what a client has named",
            param=where,
            hint="send the data again; what it contains is encoded once",
        )
    if not isinstance(url, str) or not url:
        raise ClientError(f"{where}.url must be an http(s) URL or a data URL", param=where)
    return MediaPart(part, modality, where, url)


def is_data_url(url: str) -> bool:
    """Return whether a URL is its own content."""
    return url[:5].lower() == "data:"


def read_inline(part: MediaPart, bytes_max: int) -> MediaContent:
    """Return the content of a part that carries it.

    Raises:
        ClientError: 400 or 413: it is malformed, too large, or no media of its type.
    """
    if part.url is None:
        assert part.data is not None
        return checked(_decoded_base64(part.data, part.param, bytes_max), part.modality, part.param)
    head, comma, body = part.url[5:].partition(",")
    words = [word.strip().lower() for word in head.split(";")]
    if not comma or words[-1] != "base64":
        raise ClientError(
            f"{part.param} has a data URL that is not base64", param=part.param, hint="data:TYPE;base64,DATA"
        )
    if part.modality == "video" and words[0] == FRAMES:
        return _frames(body, part.param, bytes_max)
    return checked(_decoded_base64(body, part.param, bytes_max), part.modality, part.param)


def checked(data: bytes, modality: Modality, param: str) -> MediaContent:
    """Return bytes as content.

    Raises:
        ClientError: 400: they are no such media, or a picture of more than `PIXELS_MAX` pixels.
    """
    found = recognise(data)
    still = found is not None and found.mime == "image/gif" and modality == "video"
    if found is None or (found.modality != modality and not still):
        what = "nothing known" if found is None else found.mime
        raise ClientError(
            f"{param} holds {what}, not {modality}: {_KINDS[modality]}", param=param, code="invalid_media"
        )
    _check_pixels(found, param)
    return MediaContent(content_id(modality, data), found, len(data))


def content_id(modality: Modality, *parts: bytes) -> str:
    """Return the name of content: 64 hexadecimal digits, by BLAKE2b over its kind and its bytes."""
    digest = hashlib.blake2b(f"{modality}:{len(parts)}".encode(), digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def too_large(param: str, size: int | str, bytes_max: int) -> ClientError:
    """Return the error of media above the limit."""
    return ClientError(
        f"{param} holds {size} bytes; media of a request may hold {bytes_max} (frontend.media.bytes_max)",
        status=413,
        param=param,
        code="media_too_large",
    )


def _frames(body: str, param: str, bytes_max: int) -> MediaContent:
    texts = body.split(",", ITEMS_MAX)
    if len(texts) > ITEMS_MAX:
        raise ClientError(f"{param} has more than {ITEMS_MAX} frames", param=param, code="media_too_large")
    frames: list[bytes] = []
    left = bytes_max
    first: MediaFormat | None = None
    for number, text in enumerate(texts):
        where = f"{param} frame {number}"
        frames.append(_decoded_base64(text, where, left))
        left -= len(frames[-1])
        found = recognise(frames[-1])
        if found is None or found.mime != "image/jpeg":
            raise ClientError(f"{where} is not a JPEG picture", param=param, code="invalid_media")
        _check_pixels(found, where)
        first = first or found
    assert first is not None
    format = MediaFormat("video", FRAMES, first.width, first.height)
    return MediaContent(content_id("video", *frames), format, bytes_max - left, len(frames))


def _decoded_base64(text: str, param: str, bytes_max: int) -> bytes:
    if len(text) // 4 * 3 > bytes_max + 2:
        raise too_large(param, f"about {len(text) // 4 * 3}", bytes_max)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ClientError(f"{param} is not valid base64", param=param, code="invalid_media") from None
    if len(data) > bytes_max:
        raise too_large(param, len(data), bytes_max)
    return data


def _check_pixels(format: MediaFormat, param: str) -> None:
    if format.pixels > PIXELS_MAX:
        raise ClientError(
            f"{param} is {format.width} x {format.height} pixels; at most {PIXELS_MAX} are decoded",
            param=param,
            code="media_too_large",
            hint="scale it down first; models see far fewer",
        )
    if format.modality == "image" and not format.pixels:
        raise ClientError(f"{param} is a picture without pixels", param=param, code="invalid_media")
