"""Can the engines of a prefill/decode pair be scaled and flipped under load, and does every request come through?"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.live.cluster import Served
from tests.live.test_operate import penstock
from tests.vllm.asking import Answer, ask, asking, completion
from tests.vllm.handoff.test_1_splits import DECODE, PREFILL, nothing_is_held, prompt, rows
from tests.vllm.server import START_LIMIT
from tests.vllm.waiting import eventually

SECOND = "decode-1"
OUTPUT = 40
CLIENTS = 3


@asynccontextmanager
async def load(cluster: Served) -> AsyncIterator[list[Answer]]:
    """Have clients that ask one request after the other, every other one streamed, while the block runs."""
    rng = random.Random(17)
    answers: list[Answer] = []
    ended = False

    async def client(streamed: bool) -> None:
        async with asking() as http:
            while not ended:
                body = completion(prompt(rng, rng.choice((60, 400, 900))), OUTPUT)
                answers.append(await ask(http, cluster.url, body, stream=streamed))

    clients = [asyncio.create_task(client(number % 2 == 0)) for number in range(CLIENTS)]
    try:
        yield answers
    finally:
        ended = True
        await asyncio.gather(*clients)


def takers(answers: list[Answer]) -> Counter[tuple[str | None, str]]:
    """Count by who prefilled and who decoded."""
    return Counter((answer.headers.get("x-penstock-prefill-worker"), answer.worker) for answer in answers)


async def test_a_pair_is_scaled_and_flipped_under_load_and_no_request_fails(cluster: Served) -> None:
    async def change(*command: str) -> None:
        await asyncio.to_thread(penstock, cluster, *command, limit=START_LIMIT)

    async def until_taken(answers: list[Answer], pair: tuple[str, str]) -> None:
        since = len(answers)
        await eventually(lambda: takers(answers[since:])[pair] >= 3, START_LIMIT, lambda: takers(answers[since:]))

    async with load(cluster) as answers:
        await until_taken(answers, (PREFILL, DECODE))
        await change("scale", "decode=2")
        await until_taken(answers, (PREFILL, SECOND))
        await change("flip", SECOND, "prefill")
        assert rows(cluster)[SECOND]["role"] == "prefill"
        await until_taken(answers, (SECOND, DECODE))
        await change("flip", SECOND, "--undo")
        assert rows(cluster)[SECOND]["role"] == "decode"
        await until_taken(answers, (PREFILL, SECOND))
        await change("scale", "decode=1")
        assert rows(cluster).keys() == {PREFILL, DECODE}
        await until_taken(answers, (PREFILL, DECODE))
    assert {answer.status for answer in answers} == {200}
    assert {answer.output_tokens for answer in answers} == {OUTPUT}
    found = cluster.get("/admin/status")[1]["requests"]
    assert found["failed"] == found["rejected"] == 0
    await nothing_is_held(cluster)
