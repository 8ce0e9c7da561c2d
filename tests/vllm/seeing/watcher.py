"""How do the tests ask about media under several names, and hold what the router expects against what vLLM had?"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.adapters.engine_ports import free_port
from tests.live.cluster import Served, served
from tests.vllm.asking import Answer, ask, asking
from tests.vllm.seeing.test_1_images import OTHER, QUESTION, TEXT, chat
from tests.vllm.server import BLOCK, VllmServer, events_config
from tests.vllm.waiting import eventually

HOST = "127.0.0.1"
SECONDS = 1.0
"""How long the router may take to hear what the server announced."""


@contextmanager
def attached(venv: Path, model: Path, folder: Path, *flags: str) -> Iterator[Served]:
    """Start a vLLM and a frontend that it is attached to; media may come from `HOST`."""
    options = ["--kv-events-config", events_config("kv@a"), "--skip-mm-profiling", *flags]
    server = VllmServer(venv, model, free_port(), folder / "vllm.log", flags=options)
    try:
        server.wait_ready()
        arguments = ["attach", server.url, "--tokenizer", str(model), "--frontend.port", str(free_port())]
        arguments += ["--canary.idle", "0", "--router.index.predicted_ttl", "0"]
        with served(folder, *arguments, "--frontend.media.private_hosts", HOST) as front:
            yield front
    finally:
        server.stop()


async def told_apart(front: Served, length: int, same: Sequence[Any], others: Sequence[Any]) -> None:
    """Blocks behind ``same``, which are one content under several names, are one's; behind ``others`` each its own.

    Args:
        length: tokens of the content, at least.
    """
    await eventually(lambda: len(front.get("/admin/status")[1]["workers"]) == 1)
    async with asking() as http:

        async def asked(*parts: Any) -> Answer:
            await asyncio.sleep(SECONDS)
            answer = await ask(http, front.url, chat(*parts))
            assert answer.status == 200, answer.error
            return answer

        first = await asked(TEXT, same[0], QUESTION)
        assert first.expected == first.cached < first.prompt_tokens - length - 2 * BLOCK, "at most the text before it"
        texts = (await asked(TEXT, others[0], QUESTION)).cached
        assert 2 * BLOCK <= texts < first.prompt_tokens - length - 2 * BLOCK, "the text before both, and no more"
        for part in same:
            again = await asked(TEXT, part, QUESTION)
            assert again.expected == again.cached > first.prompt_tokens - 2 * BLOCK
        for part in (same[-1], others[0]):
            answer = await asked(TEXT, part, OTHER)
            assert answer.expected == answer.cached > texts + length - 2 * BLOCK, "as far as the content goes"
        for part in others[1:]:
            assert (await asked(TEXT, part, QUESTION)).cached == texts
        for part in others:
            answer = await asked(TEXT, part, QUESTION)
            assert answer.expected == answer.cached > first.prompt_tokens - 2 * BLOCK
