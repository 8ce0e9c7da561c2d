"""Is vLLM's own event publisher heard, whichever side binds, and is each of its events read for what it says?"""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from penstock.adapters.engines.kv_events.kv_subscriber import KvSubscriber
from penstock.adapters.listen_address import free_port
from penstock.kernel.hashing import extra_bytes
from penstock.kernel.values import KvCleared, KvRemoved, KvStored
from tests.kv_batches import batches_of
from tests.vllm.server import CPU_ENV

SCRIPT = Path(__file__).parent / "setup" / "publish.py"


@dataclass(frozen=True)
class Way:
    """How a publisher was told to publish, where it then says it does, and where we hear it."""

    given: str
    heard_at: str | None = None
    """None: where it says."""
    said: str = ""
    replay: str = ""


@pytest.fixture(scope="module")
def ways(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Way]]:
    """Publishers of vLLM's, each told otherwise, in one process of vLLM's environment."""
    fixed, connects = free_port(), free_port()
    ipc = f"ipc://{tmp_path_factory.mktemp('kv')}/kv"
    found = {
        "told": Way("tcp://*:0"),  # takes a free port of the address that VLLM_HOST_IP names
        "fixed": Way(f"tcp://*:{fixed}", f"tcp://127.0.0.1:{fixed}"),
        "ipc": Way(ipc, ipc),
        "connects": Way(f"tcp://127.0.0.1:{connects}", f"@tcp://127.0.0.1:{connects}"),
    }
    process = subprocess.Popen(
        [venv / "bin" / "python", SCRIPT, *(way.given for way in found.values())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **CPU_ENV, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = next((line for line in process.stdout if line.startswith("[[")), None)
        assert line is not None, f"{SCRIPT} ended with {process.wait()}"
        yield {
            name: replace(way, said=said, replay=replay)
            for (name, way), (said, replay) in zip(found.items(), json.loads(line), strict=True)
        }
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.mark.parametrize("name", ["told", "fixed", "ipc", "connects"])
async def test_it_is_heard_whichever_side_binds(ways: dict[str, Way], name: str) -> None:
    """It binds where the endpoint has a star or is ipc; a plain address makes it connect, so we must bind."""
    way = ways[name]
    assert way.said == way.given if name != "told" else way.said.startswith("tcp://127.0.0.1:")
    subscriber = KvSubscriber(way.heard_at or way.said, way.replay, "kv@test")
    try:
        async with asyncio.timeout(30.0):
            batch = await anext(batches_of(subscriber))
        again = await subscriber.replay(0, 30.0)
    finally:
        subscriber.close()
    assert subscriber.malformed == 0 and subscriber.dropped == {}
    assert again is not None and again[0].sequence == 0
    assert again[0].events == batch.events
    plain, special, removed, cleared = batch.events
    assert isinstance(plain, KvStored) and isinstance(special, KvStored)
    assert plain.hashes == [2**64 - 1, int.from_bytes(b"\x01" * 8, "big")] and plain.parent is None
    assert plain.tokens == list(range(8)) and plain.block_size == 4 and plain.tier == "device"
    assert plain.extras is None or set(plain.extras) == {b""}
    assert special.extras == [extra_bytes(lora="poet", salt="salt")]
    assert removed == KvRemoved(hashes=[7]) and cleared == KvCleared()
