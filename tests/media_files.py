"""Small media files for tests, made byte by byte: pictures of one colour, a film without frames, a silent sound."""

import base64
import struct
import zlib


def png(width: int, height: int, grey: int = 0) -> bytes:
    """Return a whole PNG where it is small; of a large one only the header, and a scrap of data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes([grey]) * width) * min(height, 4096 if width <= 4096 else 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def jpeg(width: int, height: int) -> bytes:
    """Return the header of a JPEG, behind a comment."""
    comment = b"\xff\xfe" + struct.pack(">H", 6) + b"\xff\xc0xy"
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, height, width, 1) + b"\x01\x11\x00"
    return b"\xff\xd8" + comment + frame + b"\xff\xda\x00\x02\xff\xd9"


def gif(width: int, height: int) -> bytes:
    """Return a GIF whose screen is small, and whose picture is as large as was asked for."""
    screen = struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0" * 6
    extension = b"\x21\xf9\x04\0\0\0\0\0"
    return b"GIF89a" + screen + extension + b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\0\x3b"


def webp(width: int, height: int) -> bytes:
    """Return the header of a lossless WebP; of one too large for that, of the extended form."""
    if max(width, height) < 1 << 14:
        data = b"VP8L" + struct.pack("<I", 5) + b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14)
    else:
        sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        data = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + sides
    return b"RIFF" + struct.pack("<I", len(data) + 4) + b"WEBP" + data


def mp4(width: int, height: int) -> bytes:
    """Return an MP4 that has one track and no frame."""

    def box(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data) + 8) + kind + data

    track = box(b"tkhd", b"\0" * 76 + struct.pack(">II", width << 16, height << 16))
    return box(b"ftyp", b"isom\0\0\0\0") + box(b"moov", box(b"mvhd", b"\0" * 100) + box(b"trak", track))


def wav(tone: int = 0) -> bytes:
    """Return a tenth of a second of a sound that does not move."""
    samples = struct.pack("<h", tone) * 1600
    form = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16_000, 32_000, 2, 16)
    data = form + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(data) + 4) + b"WAVE" + data


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"
