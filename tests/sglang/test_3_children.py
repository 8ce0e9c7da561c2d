"""Two SGLang servers that `penstock serve` starts by itself: exact from their first event, started again, planned for.

Their model is made larger, with whatever weights, and a server takes two sequences at a time: so a few requests per
second are too many for one, and neither clients nor frontend need much of the machine.
"""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.engine_ports import free_port
from tests.live.cluster import Served, served, until
from tests.live.ramp import Load, pool_of
from tests.live.test_operate import penstock
from tests.sglang.fronts import errors
from tests.sglang.server import CPU_FLAGS, MODEL, PAGE, START_LIMIT
from tests.sglang.setup.install import SERVER_ENV, STAND_INS
from tests.vllm.asking import ask, asking, completion
from tests.vllm.attached.heard import worker_status
from tests.vllm.waiting import comes_back, eventually

LARGER = ("--json-model-override-args", '{"num_hidden_layers": 24}', "--load-format", "dummy")
SLOW = (*CPU_FLAGS, *LARGER, "--max-running-requests", "2")
PLANNED = {
    "enabled": "true",
    "load_interval": "1s",
    "throughput_interval": "10s",
    "slo.hold": "5s",
    "start.assumed": "30s",
    "start.deadline": f"{START_LIMIT:g}s",
    "budget.max_gpus": "2",
    "budget.min_replicas": "2",
}
"""Settings of the planner, which may not take one of the two away before it is let."""
PROMPT, ANSWER = 64, 64
"""Tokens of a request of the ramp."""


@pytest.fixture(scope="module")
def cluster(venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = ["serve", str(checkpoint), "--engine", "sglang", "--replicas", "2", "--served-name", MODEL]
    words += ["--command", str(venv / "bin" / "python"), "--block_size", str(PAGE), f"--args={','.join(SLOW)}"]
    words += ["--frontend.port", str(free_port()), "--supervise.start_timeout", str(START_LIMIT)]
    words += ["--canary.idle", "0", "--slo.ttft", "2s", "--slo.itl", "1s"]
    words += [word for name, value in PLANNED.items() for word in ("--set", f"planner.{name}={value}")]
    path = os.pathsep.join(filter(None, (str(STAND_INS), os.environ.get("PYTHONPATH"))))
    env = {**SERVER_ENV, "PYTHONPATH": path}
    with served(tmp_path_factory.mktemp("serve"), *words, env=env, start_limit=START_LIMIT) as found:
        yield found


async def test_both_serve_and_are_known_exactly(cluster: Served) -> None:
    await eventually(lambda: len(cluster.get("/admin/status")[1]["workers"]) == 2, START_LIMIT)
    rng = random.Random(3)
    async with asking() as http:
        for worker in ("main-0", "main-1"):
            prompt = [rng.randrange(300, 2000) for _ in range(100)]
            before = worker_status(cluster, worker)["kv_events"]["applied"]
            first = await ask(http, cluster.url, completion(prompt, 2), headers={"x-penstock-worker": worker})
            await eventually(lambda: worker_status(cluster, worker)["kv_events"]["applied"] > before)  # noqa: B023
            again = await ask(http, cluster.url, completion(prompt, 2))
            assert (first.worker, again.worker, again.cached, again.expected) == (worker, worker, 96, 96)
            assert worker_status(cluster, worker)["index"] == "exact", "its warm-up came before we listened: replayed"
            assert worker_status(cluster, worker)["kv_events"]["lost"] == 0


def test_doctor_finds_no_error(cluster: Served) -> None:
    assert errors(cluster) == []


async def test_an_engine_that_is_killed_is_started_again(cluster: Served) -> None:
    row = worker_status(cluster, "main-1")
    os.kill(row["pid"], signal.SIGKILL)
    async with asking() as http:
        for turn in range(6):
            answer = await ask(http, cluster.url, completion(list(range(300 + turn, 340 + turn)), 4))
            assert answer.status == 200 and answer.worker == "main-0"
    back = await comes_back(cluster, "main-1", row["epoch"])
    assert back["pid"] != row["pid"]


def body(number: int, turn: int) -> dict[str, Any]:
    return completion([(7 * number + 13 * turn + place) % 1000 + 300 for place in range(PROMPT)], ANSWER)


def test_the_planner_takes_a_server_away_and_starts_one_again_and_no_request_fails(cluster: Served) -> None:
    """It learns from the answers alone: SGLang tells nothing of its passes."""

    def story() -> str:
        return penstock(cluster, "explain", "scale", "--limit", "50") + cluster.text

    failed = cluster.get("/admin/status")[1]["requests"]["failed"]
    load = Load(cluster.url, body)
    try:
        load.clients(1)
        until(lambda: len(load.ends) >= 10, 120.0, story)
        penstock(cluster, "set", "planner.budget.min_replicas=1")
        until(lambda: len(pool_of(cluster)["replicas"]) == 1, 240.0, story)
        load.clients(16)
        until(lambda: pool_of(cluster)["desired"] == 2, 240.0, story)
        load.clients(4)  # the start is to have some of the machine
        until(lambda: pool_of(cluster)["ready"] == 2, START_LIMIT, story)
        busy = len(load.ends)
        until(lambda: len(load.ends) >= busy + 20, 120.0, story)
    finally:
        load.end()
    assert set(load.ends) == {"[DONE]"}, load.ends
    assert cluster.get("/admin/status")[1]["requests"]["failed"] == failed
    told = penstock(cluster, "explain", "scale", "--limit", "200")
    assert "2 -> 1" in told and "1 -> 2" in told, told
    assert not any(each["cut"] for each in cluster.get("/admin/desired")[1]["drained"].values())
