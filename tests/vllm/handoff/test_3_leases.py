"""Is each answer of a pair right whose KV is held for 3 s, while its processes stand still for longer and are killed?

Both have tiers, which keep what they were handed.

Where an engine reads KV that was let go, its answer has status 200, a wrong text, and stays in its prefix cache.
"""

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.adapters.listen_address import free_port
from tests.depth import deep
from tests.live.cluster import Served, served, until
from tests.vllm.asking import Answer, ask, asking, completion
from tests.vllm.handoff import conftest as pair
from tests.vllm.handoff.test_1_splits import DECODE, PREFILL, prompt, rows
from tests.vllm.server import CPU_ENV, START_LIMIT
from tests.vllm.tiers.processes import TierProcess
from tests.vllm.tiers.test_5_pair import with_tiers
from tests.vllm.waiting import eventually

LEASE = 3
"""Seconds."""
STILL = 2 * LEASE
ASKED, EVERY = deep(500), 50
"""Requests, and how many of them are sent between two faults."""
CLIENTS, OUTPUT = 6, 8
FAULTS = ((DECODE, signal.SIGSTOP), (PREFILL, signal.SIGSTOP), (DECODE, signal.SIGSTOP), (DECODE, signal.SIGKILL))


@pytest.fixture(scope="module")
def leased(venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("leased")
    found = json.loads(pair.config(venv, checkpoint))
    lease = {**pair.KV, "kv_connector_extra_config": {"kv_lease_duration": LEASE}}
    processes = [TierProcess(tmp_path_factory.mktemp(role[0])) for role in ("prefill", "decode")]
    pools = next(iter(found["models"].values()))["pools"]
    for process, role in zip(processes, ("prefill", "decode"), strict=True):
        process.start(fault="dear")
        both = json.dumps(with_tiers(process, f"{role}-0", lease))
        args = pools[role]["args"]
        args[-1:] = [f"--kv-transfer-config={both}", "--prefix-caching-hash-algo=sha256_cbor"]
    (folder / "pd.yaml").write_text(json.dumps(found))
    env = {**CPU_ENV, "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    up = ("up", "pd.yaml", "--frontend.port", str(free_port()))
    with served(folder, *up, env=env, start_limit=START_LIMIT) as cluster:
        until(lambda: len(cluster.get("/admin/status")[1]["workers"]) == 2, 10.0)
        yield cluster
    for process in processes:
        process.stop()


def process_of(cluster: Served, worker: str) -> int | None:
    """Return the process of a worker that is ready."""
    row = rows(cluster).get(worker)
    if row is None or row["state"] != "ready":
        return None
    port = row["url"].rpartition(":")[2].encode()
    return next(iter(cluster.children_named(b"\0serve\0", b"\0--port\0" + port + b"\0")), None)


def processes(process: int) -> list[int]:
    """Return a server's process and those that it started, such as its engine's core."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *map(int, children)]


async def test_no_answer_is_made_of_kv_that_was_let_go(leased: Served) -> None:
    rng = random.Random(23)
    some = [prompt(rng, rng.choice((100, 400, 900))) for _ in range(ASKED // 2)]
    asked = some + rng.sample(some, len(some))  # what an answer left in a prefix cache serves the second one
    answers: list[tuple[list[int], Answer]] = []
    left, going = iter(asked), asyncio.Event()
    going.set()

    async def client(streamed: bool) -> None:
        async with asking() as http:
            for tokens in left:
                await going.wait()
                body = completion(tokens, OUTPUT, return_token_ids=True)
                answers.append((tokens, await ask(http, leased.url, body, stream=streamed)))

    async def other() -> None:
        """Have the prefill engine put other KV where what it let go was."""
        async with asking() as http:
            while True:
                await ask(http, rows(leased)[PREFILL]["url"], completion(prompt(rng, 900), 1))

    async def fault(worker: str, sign: signal.Signals) -> None:
        process = process_of(leased, worker)
        assert process is not None
        for each in processes(process):
            os.kill(each, sign)
        if sign == signal.SIGSTOP:
            others = [asyncio.create_task(other()) for _ in range(2)] if worker != PREFILL else []
            await asyncio.sleep(STILL)  # the input: it is no wait for something
            for each in processes(process):
                os.kill(each, signal.SIGCONT)
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        else:
            going.clear()  # without a decode worker nothing would be handed over
        killed = process if sign == signal.SIGKILL else None
        await eventually(lambda: process_of(leased, worker) not in (None, killed), START_LIMIT)
        going.set()

    clients = [asyncio.create_task(client(number % 2 == 0)) for number in range(CLIENTS)]
    for number in range(ASKED // EVERY):
        await eventually(lambda n=number: len(answers) >= n * EVERY or all(one.done() for one in clients), START_LIMIT)
        await fault(*FAULTS[number % len(FAULTS)])
    await asyncio.gather(*clients)
    assert {answer.status for _, answer in answers} == {200}, [answer.error for _, answer in answers if answer.error]
    async with asking() as http:
        first = rows(leased)[PREFILL]["url"]
        bodies = [completion(tokens, OUTPUT, return_token_ids=True) for tokens in some]
        right = {tuple(body["prompt"]): (await ask(http, first, body)).token_ids for body in bodies}
    wrong = [tokens for tokens, answer in answers if answer.token_ids != right[tuple(tokens)]]
    handed = sum("x-penstock-prefill-worker" in answer.headers for _, answer in answers)
    print(f"{len(answers)} answers, {handed} handed over, {len(wrong)} wrong")
    assert not wrong
    assert handed > len(answers) // 2
