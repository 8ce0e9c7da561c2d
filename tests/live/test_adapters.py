"""LoRA adapters in a real cluster: two frontends, two simulated engines of three adapters each, forty adapters."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from penstock.adapters.listen_address import free_port
from penstock.cli.status import adapter_line
from penstock.frontend.admin.admin_answers import WantedAdapter
from tests.live.cluster import Served, post, request, served, until

HELD = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(40):
        (folder / f"lora-{number}").mkdir()
        (folder / f"lora-{number}" / "adapter_config.json").write_text("{}")
    arguments = ["serve", "sim", "--replicas", "2", "--adapters", str(folder), "--max_cpu_loras", str(HELD)]
    arguments += ["--sim.adapter_load", "0.05", "--frontend.port", str(free_port()), "--frontend.processes", "2"]
    with served(tmp_path_factory.mktemp("run"), *arguments) as cluster:
        yield cluster


def urls(cluster: Served) -> dict[str, str]:
    return {worker["id"]: worker["url"] for worker in cluster.get("/admin/status")[1]["workers"]}


def loaded(url: str) -> set[str]:
    return {entry["id"] for entry in request(f"{url}/v1/models")[1]["data"] if entry["parent"]}


async def test_forty_adapters_pass_through_room_for_six(cluster: Served) -> None:
    async def one(http: aiohttp.ClientSession, number: int) -> int:
        body = {"model": f"lora-{number * 7 % 40}", "prompt": f"prompt {number}", "max_tokens": 4}
        async with http.post(f"{cluster.url}/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as http:
        for start in range(0, 120, 24):
            statuses = await asyncio.gather(*(one(http, number) for number in range(start, start + 24)))
            assert set(statuses) == {200}
    text = request(f"{cluster.url}/metrics")[1]
    counts = {
        line.split('event="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("penstock_adapter_events_total")
    }
    assert counts["load"] >= 8 and counts["unload"] > 0 and counts["failed"] == 0
    assert counts["hit"] + counts["wait"] + counts["load"] == 120
    held = {worker: loaded(url) for worker, url in urls(cluster).items()}
    # Each frontend keeps the limit by itself; both may place on one worker at the same moment.
    assert all(len(names) <= 2 * HELD for names in held.values()) and all(held.values())


def test_what_one_frontend_is_told_every_frontend_knows(cluster: Served, tmp_path: Path) -> None:
    load, unload = f"{cluster.url}/v1/load_lora_adapter", f"{cluster.url}/v1/unload_lora_adapter"
    (tmp_path / "adapter_config.json").write_text("{}")
    status, state, _ = post(load, {"lora_name": "new", "lora_path": str(tmp_path)})
    assert status == 200 and len(state["workers"]) == 1
    known = 0
    for _ in range(200):  # connections go to either process; the other one hears of it through the store
        known = known + 1 if post(f"{cluster.url}/v1/completions", _body("new"))[0] == 200 else 0
        if known == 20:
            break
    assert known == 20
    status, gone, _ = post(unload, {"lora_name": "new"})
    assert status == 200 and set(state["workers"]) <= set(gone["workers"]) | set(urls(cluster))
    unknown = 0
    for _ in range(200):
        unknown = unknown + 1 if post(f"{cluster.url}/v1/completions", _body("new"))[0] == 404 else 0
        if unknown == 20:
            break
    assert unknown == 20
    status, problem, _ = post(load, {"lora_name": "gone", "lora_path": "/not/there"})
    assert status == 404 and "/not/there" in problem["error"]["message"]


def test_an_adapter_is_on_as_many_workers_as_wanted_also_once_one_is_replaced(cluster: Served) -> None:
    status, state, _ = post(f"{cluster.url}/admin/adapters", {"name": "lora-5", "workers": 2})
    assert status == 200 and state["wanted"] == 2
    until(lambda: all("lora-5" in loaded(url) for url in urls(cluster).values()), 20)
    before = {worker["id"]: worker["pid"] for worker in cluster.get("/admin/status")[1]["workers"]}
    victim = sorted(before)[0]
    os.kill(before[victim], signal.SIGKILL)

    def replaced() -> bool:
        workers = {worker["id"]: worker["pid"] for worker in cluster.get("/admin/status")[1]["workers"]}
        return workers.get(victim) not in (None, before[victim])

    until(replaced, 30)
    until(lambda: victim in (found := urls(cluster)) and "lora-5" in loaded(found[victim]), 20)

    def shown() -> list[dict[str, object]]:
        found: list[dict[str, object]] = cluster.get("/admin/status")[1]["adapters"]
        return found

    def lines() -> list[str]:
        return [adapter_line(msgspec.convert(each, WantedAdapter)) for each in shown()]

    # Either frontend answers; the one that does not decide learns of the load from the engine, seconds later.
    whole = "lora-5 of sim: 2 workers wanted, 2 there (main-0, main-1)"
    until(lambda: all(line.replace("main-1, main-0", "main-0, main-1") == whole for line in lines()), 20)
    for number in range(12):  # others pass by, and it stays
        assert post(f"{cluster.url}/v1/completions", _body(f"lora-{number + 10}"))[0] == 200
    assert all("lora-5" in loaded(url) for url in urls(cluster).values())
    scale = [sys.executable, "-m", "penstock", "adapter", "scale", "lora-5", "settings", "--url", cluster.url]
    done = subprocess.run(scale, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("adapter lora-5 of sim: 0 workers wanted"), done.stdout
    until(lambda: not any("lora-5" in loaded(url) for url in urls(cluster).values()), 20)
    until(lambda: not any(shown() for _ in range(8)), 20)


def test_a_decision_says_what_was_done_about_the_adapter(cluster: Served) -> None:
    status, _, headers = post(f"{cluster.url}/v1/completions", _body("lora-7"))
    assert status == 200
    status, found = cluster.get(f"/admin/explain/{headers['x-request-id']}")
    assert status == 200
    decision = found["decisions"][-1]
    assert decision["adapter"].startswith("adapter lora-7 is ")
    assert all("adapter" in cost for cost in decision["candidates"]), json.dumps(decision)


def _body(model: str) -> dict[str, object]:
    return {"model": model, "prompt": "hello", "max_tokens": 2}
