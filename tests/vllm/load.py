"""Which requests put a prefix cache through everything? Shared prefixes, repeats, full hits and evictions."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp

from tests.vllm.asking import Answer, ask, completion
from tests.vllm.server import BLOCK

LOW, HIGH = 300, 2000
"""Token ids of ordinary words."""


class Prompts:
    """Random prompts of a few families; the same seed gives the same ones.

    Args:
        families: shared beginnings; with more of them than fit, the servers evict all the time.
    """

    def __init__(self, seed: int, families: int = 40) -> None:
        self._rng = random.Random(seed)
        self._families = [self.fresh(BLOCK * self._rng.randrange(2, 9)) for _ in range(families)]
        self._said: list[list[int]] = []

    def fresh(self, tokens: int) -> list[int]:
        """Return tokens that nobody has asked for."""
        return [self._rng.randrange(LOW, HIGH) for _ in range(tokens)]

    def next(self) -> list[int]:
        """Return a new member of a family, one cut to whole blocks, one that was asked before, or a stranger."""
        kind = self._rng.random()
        if kind < 0.15 and self._said:
            return self._rng.choice(self._said)
        if kind < 0.2:
            prompt = self.fresh(self._rng.randrange(1, 10 * BLOCK))
        else:
            prompt = self._rng.choice(self._families) + self.fresh(self._rng.randrange(0, 5 * BLOCK))
            if kind < 0.5:
                prompt = prompt[: max(BLOCK, len(prompt) - len(prompt) % BLOCK)]
        self._said = [*self._said[-200:], prompt]
        return prompt

    def said(self) -> list[int]:
        """Return a prompt of the last hundreds."""
        return self._rng.choice(self._said)

    def output(self) -> int:
        """Return a length of output; some fill blocks of their own."""
        return self._rng.choice((1, 1, 2, 4, 8, 40))

    def requests(self, count: int) -> Iterator[dict[str, Any]]:
        for _ in range(count):
            yield completion(self.next(), self.output())


async def drive(
    http: aiohttp.ClientSession,
    url: str,
    requests: Iterator[dict[str, Any]],
    *,
    concurrency: int,
    streamed: float = 0.5,
    pause: float = 0.0,
    seen: Callable[[Answer], None] | None = None,
) -> Sequence[Answer]:
    """Send requests, so many at a time, a share of them streamed; return all answers.

    Args:
        pause: seconds between an answer and the same client's next request.
        seen: told each answer as it ends.
    """
    rng = random.Random(7)
    answers: list[Answer] = []

    async def client() -> None:
        for body in requests:
            answer = await ask(http, url, body, stream=rng.random() < streamed)
            answers.append(answer)
            if seen is not None:
                seen(answer)
            await asyncio.sleep(pause)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return answers
