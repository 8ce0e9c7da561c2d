"""Do blocks go to the tier process and come back, and is every loss of it a miss with right answers?"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.cluster import until
from tests.vllm.tiers.test_1_guard import texts
from tests.vllm.tiers.tiered import CACHED, PROMPTS, TOKENS, Tiered, native, prompts, tiered

BLOCKS = PROMPTS * TOKENS // 32


class TierProcess:
    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "TierProcess":
        module = Path(__file__).parents[2] / "inside" / "plain_tiers.py"
        self.process = subprocess.Popen([sys.executable, str(module), str(self.socket)])
        until(self.socket.exists, 20.0)
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.socket.unlink(missing_ok=True)
            self.process = None


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierProcess]:
    process = TierProcess(tmp_path_factory.mktemp("t") / "s").start()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def server(
    venv: Path, checkpoint: Path, process: TierProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiered]:
    tier = {"type": "PenstockTier", "module_path": "penstock.inside.vllm_tier", "socket": str(process.socket)}
    with tiered(venv, checkpoint, tmp_path_factory.mktemp("tier") / "log", native(tier)) as server:
        yield server


async def test_blocks_come_back(server: Tiered) -> None:
    first = await server.answers(prompts())
    until(lambda: server.counter("penstock_tier_stored_blocks_total") >= BLOCKS - PROMPTS, 20.0)
    assert max(answer.cached for answer in first) == 0
    server.forget()
    again = await server.answers(prompts())
    assert texts(again) == texts(first)
    assert min(answer.cached for answer in again) >= CACHED
    assert server.counter("penstock_tier_served_blocks_total") >= BLOCKS - PROMPTS


async def test_a_kill_at_any_moment_is_a_miss(server: Tiered, process: TierProcess) -> None:
    first = await server.answers(prompts(7))
    for delay in (0.0, 0.02, 0.1, 0.4):
        server.forget()
        asked = asyncio.create_task(server.answers(prompts(7)))
        await asyncio.sleep(delay)
        assert process.process is not None
        os.kill(process.process.pid, signal.SIGKILL)
        process.kill()
        assert texts(await asked) == texts(first)
        process.start()
        until(lambda: server.counter("penstock_tier_connected") == 1, 20.0)
