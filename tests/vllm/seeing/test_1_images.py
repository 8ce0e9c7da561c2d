"""Is an image that a real vLLM holds found again behind the same text, and no other one?"""

import asyncio
import base64
import struct
import zlib
from pathlib import Path
from typing import Any

from penstock.adapters.engine_ports import free_port
from tests.live.cluster import served
from tests.vllm.asking import Answer, ask, asking
from tests.vllm.server import BLOCK, MODEL, VllmServer, events_config
from tests.vllm.waiting import eventually

TEXT, QUESTION, OTHER = ("the quick brown fox " * 20, "what is this, say? " * 12, "and why, of all things? " * 12)


def picture(grey: int) -> dict[str, Any]:
    """Return a part with an image of 32 x 32 pixels, all of them alike."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes([grey]) * 32) * 32
    head = struct.pack(">IIBBBBB", 32, 32, 8, 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}


def chat(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}


async def test_what_the_router_expects_is_what_vllm_had_behind_images_too(
    venv: Path, seeing: Path, tmp_path: Path
) -> None:
    flags = ["--kv-events-config", events_config("kv@a"), "--skip-mm-profiling"]
    server = VllmServer(venv, seeing, free_port(), tmp_path / "vllm.log", flags=flags)
    try:
        await asyncio.to_thread(server.wait_ready)
        arguments = ["attach", server.url, "--tokenizer", str(seeing), "--frontend.port", str(free_port())]
        arguments += ["--canary.idle", "0", "--router.index.predicted_ttl", "0"]
        with served(tmp_path, *arguments) as front:
            async with asking() as http:

                async def asked(*parts: Any) -> Answer:
                    """Ask, once the router has heard of all that the server announced."""
                    await asyncio.sleep(1.0)
                    answer = await ask(http, front.url, chat(*parts))
                    assert answer.status == 200, answer.error
                    return answer

                await eventually(lambda: len(front.get("/admin/status")[1]["workers"]) == 1)
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
    finally:
        await asyncio.to_thread(server.terminate)
        await asyncio.to_thread(server.stop)
