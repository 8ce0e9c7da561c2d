"""Is an image that a real vLLM holds found again behind the same text, and no other one?"""

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

from tests.vllm.asking import Answer, asking
from tests.vllm.seeing.watcher import OTHER, QUESTION, TEXT, attached
from tests.vllm.server import BLOCK


def picture(grey: int) -> dict[str, Any]:
    """Return a part with an image of 32 x 32 pixels, all of them alike."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes([grey]) * 32) * 32
    head = struct.pack(">IIBBBBB", 32, 32, 8, 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}


async def test_what_the_router_expects_is_what_vllm_had_behind_images_too(
    venv: Path, seeing: Path, tmp_path: Path
) -> None:
    with attached(venv, seeing, tmp_path) as watched:
        async with asking() as http:

            async def asked(*parts: Any) -> Answer:
                return await watched.asked(http, *parts)

            black, white = picture(0), picture(255)
            first = await asked(TEXT, black, QUESTION)
            assert first.cached == first.expected == 0
            before = (await asked(TEXT, white, QUESTION)).cached
            assert before >= 2 * BLOCK, "the text before both"
            for parts, beyond in (
                ((TEXT, black, QUESTION), first.prompt_tokens - 2 * BLOCK),
                ((TEXT, white, QUESTION), first.prompt_tokens - 2 * BLOCK),
                ((TEXT, black, OTHER), before + BLOCK),
                ((TEXT, white, OTHER), before + BLOCK),
                ((TEXT, picture(128), QUESTION), before - 1),
            ):
                answer = await asked(*parts)
                assert answer.expected == answer.cached, parts
                assert answer.cached > beyond
            assert (await asked(TEXT, picture(64), QUESTION)).cached == before
