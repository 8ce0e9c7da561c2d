"""Does our KV connector bring blocks back from the tiers, beside the prefill/decode connector in one server?"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_kv.inside.restored_blocks import RESTORED_ENV
from tests.vllm.asking import Answer
from tests.vllm.handoff.conftest import KV, WIRE
from tests.vllm.tiers.processes import DISK, SMALL_HOST, TierProcess
from tests.vllm.tiers.test_1_guard import texts
from tests.vllm.tiers.tiered import CACHED, PROMPTS, Tiered, prompts, tiered

STAGING = 32 << 20
"""Bytes: room for 256 blocks. Half of them may be on their way to the tiers: four prompts'."""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierProcess]:
    process = TierProcess(tmp_path_factory.mktemp("t"))
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server writes whether each block that it restores is one that it stored."""
    return tmp_path_factory.mktemp("checked") / "restored"


@pytest.fixture(scope="module")
def server(
    venv: Path, checkpoint: Path, process: TierProcess, checked: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiered]:
    ours = {
        "kv_connector": "PenstockConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "penstock_kv.inside.vllm_connector",
        # The tiny model computes faster than a busy disk reads, and the tier process would rightly say so.
        "kv_connector_extra_config": {
            "socket": str(process.socket),
            "staging_bytes": STAGING,
            "report_speed": False,
        },
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [KV, ours]},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**WIRE, RESTORED_ENV: str(checked)}.items():
            patch.setenv(name, value)
        with tiered(venv, checkpoint, tmp_path_factory.mktemp("connector") / "log", both) as server:
            yield server


def count(word: str, checked: Path) -> int:
    return checked.read_text().split().count(word)


def wrong(checked: Path) -> int:
    return count("wrong", checked)


async def test_blocks_come_back_from_host_and_disk_and_the_text_is_the_same(
    server: Tiered, process: TierProcess, checked: Path
) -> None:
    first = await server.answers(prompts())
    assert max(answer.cached for answer in first) == 0
    hits = server.counter("vllm:external_prefix_cache_hits_total")
    await comes_back(server, first)
    assert server.counter("vllm:external_prefix_cache_hits_total") - hits >= 0.8 * PROMPTS * CACHED
    assert count("right", checked) >= 0.8 * PROMPTS * CACHED // 32 and wrong(checked) == 0

    process.start(host=SMALL_HOST, disk=DISK)
    await comes_back(server, first)
    process.kill()
    process.start(host=SMALL_HOST, disk=DISK)
    await comes_back(server, first)
    assert wrong(checked) == 0


async def comes_back(server: Tiered, first: list[Answer]) -> None:
    """Ask until all prompts come from the tiers; what is skipped while much is on its way is stored the next time."""
    for _ in range(5):
        server.forget()
        again = await server.answers(prompts())
        assert texts(again) == texts(first)
        if sum(answer.cached for answer in again) >= 0.8 * PROMPTS * CACHED:
            return
        await asyncio.sleep(1.0)
    raise AssertionError(f"only {[answer.cached for answer in again]} tokens of the prompts come from the tiers")


async def test_prompts_at_the_same_time_share_the_staging_region(server: Tiered, checked: Path) -> None:
    first = await server.answers(prompts(21))
    server.forget()
    again = await asyncio.gather(*(server.answers([prompt]) for prompt in prompts(21)))
    assert [texts(answers)[0] for answers in again] == texts(first)
    assert wrong(checked) == 0


async def test_a_process_that_is_gone_is_a_miss(server: Tiered, process: TierProcess, checked: Path) -> None:
    first = await server.answers(prompts(22)[:2])
    process.kill()
    server.forget()
    again = await server.answers(prompts(22)[:2])
    assert texts(again) == texts(first) and max(answer.cached for answer in again) == 0
    assert wrong(checked) == 0
