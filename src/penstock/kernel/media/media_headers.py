"""Media headers: says what a file is, and how large its picture, from its first bytes, without decoding any of it.

Formats: PNG, JPEG, GIF, WebP, BMP, TIFF (recognised only); MP4, WebM, AVI; WAV, MP3, FLAC, Ogg, M4A. The size of a
picture is what a decoder would make room for, so that a decompression bomb is known before it is one.
"""

import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple

Modality = Literal["image", "video", "audio"]


class MediaFormat(NamedTuple):
    """What a file is. ``width``, ``height``: pixels; 0 where its header does not say, ``frames``: of an animation."""

    modality: Modality
    mime: str
    width: int = 0
    height: int = 0

    @property
    def pixels(self) -> int:
        return self.width * self.height


def recognise(data: bytes) -> MediaFormat | None:
    """Return what a file is; None where it is none of the formats, or its header is cut off or broken."""
    try:
        return _image(data) or _container(data)
    except (struct.error, IndexError):
        return None


def _image(data: bytes) -> MediaFormat | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        if data[12:16] != b"IHDR":
            return None
        return MediaFormat("image", "image/png", *struct.unpack_from(">II", data, 16))
    if data.startswith(b"\xff\xd8"):
        return _jpeg(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _gif(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp(data)
    if data.startswith(b"BM") and len(data) >= 26:
        width, height = struct.unpack_from("<ii", data, 18)
        return MediaFormat("image", "image/bmp", abs(width), abs(height))
    return None


def _jpeg(data: bytes) -> MediaFormat | None:
    at = 2
    while True:
        while data[at] != 0xFF:
            at += 1
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        at += 1
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 3)
            return MediaFormat("image", "image/jpeg", width, height)
        if marker in (0xD8, 0x01) or 0xD0 <= marker <= 0xD7:
            continue
        if marker in (0xD9, 0xDA):
            return None
        at += struct.unpack_from(">H", data, at)[0]


def _gif(data: bytes) -> MediaFormat:
    """Return a GIF's size: of its screen, or of its first picture where that is larger."""
    width, height = struct.unpack_from("<HH", data, 6)
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while data[at] == 0x21:  # an extension: a label, then blocks up to an empty one
        at += 2
        while data[at]:
            at += data[at] + 1
        at += 1
    if data[at] == 0x2C:
        left, top, inner_width, inner_height = struct.unpack_from("<HHHH", data, at + 1)
        width, height = max(width, left + inner_width), max(height, top + inner_height)
    return MediaFormat("image", "image/gif", width, height)


def _webp(data: bytes) -> MediaFormat | None:
    kind = data[12:16]
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
    elif kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    elif kind == b"VP8L" and data[20] == 0x2F:
        bits = struct.unpack_from("<I", data, 21)[0]
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        return None
    return MediaFormat("image", "image/webp", width, height)


def _container(data: bytes) -> MediaFormat | None:
    if data[4:8] == b"ftyp":
        if data[8:12].startswith(b"M4A"):
            return MediaFormat("audio", "audio/mp4")
        width, height = max(_tracks(data), default=(0, 0))
        return MediaFormat("video", "video/mp4", width, height)
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return MediaFormat("video", "video/webm")
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        width, height = struct.unpack_from("<II", data, 64)
        return MediaFormat("video", "video/x-msvideo", width, height)
    if data.startswith(b"RIFF") and data[8:12] == b"WAVE":
        return MediaFormat("audio", "audio/wav")
    if data.startswith(b"ID3") or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0):
        return MediaFormat("audio", "audio/mpeg")
    if data.startswith(b"fLaC"):
        return MediaFormat("audio", "audio/flac")
    if data.startswith(b"OggS"):
        return MediaFormat("audio", "audio/ogg")
    return None


def _tracks(data: bytes, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield the size of each track of an MP4: from the boxes ``moov/trak/tkhd``."""
    at, end = start, len(data) if end is None else end
    while at + 8 <= end:
        size, head = struct.unpack_from(">I", data, at)[0], 8
        if size == 1:
            size, head = struct.unpack_from(">Q", data, at + 8)[0], 16
        elif size == 0:
            size = end - at
        if size < head:
            return
        kind, inner_end = data[at + 4 : at + 8], min(end, at + size)
        if kind in (b"moov", b"trak"):
            yield from _tracks(data, at + head, inner_end)
        elif kind == b"tkhd" and inner_end - at >= 16:
            width, height = struct.unpack_from(">II", data, inner_end - 8)
            yield width >> 16, height >> 16
        at += size
