"""Does a frontend process, as the supervisor starts it, serve simulated engines and end in order?"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from penstock.adapters.engines.describe import describe
from penstock.adapters.listen_address import free_port
from penstock.adapters.stores.sqlite_store import SqliteStore
from penstock.config.reading.load import load, resolved_yaml
from penstock.kernel.hashing import SCHEME
from penstock.kernel.values import WorkerId
from penstock.runtime.cluster_state.membership import MembershipEntry, key_of
from penstock.runtime.records.run_folder import RunFolder
from penstock_lab.engine.settings import SimSettings
from penstock_lab.sim.sim_server import RunningServer, start

pytestmark = pytest.mark.live


class Process:
    def __init__(self, process: asyncio.subprocess.Process, said: dict[str, Any]) -> None:
        self.process = process
        self.url: str = said["url"]
        self.admin_url: str = said["admin_url"]

    async def stop(self) -> int:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            return await self.process.wait()


@asynccontextmanager
async def cluster(tmp_path: Path, *overrides: str, frontends: int = 1) -> AsyncIterator[tuple[list[Process], Path]]:
    """Two simulated engines, a run folder, and frontend processes over it."""
    settings = load(None, [f"frontend.processes={frontends}", *overrides]).settings
    folder = RunFolder.create(tmp_path, "test", config=resolved_yaml(settings))
    store = SqliteStore(folder.path / "discovery")
    engines: list[RunningServer] = []
    processes: list[Process] = []
    try:
        async with aiohttp.ClientSession() as http:
            for number in range(2):
                engine = await start(SimSettings(), model="sim")
                engines.append(engine)
                worker = WorkerId(f"main-{number}")
                known = {"hash_scheme": SCHEME}
                card = await describe(http, engine.url, worker=worker, epoch=1, model="sim", overrides=known)
                await store.put(key_of(worker), msgspec.json.encode(MembershipEntry(card=card)), ttl=60.0)
        for index in range(frontends):
            arguments = ("-m", "penstock.frontend.frontend_process", "--run", str(folder.path), "--index", str(index))
            log = (folder.path / "logs" / f"frontend-{index}.log").open("wb")
            process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=log, env=dict(os.environ)
            )
            log.close()
            assert process.stdout is not None
            async with asyncio.timeout(30):
                line = await process.stdout.readline()
            assert line, (folder.path / "logs" / f"frontend-{index}.log").read_text()
            processes.append(Process(process, json.loads(line)))
        yield processes, folder.path
    finally:
        for process in processes:
            await process.stop()
        for engine in engines:
            await engine.stop()
        await store.close()


async def until_ready(http: aiohttp.ClientSession, url: str, workers: int = 2) -> None:
    async with asyncio.timeout(15):
        while True:
            async with http.get(f"{url}/health") as answer:
                if (await answer.json())["models"].get("sim") == workers:
                    return
            await asyncio.sleep(0.05)


async def test_process_serves_by_cache_writes_its_records_and_drains(tmp_path: Path) -> None:
    async with cluster(tmp_path, "frontend.port=0") as ((frontend,), run), aiohttp.ClientSession(frontend.url) as http:
        await until_ready(http, frontend.url)
        chat = {"model": "sim", "messages": [{"role": "user", "content": "word " * 600}], "max_tokens": 4}
        workers, cached = [], []
        for _ in range(4):
            async with http.post("/v1/chat/completions", json=chat) as answer:
                assert answer.status == 200
                workers.append(answer.headers["x-penstock-worker"])
                cached.append((await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert len(set(workers)) == 1 and cached[0] == 0 and cached[-1] > 500
        expected = int(answer.headers["x-penstock-expected-cached-tokens"])
        assert expected == cached[-1]
        # Asked to stop in the middle of a stream: the stream ends whole.
        stream = {**chat, "stream": True, "max_tokens": 60}
        async with http.post("/v1/chat/completions", json=stream) as answer:
            await answer.content.readany()
            frontend.process.send_signal(signal.SIGTERM)
            body = await answer.read()
        assert body.endswith(b"data: [DONE]\n\n")
        assert await frontend.stop() == 0
        records = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
        assert [record["outcome"] for record in records] == ["ok"] * 5
        assert records[0]["arrival"] > 0 and records[-1]["osl"] == 60
        assert len((run / "decisions.jsonl").read_text().splitlines()) == 5
        assert "Traceback" not in (run / "logs" / "frontend-0.log").read_text()


async def test_a_response_is_had_from_any_process_and_outlives_the_one_that_made_it(tmp_path: Path) -> None:
    port = free_port()
    async with cluster(tmp_path, f"frontend.port={port}", frontends=2) as (processes, _):
        url = f"http://127.0.0.1:{port}/v1/responses"

        async def ask(method: str, path: str = "", **body: Any) -> tuple[int, Any]:
            """Ask on a connection of its own, which either process may get."""
            async with aiohttp.ClientSession() as http, http.request(method, url + path, json=body or None) as answer:
                return answer.status, await answer.json()

        async with aiohttp.ClientSession() as http:
            for process in processes:
                await until_ready(http, process.admin_url)
        made = [(await ask("POST", model="sim", input=f"count {n}", max_output_tokens=4))[1] for n in range(12)]
        for first in made:
            status, got = await ask("GET", f"/{first['id']}")
            assert (status, got) == (200, first)
            more = {"model": "sim", "input": "on", "max_output_tokens": 4, "previous_response_id": first["id"]}
            status, second = await ask("POST", **more)
            assert status == 200 and second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert (await ask("DELETE", f"/{made[0]['id']}"))[0] == 200
        assert [(await ask("GET", f"/{made[0]['id']}"))[0] for _ in range(6)] == [404] * 6
        for _ in range(4):
            slow = (await ask("POST", model="sim", input="x", max_output_tokens=8000, background=True))[1]
            assert (await ask("POST", f"/{slow['id']}/cancel"))[1]["status"] == "cancelled"
            assert (await ask("GET", f"/{slow['id']}"))[1]["status"] == "cancelled"
        assert await processes[0].stop() == 0
        assert all([(await ask("GET", f"/{first['id']}"))[1] == first for first in made[1:]])


async def test_two_processes_share_a_port_and_add_up(tmp_path: Path) -> None:
    port = free_port()
    async with (
        cluster(tmp_path, f"frontend.port={port}", frontends=2) as (processes, _),
        aiohttp.ClientSession() as http,
    ):
        url = processes[0].url
        assert url == processes[1].url == f"http://127.0.0.1:{port}"
        assert len({process.admin_url for process in processes} | {url}) == 3
        for process in processes:
            await until_ready(http, process.admin_url)
        ids = []
        for number in range(24):
            body = {"model": "sim", "prompt": f"prompt {number}", "max_tokens": 2}
            # A connection each, so that both processes get some.
            async with aiohttp.ClientSession() as fresh, fresh.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200
                ids.append(answer.headers["x-penstock-request-id"])
        async with asyncio.timeout(10):
            while True:  # until both have seen each other
                async with http.get(f"{url}/admin/status") as answer:
                    found = await answer.json()
                if found["requests"]["ok"] == 24:
                    break
                await asyncio.sleep(0.1)
        alone = []
        for process in processes:
            async with http.get(f"{process.admin_url}/admin/status?scope=process") as answer:
                alone.append((await answer.json())["requests"]["ok"])
        assert sum(alone) == 24
        async with http.get(f"{url}/metrics") as answer:
            text = await answer.text()
        name = 'dynamo_frontend_requests_total{endpoint="completions",error_type="",model="sim"'
        assert f'{name},request_type="unary",status="success"}} 24\n' in text
        assert 'dynamo_frontend_model_kv_cache_block_size{model="sim"} 64\n' in text
        for request in (ids[0], ids[-1]):
            async with http.get(f"{url}/admin/explain/{request}") as answer:
                assert answer.status == 200 and (await answer.json())["request"]["id"] == request
        async with http.get(f"{url}/admin/requests?limit=24") as answer:
            listed = [entry["id"] for entry in (await answer.json())["requests"]]
        assert listed == ids[::-1]
        assert [await process.stop() for process in processes] == [0, 0]


async def test_bad_start_says_why_and_ends_with_2(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "test", config=resolved_yaml(load(None, []).settings))
    for config, said in (
        ("models: {m: {tokenizer: /nothing/here, pools: {main: {}}}}", "tokenizer"),
        ("frontend: {host: 0.0.0.0}", "API key"),
        ("frontend: {port: 1, hosst: x}", "hosst"),
    ):
        (folder.path / "config.yaml").write_text(config)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.frontend.frontend_process", "--run", str(folder.path)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(30):
            out, err = await process.communicate()
        assert process.returncode == 2 and out == b"" and said in err.decode(), err.decode()
        assert "Traceback" not in err.decode()
