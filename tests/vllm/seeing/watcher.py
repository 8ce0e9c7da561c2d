"""How do the tests ask about media under several names, and hold what the router expects against what vLLM had?"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, served, until
from tests.vllm.asking import Answer, ask, asking
from tests.vllm.attached.heard import worker_status
from tests.vllm.server import BLOCK, MODEL, VllmServer, events_config
from tests.vllm.truth import replay
from tests.vllm.waiting import eventually

HOST = "127.0.0.1"
TEXT, QUESTION, OTHER = ("the quick brown fox " * 20, "what is this, say? " * 12, "and why, of all things? " * 12)


def chat(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}


@dataclass(frozen=True)
class Watched:
    """A vLLM and a frontend that it is attached to."""

    server: VllmServer
    front: Served

    async def asked(self, http: aiohttp.ClientSession, *parts: Any) -> Answer:
        """Ask, once the router has heard all that the server announced."""
        await eventually(lambda: self._applied() == self._announced())
        answer = await ask(http, self.front.url, chat(*parts))
        assert answer.status == 200, answer.error
        return answer

    def _applied(self) -> int:
        return int(worker_status(self.front, "attached-0")["kv_events"]["applied"])

    def _announced(self) -> int:
        return sum(len(events) for _, (_, events, *_) in replay(self.server, 0))


@contextmanager
def attached(venv: Path, model: Path, folder: Path, *flags: str) -> Iterator[Watched]:
    """Start a vLLM and a frontend that it is attached to; media may come from `HOST`."""
    options = ["--kv-events-config", events_config("kv@a"), "--skip-mm-profiling", *flags]
    server = VllmServer(venv, model, free_port(), folder / "vllm.log", flags=options)
    try:
        server.wait_ready()
        arguments = ["attach", server.url, "--tokenizer", str(model), "--frontend.port", str(free_port())]
        arguments += ["--canary.idle", "0", "--router.index.predicted_ttl", "0"]
        with served(folder, *arguments, "--frontend.media.private_hosts", HOST) as front:
            until(lambda: len(front.get("/admin/status")[1]["workers"]) == 1, 30.0)
            yield Watched(server, front)
    finally:
        server.stop()


async def told_apart(watched: Watched, length: int, same: Sequence[Any], others: Sequence[Any]) -> None:
    """Blocks behind ``same``, which are one content under several names, are one's; behind ``others`` each its own.

    Args:
        length: tokens of the content, at least.
    """
    async with asking() as http:

        async def asked(*parts: Any) -> Answer:
            return await watched.asked(http, *parts)

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
