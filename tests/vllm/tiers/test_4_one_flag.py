"""`penstock serve MODEL --engine vllm --host-cache ... --disk-cache ...`: does one flag give a user tiers that work?"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.listen_address import free_port
from penstock.kernel.errors import ConfigError
from penstock_kv.tiers.tier_admin_client import TierAdminClient
from tests.live.cluster import Served, alive, request, served, until
from tests.vllm.asking import Answer, ask, asking, completion
from tests.vllm.server import BLOCK, CPU_ENV, CPU_FLAGS, MODEL, START_LIMIT
from tests.vllm.tiers.tiered import CACHED, PROMPTS, TOKENS, prompts
from tests.vllm.waiting import eventually

WORKER = "main-0"
GPU_BLOCKS = 80
NEXT, FLOOD = 22, 5
"""Seconds after which a session says to come back; fives of prompts that push all earlier blocks out of vLLM's own KV
memory and host tier of 64 MiB, and out of the 32 MiB of the tier process: then its disk alone has them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("o")


@pytest.fixture(scope="module")
def metrics() -> int:
    """The port at which the tier process shows its metrics."""
    return free_port()


@pytest.fixture(scope="module")
def cluster(venv: Path, checkpoint: Path, folder: Path, metrics: int) -> Iterator[Served]:
    arguments = ["serve", str(checkpoint), "--engine", "vllm", "--served-name", MODEL, "--host-cache", "64MiB"]
    arguments += ["--disk-cache", str(folder / "disk"), "--frontend.port", str(free_port())]
    arguments += [f"--command={venv / 'bin' / 'vllm'}", f"--args={','.join(CPU_FLAGS)}"]
    arguments += ["--supervise.start_timeout", str(START_LIMIT), "--router.index.predicted_ttl", "0"]
    knobs = (("block_size", BLOCK), ("kv_blocks", GPU_BLOCKS), ("max_model_len", 2048), ("cache.metrics_port", metrics))
    for knob, value in knobs:
        arguments += ["--set", f"models.{MODEL}.pools.main.{knob}={value}"]
    env = {**CPU_ENV, "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    with served(folder, *arguments, env=env, start_limit=START_LIMIT) as cluster:
        until(lambda: len(cluster.get("/admin/status")[1]["workers"]) == 1, 10.0)
        yield cluster


async def answers(cluster: Served, asked: list[list[int]], **headers: str) -> list[Answer]:
    got = []
    async with asking() as http:
        for prompt in asked:
            body = completion(prompt, return_token_ids=True)
            got.append(await ask(http, cluster.url, body, headers=headers or None))
            assert got[-1].status == 200, got[-1].error
    return got


async def flood(cluster: Served, first: int) -> None:
    for seed in range(first, first + FLOOD):
        await answers(cluster, prompts(seed))


def texts(some: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in some]


def cache(folder: Path, *words: str) -> tuple[int, str]:
    """Return how ``penstock cache ...`` ends, and what it says of the only tier process of this user."""
    env = {**os.environ, "PENSTOCK_STATE_DIR": str(folder / "state")}
    command = [sys.executable, "-m", "penstock", "cache", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


def stat(folder: Path) -> dict[str, Any]:
    status, said = cache(folder, "stat", "--json")
    assert status == 0, said
    return json.loads(said)


def tier(folder: Path, name: str) -> dict[str, Any]:
    return next(each for each in stat(folder)["tiers"] if each["tier"] == name)


def expected(cluster: Served, answer: Answer) -> dict[str, Any]:
    """Return what the router knew of the worker's tiers when it chose it."""
    decision = cluster.get(f"/admin/explain/{answer.headers['x-penstock-request-id']}")[1]["decisions"][-1]
    return decision["candidates"][0]


def tier_process(cluster: Served) -> int:
    """Return the pid of the tier process."""
    (pid,) = tier_processes(cluster)
    return pid


def tier_processes(cluster: Served) -> list[int]:
    return cluster.children_named(b"\0cache\0", b"\0serve\0")


def listens(socket: Path) -> bool:
    try:
        TierAdminClient(socket).close()
    except ConfigError:
        return False
    return True


async def test_prompts_come_back_from_the_tiers_and_the_router_knows(cluster: Served, folder: Path) -> None:
    first = await answers(cluster, prompts())
    assert max(answer.cached for answer in first) == 0
    await flood(cluster, 60)
    again = await answers(cluster, prompts())
    assert texts(again) == texts(first)
    assert sum(answer.cached for answer in again) >= 0.8 * PROMPTS * CACHED
    host, disk = tier(folder, "host"), tier(folder, "disk")
    assert host["hits"] + disk["hits"] >= 0.8 * PROMPTS * CACHED // BLOCK
    assert host["stored"] > 0 and disk["stored"] > 0
    for answer in again:
        known = expected(cluster, answer)
        assert known["index"] == "exact" and 0 < known["prefill"] < TOKENS // BLOCK, known

    status = cluster.get("/admin/status")[1]
    (worker,) = status["workers"]
    assert (worker["id"], worker["state"]) == (WORKER, "ready") and worker["kv_events"]["lost"] == 0
    page = cluster.get("/metrics")[1]
    assert f'penstock_kv_tier_stored_total{{worker="{WORKER}",tier="disk"}}' in page, "of the tier process, too"


async def verified(cluster: Served, folder: Path) -> None:
    """Every stored block is right, and a router knows just what there is."""
    await answers(cluster, prompts())
    said = ""

    async def agreed() -> bool:
        nonlocal said
        await answers(cluster, [[7] * (BLOCK - 1)])  # vLLM tells with a step what was stored since the one before
        status, said = cache(folder, "verify", "--index", "--url", cluster.url)
        lines = said.splitlines()
        return status == 0 and all(
            any(line.startswith(f"{name}: ") and line.endswith(" ok") for line in lines)
            and any(f" {WORKER} {name}: " in line and " 0 blocks believed" not in line for line in lines)
            for name in ("host", "disk")
        )

    for _ in range(10):
        if await agreed():
            return
    raise AssertionError(said)


async def test_what_is_stored_is_right_and_what_the_router_believes_is_there(cluster: Served, folder: Path) -> None:
    await verified(cluster, folder)


async def test_copies_of_a_salted_prompt_are_expected_for_its_salt_alone(cluster: Served) -> None:
    async def asked(**fields: str) -> Answer:
        async with asking() as http:
            answer = await ask(http, cluster.url, completion(prompts(40)[0], return_token_ids=True, **fields))
        assert answer.status == 200, answer.error
        return answer

    first = await asked(cache_salt="one")
    await flood(cluster, 41)
    again, other, bare = await asked(cache_salt="one"), await asked(cache_salt="two"), await asked()
    assert texts([again, other, bare]) == texts([first] * 3)
    assert min(again.cached, again.expected) >= CACHED, again.headers
    for never in (other, bare):
        assert (never.cached, never.expected) == (0, 0)


async def test_a_sessions_blocks_are_brought_up_before_its_next_request(cluster: Served, metrics: int) -> None:
    """Two sessions say when they come back: the blocks of the one that does are used, and the other's are wasted."""

    def prefetched(result: str) -> float:
        page = request(f"http://127.0.0.1:{metrics}/metrics")[1]
        name = f'penstock_kv_tier_prefetched_total{{result="{result}"}} '
        return next((float(line.removeprefix(name)) for line in page.splitlines() if line.startswith(name)), 0.0)

    def session(name: str) -> dict[str, str]:
        return {"x-penstock-session-id": name, "x-penstock-next-request-in": str(NEXT)}

    away, back = prompts(20)[:1], prompts(20)[1:2]
    (first,) = await answers(cluster, back, **session("back"))
    await answers(cluster, away, **session("away"))
    await flood(cluster, 21)
    whole = CACHED // BLOCK
    await eventually(lambda: prefetched("brought") >= 0.8 * 2 * whole, story=lambda: prefetched("brought"))
    brought, used = prefetched("brought"), prefetched("used")
    (again,) = await answers(cluster, back, **{"x-penstock-session-id": "back"})
    assert texts([again]) == texts([first]) and again.cached >= CACHED
    assert prefetched("used") - used >= 0.8 * whole and prefetched("brought") == brought, "nothing came from the disk"
    decision = cluster.get(f"/admin/explain/{first.headers['x-penstock-request-id']}")[1]["decisions"][-1]
    assert decision["reason"].endswith(f"its next request is likely {NEXT} s after it")
    (model,) = cluster.get("/admin/status")[1]["models"]
    assert model["awaited"] == {"home": 1, "elsewhere": 0}
    wasted = prefetched("wasted")
    await flood(cluster, 21 + FLOOD)
    await eventually(lambda: prefetched("wasted") - wasted >= 0.8 * whole, story=lambda: prefetched("wasted"))


async def test_a_killed_tier_process_costs_no_request_and_comes_back(cluster: Served, folder: Path) -> None:
    first = await answers(cluster, prompts(8))
    killed = tier_process(cluster)
    asked = asyncio.create_task(answers(cluster, prompts(8) + prompts(9)))
    os.kill(killed, signal.SIGKILL)
    assert texts(await asked)[:PROMPTS] == texts(first)
    (socket,) = (folder / "state").glob("*.tiers/main-0.sock")
    await eventually(lambda: not alive(killed) and listens(socket))
    assert "the tier process of main-0 was killed by SIGKILL" in cluster.text

    async def taken() -> bool:
        await answers(cluster, prompts(10))
        now = stat(folder)
        return now["engines"] != [] and any(each["tier"] == "disk" and each["blocks"] for each in now["tiers"])

    for _ in range(10):
        if await taken():
            break
    else:
        raise AssertionError(stat(folder))
    again = await answers(cluster, prompts(8))
    assert texts(again) == texts(first)
    await verified(cluster, folder)  # of the run before, too
