"""Do models with several groups of attention layers get right answers from the tier process, also after a restart?

And does a router expect of them what they have? A prefix whose window or state is gone is computed anew.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.listen_address import free_port
from tests.engine_venv import ROOT, made
from tests.live.cluster import Served, served
from tests.vllm.asking import ask, asking, completion
from tests.vllm.attached.heard import worker_status
from tests.vllm.server import BLOCK, VllmServer, events_config
from tests.vllm.tiers.processes import DISK, SMALL_HOST, TierProcess
from tests.vllm.tiers.test_1_guard import texts
from tests.vllm.tiers.test_2_tier import flip_records
from tests.vllm.tiers.test_7_identity import kept
from tests.vllm.tiers.tiered import CACHED, TOKENS, native, prompts, tiered
from tests.vllm.truth import replay
from tests.vllm.waiting import eventually

ROOM = ("--num-gpu-blocks-override", "160")
"""Each group has blocks of its own."""
PROBES = 60


@pytest.fixture(params=[("windowed.py", ()), ("recurrent.py", ("--dtype", "bfloat16"))], ids=["a window", "a state"])
def hybrid(request: pytest.FixtureRequest, venv: Path) -> tuple[Path, tuple[str, ...]]:
    """A model, and the flags that it needs beside the usual ones."""
    recipe, flags = request.param
    if flags and "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM computes these states in bfloat16, which this CPU does not")
    return made(venv, ROOT / "tests/vllm/setup" / recipe, f"vllm-{recipe.removesuffix('.py')}"), flags


async def test_it_comes_back_from_host_and_disk_and_after_a_restart(
    venv: Path, hybrid: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    model, more = hybrid
    process = TierProcess(tmp_path)
    process.start(disk=DISK)
    tier: dict[str, Any] = {"type": "PenstockTier", "module_path": "penstock_kv.inside.vllm_tier"}
    connector = native({**tier, "socket": str(process.socket)})
    try:
        with tiered(venv, model, tmp_path / "log1", connector, *ROOM, *more) as server:
            first = await kept(server)
        process.start(host=SMALL_HOST, disk=DISK)  # what was in its memory is gone, and its disk is read again
        with tiered(venv, model, tmp_path / "log2", connector, *ROOM, *more) as server:
            again = await server.answers(prompts())
            assert texts(again) == texts(first)
            assert min(answer.cached for answer in again) >= CACHED - 128, "all but some of the last tokens"
        flip_records(process)
        process.start(host=SMALL_HOST, disk=DISK)
        with tiered(venv, model, tmp_path / "log3", connector, *ROOM, *more) as server:
            assert texts(await server.answers(prompts())) == texts(first), "flipped bytes are computed anew"
    finally:
        process.kill()


async def test_a_router_expects_what_each_group_allows(
    venv: Path, hybrid: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    model, more = hybrid
    flags = ["--kv-events-config", events_config("kv@hybrid"), *more]
    server = VllmServer(venv, model, free_port(), tmp_path / "log", flags=flags)
    arguments = ["attach", server.url, "--tokenizer", str(model), "--frontend.port", str(free_port()), "--canary.idle"]
    try:
        server.wait_ready()
        with served(tmp_path, *arguments, "0") as front:
            rng, said = random.Random(7), prompts()
            used = lost = 0
            async with asking() as http:
                for number in range(PROBES):
                    if number % 8 == 0:
                        said.append([rng.randrange(10, 2000) for _ in range(rng.randint(TOKENS // 2, TOKENS))])
                    old = rng.choice(said[-12:])
                    cut = rng.choice((320, len(old) // 2, len(old)))
                    prompt = old[:cut] + [rng.randrange(10, 2000) for _ in range(rng.choice((0, BLOCK, 200)))]
                    await eventually(lambda: applied(front) == announced(server))
                    answer = await ask(http, front.url, completion(prompt, 2))
                    assert answer.status == 200, answer.error
                    assert answer.expected == answer.cached, (number, cut, len(old), len(prompt))
                    said.append(prompt)
                    used += answer.cached > 0
                    lost += answer.cached == 0 and cut > BLOCK
            assert min(used, lost) >= PROBES // 10, f"{used} prefixes were used, {lost} known ones could not be"
    finally:
        server.stop()


def applied(front: Served) -> int:
    return int(worker_status(front, "attached-0")["kv_events"]["applied"])


def announced(server: VllmServer) -> int:
    """Return how many KV events a server has announced."""
    return sum(len(events) for _, (_, events, *_) in replay(server, 0))
