"""Does the server alone serve engines that others run, and say which package it lacks for the rest?"""

import asyncio
import os
import re
import time
from pathlib import Path

import pytest

import penstock
from penstock_lab.testing import simulated_servers
from tests.live.cluster import Served, served

COMPANIONS = ("dynamo", "extras", "kubernetes", "kv", "lab")


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """An environment in which `penstock` can be imported, and no companion."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "penstock").symlink_to(Path(penstock.__file__).parent)
    for name in COMPANIONS:
        (packages / f"penstock_{name}").mkdir()
        (packages / f"penstock_{name}" / "__init__.py").write_text("raise ImportError('it is not installed')\n")
    return {"PYTHONPATH": f"{packages}:{os.environ.get('PYTHONPATH', '')}"}


async def test_the_server_alone_serves_an_engine_that_others_run(tmp_path: Path, alone: dict[str, str]) -> None:
    began = time.monotonic()
    async with simulated_servers() as (server,):
        await asyncio.to_thread(chats, tmp_path, server.url, alone, began)


def chats(folder: Path, url: str, alone: dict[str, str], began: float) -> None:
    with served(folder, "attach", url, "--set", "frontend.port=0", env=alone) as cluster:
        assert cluster.chat("Hello")[0] == 200
        took = re.search(r"is up after ([\d.]+) s", cluster.text)
        assert took is not None and float(took[1]) <= time.monotonic() - began
        notes = cluster.get("/health")[1]["notes"]
        for name in COMPANIONS:
            assert any(f"the extension {name} is left out" in note for note in notes), notes


@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        (["up"], "models.sim.pools.main.engine: is sim, which is not installed (install the package penstock_lab"),
        (["bench", "http://127.0.0.1:1"], "bench comes with the package penstock_lab, which can't be used here"),
        (["operator"], "operator comes with the package penstock_kubernetes"),
        (["up", "--set", "planner.enabled=true", "--set", "planner.policy=hybrid"], "takes one of slo, static"),
        (
            ["up", "--set", "models.sim.pools.main.cache.host=1GiB"],
            "settings of a package that is not installed",
        ),
    ],
)
def test_it_says_which_package_it_lacks(words: list[str], lacks: str, tmp_path: Path, alone: dict[str, str]) -> None:
    ended = Served(words, tmp_path, alone)
    assert ended.process.wait(30) == 2
    ended._reader.join(5)
    assert lacks in ended.text, ended.text
