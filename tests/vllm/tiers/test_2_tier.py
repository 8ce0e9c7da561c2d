"""Do blocks go to the tier process and come back, and is every loss of it a miss with right answers?

One server for all, whose tier process is ended and started with other settings.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.kernel.tiers.load_worth import LOAD_METRICS, costs_in
from penstock_kv.tiers.tier_admin_client import TierAdminClient
from penstock_kv.tiers.tier_admin_protocol import AskStat, CacheStat
from tests.kv.transfer.object_servers import BUCKET, s3_server
from tests.live.cluster import until
from tests.vllm.asking import Answer, ask, asking, completion
from tests.vllm.tiers.processes import DISK, SMALL_HOST, TierProcess
from tests.vllm.tiers.test_1_guard import texts
from tests.vllm.tiers.tiered import CACHED, PROMPTS, TOKENS, Tiered, native, prompts, tiered

BLOCKS = PROMPTS * TOKENS // 32


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierProcess]:
    process = TierProcess(tmp_path_factory.mktemp("t"))
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def server(
    venv: Path, checkpoint: Path, process: TierProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiered]:
    tier = {"type": "PenstockTier", "module_path": "penstock_kv.inside.vllm_tier", "socket": str(process.socket)}
    with tiered(venv, checkpoint, tmp_path_factory.mktemp("tier") / "log", native(tier)) as server:
        yield server


@pytest.fixture(scope="module")
def first(server: Tiered) -> list[Answer]:
    """The answers that are computed, with all blocks stored after them."""
    answers = asyncio.run(server.answers(prompts()))
    until(lambda: stored(server) >= BLOCKS - PROMPTS, 20.0)
    assert max(answer.cached for answer in answers) == 0
    return answers


def stored(server: Tiered) -> float:
    return server.counter("penstock_tier_stored_blocks_total")


async def connected(server: Tiered) -> None:
    """Wait until the server has its tier process; an idle one says so with its next step."""
    for _ in range(100):
        await server.answers([[5, 6, 7]], max_tokens=1)
        if server.counter("penstock_tier_connected") == 1:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the server is not connected to its tier process")


def told_to_routers(server: Tiered) -> bool:
    """Return whether the server's metrics say what loads cost, as its tier process answered."""
    costs = costs_in({name: server.counter(name) for name in LOAD_METRICS.values()})
    return costs is not None and costs.own_host and costs.host_token > 0 and costs.disk_token > 0


def cached(answers: list[Answer]) -> int:
    return sum(answer.cached for answer in answers)


async def ask_again(server: Tiered) -> list[Answer]:
    server.forget()
    return await server.answers(prompts())


async def test_blocks_come_back_from_host_memory(server: Tiered, first: list[Answer]) -> None:
    again = await ask_again(server)
    assert texts(again) == texts(first)
    assert min(answer.cached for answer in again) >= CACHED
    assert server.counter("penstock_tier_served_blocks_total") >= BLOCKS - PROMPTS


async def test_blocks_come_back_from_disk_and_after_a_kill(
    server: Tiered, process: TierProcess, first: list[Answer]
) -> None:
    process.start(host=SMALL_HOST, disk=DISK)
    await connected(server)
    before = stored(server)
    computed = await ask_again(server)
    assert texts(computed) == texts(first)
    until(lambda: stored(server) >= before + 0.8 * BLOCKS, 20.0)
    assert cached(await ask_again(server)) >= 0.8 * PROMPTS * CACHED
    until(lambda: told_to_routers(server), 20.0)
    process.kill()
    process.start(host=SMALL_HOST, disk=DISK)
    await connected(server)
    again = await ask_again(server)
    assert texts(again) == texts(first)
    assert cached(again) >= 0.8 * PROMPTS * CACHED, "the disk survives a kill"


async def test_flipped_bytes_on_disk_are_never_served(
    server: Tiered, process: TierProcess, first: list[Answer]
) -> None:
    process.kill()
    flip_records(process)
    process.start(host=SMALL_HOST, disk=DISK)
    await connected(server)
    again = await ask_again(server)
    assert texts(again) == texts(first)
    assert max(answer.cached for answer in again) == 0


def flip_records(process: TierProcess) -> None:
    """Flip bytes in each block of the disk tier."""
    rng = random.Random(3)
    for file in process.disk.rglob("*"):
        if file.is_file():
            with file.open("r+b") as raw:
                for place in range(8192, file.stat().st_size, 32 << 10):
                    raw.seek(place + rng.randrange(4096))
                    raw.write(rng.randbytes(8))


