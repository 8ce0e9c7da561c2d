"""LoRA adapters of the simulated engine, over HTTP: vLLM's routes and words, and a memory of so many."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from penstock.adapters.engines.describe import describe, listed_adapters
from penstock.kernel.values import WorkerId
from penstock_lab.engine.settings import SimSettings
from penstock_lab.sim.sim_server import RunningServer, start


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    running = await start(SimSettings(kv_blocks=64, adapter_load=0.01), max_cpu_loras=2, kv_events=False)
    yield running
    await running.stop()


async def said(server: RunningServer, path: str, **body: object) -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.post(server.url + path, json=body) as answer:
        return answer.status, await answer.text()


async def load(server: RunningServer, name: str, path: str = "owner/adapter") -> tuple[int, str]:
    return await said(server, "/v1/load_lora_adapter", lora_name=name, lora_path=path)


async def asked(server: RunningServer, name: str) -> int:
    return (await said(server, "/v1/completions", model=name, prompt="hello", max_tokens=2))[0]


async def test_an_adapter_is_served_from_its_load_to_its_unload(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert await asked(server, "sql") == 404
    assert await load(server, "sql", str(tmp_path)) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert await asked(server, "sql") == 200
    async with aiohttp.ClientSession() as http:
        assert await listed_adapters(http, server.url, "sim") == ("sql",)
        card = await describe(http, server.url, worker=WorkerId("w"), epoch=1)
    assert (card.adapters, card.adapter_slots) == (("sql",), 2)
    status, text = await load(server, "sql")
    assert status == 400 and "has already been loaded" in text
    assert (await said(server, "/v1/unload_lora_adapter", lora_name="sql"))[0] == 200
    assert await asked(server, "sql") == 404
    assert (await said(server, "/v1/unload_lora_adapter", lora_name="sql"))[0] == 404


async def test_what_is_pushed_out_of_memory_is_read_again(server: RunningServer) -> None:
    for name in ("a", "b", "c"):
        assert (await load(server, name))[0] == 200
    assert server.server.adapters.loads == 3 and server.server.adapters.most == 3
    assert await asked(server, "c") == 200 and server.server.adapters.loads == 3
    assert await asked(server, "a") == 200 and server.server.adapters.loads == 4


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"lora_name": "x"}, 400),
        ({"lora_name": "sim", "lora_path": "/x"}, 400),
    ],
)
async def test_a_load_that_makes_no_sense_is_refused(server: RunningServer, body: dict[str, str], status: int) -> None:
    assert (await said(server, "/v1/load_lora_adapter", **body))[0] == status


@pytest.mark.parametrize(
    "path", ["/nowhere/x", "./x", "~/x", "~nobody-here/x", "x", "empty", "here/x", "s3://bucket/x"]
)
async def test_a_folder_without_an_adapter_is_refused_as_vllm_refuses_it(
    server: RunningServer, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("empty", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    status, text = await load(server, "x", path)
    message = f"Loading lora x failed: No adapter found for {path}"
    error = {"message": message, "type": "NotFoundError", "param": None, "code": 404}
    assert (status, json.loads(text)) == (404, {"error": error})
    assert await asked(server, "x") == 404


async def test_without_room_for_adapters_there_is_no_route() -> None:
    running = await start(SimSettings(kv_blocks=64), adapters=("fixed",), kv_events=False)
    try:
        assert (await load(running, "x"))[0] in (404, 405)
        assert await asked(running, "fixed") == 200
    finally:
        await running.stop()
