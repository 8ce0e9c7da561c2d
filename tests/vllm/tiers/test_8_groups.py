"""Do models with several groups of attention layers get right answers from the tier process, also after a restart?"""

from pathlib import Path
from typing import Any

from tests.vllm.conftest import made
from tests.vllm.tiers.processes import DISK, SMALL_HOST, TierProcess
from tests.vllm.tiers.test_1_guard import texts
from tests.vllm.tiers.test_7_identity import kept
from tests.vllm.tiers.tiered import CACHED, native, prompts, tiered

ROOM = ("--num-gpu-blocks-override", "160")
"""Each group has blocks of its own."""


async def test_a_sliding_window_comes_back_from_host_and_disk_and_after_a_restart(venv: Path, tmp_path: Path) -> None:
    model = made(venv, "windowed.py", "vllm-windowed")
    process = TierProcess(tmp_path)
    process.start(disk=DISK)
    tier: dict[str, Any] = {"type": "PenstockTier", "module_path": "penstock.inside.vllm_tier"}
    connector = native({**tier, "socket": str(process.socket)})
    try:
        with tiered(venv, model, tmp_path / "log1", connector, *ROOM) as server:
            first = await kept(server)
        process.start(host=SMALL_HOST, disk=DISK)  # what was in its memory is gone, and its disk is read again
        with tiered(venv, model, tmp_path / "log2", connector, *ROOM) as server:
            again = await server.answers(prompts())
            assert texts(again) == texts(first)
            assert min(answer.cached for answer in again) >= CACHED - 128, "all but a window of the last tokens"
    finally:
        process.kill()
