"""SGLang servers that `penstock serve` and its planner start: exact from their first event, and started again.

The model is made larger, with whatever weights, and a server takes two sequences at a time: so a few requests per
second are too many for one, and neither clients nor frontend need much of the machine.
"""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, served
from tests.live.ramp import Load, rise
from tests.live.test_operate import penstock
from tests.sglang.fronts import errors
from tests.sglang.server import CPU_FLAGS, MODEL, PAGE, START_LIMIT
from tests.sglang.setup.install import SERVER_ENV, STAND_INS
from tests.vllm.asking import ask, asking, completion
from tests.vllm.attached.heard import worker_status
from tests.vllm.waiting import comes_back, eventually

LARGER = ("--json-model-override-args", '{"num_hidden_layers": 12}', "--load-format", "dummy")
SLOW = (*CPU_FLAGS, *LARGER, "--max-running-requests", "2")
PLANNED = {
    "enabled": "true",
    "load_interval": "1s",
    "throughput_interval": "10s",
    "slo.hold": "5s",
    "start.assumed": "30s",
    "start.deadline": f"{START_LIMIT:g}s",
    "budget.max_gpus": "2",
}
PROMPT, ANSWER = 64, 64
"""Tokens of a request of the ramp."""


@pytest.fixture(scope="module")
def cluster(venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = ["serve", str(checkpoint), "--engine", "sglang", "--replicas", "1", "--served-name", MODEL]
    words += ["--command", str(venv / "bin" / "python"), "--block_size", str(PAGE), f"--args={','.join(SLOW)}"]
    words += ["--frontend.port", str(free_port()), "--supervise.start_timeout", str(START_LIMIT)]
    words += ["--canary.idle", "0", "--slo.ttft", "2s", "--slo.itl", "1s"]
    words += [word for name, value in PLANNED.items() for word in ("--set", f"planner.{name}={value}")]
    path = os.pathsep.join(filter(None, (str(STAND_INS), os.environ.get("PYTHONPATH"))))
    env = {**SERVER_ENV, "PYTHONPATH": path}
    with served(tmp_path_factory.mktemp("serve"), *words, env=env, start_limit=START_LIMIT) as found:
        yield found


def body(number: int, turn: int) -> dict[str, Any]:
    return completion([(7 * number + 13 * turn + place) % 1000 + 300 for place in range(PROMPT)], ANSWER)


def story(cluster: Served) -> str:
    return penstock(cluster, "explain", "scale", "--limit", "200") + cluster.text


def test_the_planner_starts_a_second_one_under_load_and_no_request_fails(cluster: Served) -> None:
    """It learns from the answers alone: SGLang tells nothing of its passes."""
    load = Load(cluster.url, body)
    try:
        rise(cluster, load, START_LIMIT, lambda: story(cluster))
        penstock(cluster, "set", "planner.budget.min_replicas=2")  # for the tests that follow
    finally:
        load.end()
    assert set(load.ends) == {"[DONE]"} and len(load.ends) > 70
    assert "1 -> 2" in story(cluster)
    counts = cluster.get("/admin/status")[1]["requests"]
    assert counts["failed"] == counts["rejected"] == 0


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