@pytest.mark.parametrize("fault", ["slow", "full"])
async def test_a_bad_disk_is_a_miss(server: Tiered, process: TierProcess, first: list[Answer], fault: str) -> None:
    process.start(host=SMALL_HOST, disk=DISK, fault=fault)
    await connected(server)
    for _ in range(2):
        server.forget()
        began = time.monotonic()
        answers = await server.answers(prompts(), kv_transfer_params={"penstock": {"deadline": 0.5}})
        assert texts(answers) == texts(first)
        assert time.monotonic() - began < 60.0


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1, 0.4])
async def test_a_kill_at_any_moment_is_a_miss(
    server: Tiered, process: TierProcess, first: list[Answer], delay: float
) -> None:
    process.start()
    await connected(server)
    assert texts(await ask_again(server)) == texts(first)
    server.forget()
    asked = asyncio.create_task(server.answers(prompts()))
    await asyncio.sleep(delay)
    process.kill()
    assert texts(await asked) == texts(first)
    assert texts(await ask_again(server)) == texts(first)


async def test_hints_reach_the_tiers(server: Tiered, process: TierProcess) -> None:
    process.start(host=SMALL_HOST)
    await connected(server)
    pinned, others = prompts(11)[:1], prompts(12)[:3]
    before = await server.answers(pinned, kv_transfer_params={"penstock": {"pin": 300, "priority": 5}})
    await server.answers(others)
    server.forget()
    again = await server.answers(pinned)
    assert texts(again) == texts(before)
    assert again[0].cached >= CACHED, "three further prompts would have evicted it, but it is pinned"


async def test_blocks_come_back_from_s3(
    server: Tiered, process: TierProcess, first: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path) as (options, _):
        for name, option in (
            ("AWS_ENDPOINT_URL", "endpoint"),
            ("AWS_ACCESS_KEY_ID", "access_key_id"),
            ("AWS_SECRET_ACCESS_KEY", "secret_access_key"),
            ("AWS_REGION", "region"),
        ):
            monkeypatch.setenv(name, options[option])
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        process.start(object_url=f"s3://{BUCKET}/kv")
        await connected(server)
        assert texts(await ask_again(server)) == texts(first)
        until(lambda: blocks_in(process, "object") >= 0.8 * BLOCKS, 60.0, lambda: str(stat(process)))
        process.kill()
        process.start(object_url=f"s3://{BUCKET}/kv")
        await connected(server)
        again = await ask_again(server)
        assert texts(again) == texts(first)
        assert cached(again) >= 0.5 * PROMPTS * CACHED, stat(process)  # host memory was empty
        process.kill()


def stat(process: TierProcess) -> CacheStat:
    client = TierAdminClient(process.socket)
    try:
        return client.ask(AskStat(), CacheStat)
    finally:
        client.close()


def blocks_in(process: TierProcess, tier: str) -> int:
    return sum(each.blocks for each in stat(process).tiers if each.tier == tier)


LOAD, IN_FLIGHT, LOAD_TOKENS = 24, 8, 480
"""Prompts of 15 blocks each: eight need 128 blocks with their answers, where vLLM has room for 79 and evicts."""


async def load(server: Tiered) -> list[Answer]:
    rng = random.Random(17)
    asked = [[rng.randrange(10, 2000) for _ in range(LOAD_TOKENS)] for _ in range(LOAD)]
    turns = asyncio.Semaphore(IN_FLIGHT)
    server.forget()
    async with asking() as http:

        async def one(prompt: list[int]) -> Answer:
            async with turns:
                answer = await ask(http, server.url, completion(prompt, 24, return_token_ids=True))
                assert answer.status == 200, answer.error
                return answer

        return await asyncio.gather(*map(one, asked))


async def test_text_under_load_is_that_without_tiers(server: Tiered, process: TierProcess) -> None:
    """Batches differ from run to run, and sums with them: only what two runs without tiers agree on is compared."""
    process.kill()
    await asyncio.sleep(0.5)
    one, two = texts(await load(server)), texts(await load(server))
    same = [place for place in range(LOAD) if one[place] == two[place]]
    print(f"{len(same)} of {LOAD} requests have one text in both runs without tiers, in float32")
    assert len(same) >= 0.8 * LOAD

    def right(answers: list[Answer]) -> bool:
        return all(answers[place].token_ids == one[place] for place in same)

    for folder in process.disk.rglob("*"):
        if folder.is_file():
            folder.unlink()
    process.start(host=SMALL_HOST, disk=DISK)
    await connected(server)
    assert right(await load(server)), "with tiers that are filled"
    again = await load(server)
    assert right(again), "with tiers that are full"
    print(f"{cached(again)} of {LOAD * LOAD_TOKENS} prompt tokens came from the tiers")
    assert cached(again) > 0.2 * LOAD * LOAD_TOKENS
    process.kill()
    flip_records(process)
    process.start(host=SMALL_HOST, disk=DISK)
    await connected(server)
    assert right(await load(server)), "with flipped bytes on disk"
    process.start(host=SMALL_HOST, disk=DISK, fault="full")
    await connected(server)
    assert right(await load(server)), "with a full disk"
    running = asyncio.create_task(load(server))
    await asyncio.sleep(1.0)
    process.kill()
    assert right(await running), "with a tier process that is killed"
