"""Is KV in tiers never served to other weights: swapped under a path, an adapter loaded in place, of another dtype?

Both plug-ins, one before the other: the guard around vLLM's own file tier, and the tier process with a disk.
"""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.cluster import post
from tests.vllm.asking import Answer
from tests.vllm.server import ADAPTER, RANK
from tests.vllm.tiers.processes import DISK, TierProcess
from tests.vllm.tiers.test_1_guard import texts
from tests.vllm.tiers.tiered import CACHED, Tiered, native, prompts, tiered

LORA = ("--enable-lora", "--max-lora-rank", str(RANK))
OTHERS = """
import sys
from safetensors.torch import load_file, save_file
save_file({name: -tensor.roll(1, 0) for name, tensor in load_file(sys.argv[1]).items()}, sys.argv[1], {"format": "pt"})
"""


def swap(venv: Path, folder: Path) -> None:
    """Write other weights of the same shapes into a folder's files."""
    for file in folder.glob("*.safetensors"):
        subprocess.run([venv / "bin" / "python", "-c", OTHERS, file], check=True)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierProcess]:
    process = TierProcess(tmp_path_factory.mktemp("t"))
    process.start(disk=DISK)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def connector(process: TierProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    inner = {"type": "fs", "root_dir": str(tmp_path_factory.mktemp("fs"))}
    return native(
        {"type": "GuardedTier", "module_path": "penstock_kv.inside.vllm_guard", "inner": inner},
        {"type": "PenstockTier", "module_path": "penstock_kv.inside.vllm_tier", "socket": str(process.socket)},
    )


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny model, whose files are changed."""
    folder = tmp_path_factory.mktemp("models") / "m"
    shutil.copytree(checkpoint, folder)
    return folder


@pytest.fixture(scope="module")
def old(venv: Path, model: Path, connector: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """The answers of the first weights, whose KV is in all tiers."""
    with tiered(venv, model, tmp_path_factory.mktemp("old") / "log", connector) as server:
        answers = asyncio.run(kept(server))
    swap(venv, model)
    return answers


@pytest.fixture(scope="module")
def server(
    old: list[Answer], venv: Path, model: Path, connector: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiered]:
    """A server of other weights, with the same path and tiers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
        with tiered(venv, model, tmp_path_factory.mktemp("new") / "log", connector, *LORA) as server:
            yield server


async def kept(server: Tiered, **fields: Any) -> list[Answer]:
    """Ask for answers until they come from the tiers; those that were computed and those that came are the same."""
    computed = await server.answers(prompts(), **fields)
    for _ in range(10):  # what is not stored yet is computed, and stored once more
        server.forget()
        again = await server.answers(prompts(), **fields)
        assert texts(again) == texts(computed)
        if min(answer.cached for answer in again) >= CACHED:
            return computed
    raise AssertionError(f"the tiers have not all blocks: {[answer.cached for answer in again]}")


async def test_weights_that_were_swapped_under_their_path_get_nothing_of_the_old_ones(
    server: Tiered, old: list[Answer]
) -> None:
    new = await kept(server)
    assert max(answer.cached for answer in new) == 0
    assert all(now != before for now, before in zip(texts(new), texts(old), strict=True)), "they differ by much"


async def test_an_adapter_that_is_loaded_again_in_place_gets_nothing_of_the_old_one(
    server: Tiered, venv: Path, model: Path
) -> None:
    def load(**fields: Any) -> None:
        body = {"lora_name": "lora", "lora_path": str(model / ADAPTER), **fields}
        assert post(f"{server.url}/v1/load_lora_adapter", body)[0] == 200

    load()
    first = await kept(server, model="lora")
    assert max(answer.cached for answer in first) == 0, "nor anything of the model without it"
    swap(venv, model / ADAPTER)
    load(load_inplace=True)
    server.forget()  # vLLM keeps its own blocks by the adapter's name until it is told so
    second = await kept(server, model="lora")
    assert max(answer.cached for answer in second) == 0
    assert texts(second) != texts(first)


async def test_another_dtype_gets_nothing(
    server: Tiered, old: list[Answer], venv: Path, model: Path, connector: dict[str, Any], tmp_path: Path
) -> None:
    server.stop()
    with tiered(venv, model, tmp_path / "log", connector, "--dtype", "bfloat16") as other:
        assert max(answer.cached for answer in await other.answers(prompts())) == 0
