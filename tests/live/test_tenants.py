"""Does a flood of one tenant's requests leave another's answers soon, over real processes? And is all of it counted?"""

import asyncio
import csv
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import aiohttp
import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, served

CONFIG = """
models:
  sim:
    tokenizer: builtin:sim
    pools: {main: {replicas: 2, sim: {timing: {prefill: [0, 1, 1], decode: [0, 0, 1]}}}}
tenants: {flooder: {keys: [flood-key]}, other: {keys: [other-key]}}
"""
FLOOD = 48
"""Requests that the flooder always has open: some 5 s of prefill."""
ASKED = 8


async def ask(http: aiohttp.ClientSession, url: str, key: str, text: str) -> float:
    """Return the TTFT of a chat in seconds; what is refused is over at once, and waits a little."""
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True}
    began = time.monotonic()
    async with http.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as answer:
        if answer.status != 200:
            await asyncio.sleep(0.2)
            return 0.0
        await answer.content.readany()
        took = time.monotonic() - began
        await answer.read()
        return took


async def ttft_in_a_flood(cluster: Served) -> float:
    """Return the other tenant's median TTFT while the flooder floods."""
    url = f"{cluster.url}/v1/chat/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def flood(number: int) -> None:
            for turn in range(10_000):
                await ask(http, url, "flood-key", f"{number} {turn} " + "flood " * 150)

        await ask(http, url, "other-key", "first")
        floods = [asyncio.create_task(flood(number)) for number in range(FLOOD)]
        await asyncio.sleep(1.0)
        took = [await ask(http, url, "other-key", f"{number} " + "word " * 50) for number in range(ASKED)]
        for each in floods:
            each.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
    assert all(took)
    return median(took)


@pytest.mark.slow
def test_a_flood_is_in_the_way_of_another_tenant_less_with_shares(tmp_path: Path) -> None:
    config = tmp_path / "tenants.yaml"
    config.write_text(CONFIG)
    found: dict[str, float] = {}
    for name, more in (("off", ()), ("on", ("--set", "router.queue.shares={flooder: 1, other: 1}"))):
        with served(tmp_path, "up", str(config), *more, "--frontend.port", str(free_port())) as cluster:
            found[name] = asyncio.run(ttft_in_a_flood(cluster))
            run = tmp_path / cluster.run
    print(f"TTFT in the flood: {found['off'] * 1e3:.0f} ms, with shares {found['on'] * 1e3:.0f} ms")
    assert found["on"] < 0.5 * found["off"]
    command = [sys.executable, "-m", "penstock", "usage", "--run", str(run), "--csv", str(tmp_path / "usage.csv")]
    subprocess.run(command, check=True, capture_output=True)
    with (tmp_path / "usage.csv").open() as file:
        rows = {row["tenant"]: row for row in csv.DictReader(file)}
    assert int(rows["other"]["ok"]) == ASKED + 1 and int(rows["flooder"]["requests"]) > FLOOD / 2
    text = "".join(path.read_text(errors="replace") for path in run.rglob("*") if path.is_file())
    assert "flood-key" not in text
