"""Two SGLang servers that `penstock serve` starts by itself: exact from their first event, and started again."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.adapters.engine_ports import free_port
from tests.live.cluster import Served, served
from tests.sglang.fronts import errors
from tests.sglang.server import CPU_FLAGS, MODEL, PAGE, START_LIMIT
from tests.sglang.setup.install import SERVER_ENV, STAND_INS
from tests.vllm.asking import ask, asking, completion
from tests.vllm.attached.heard import worker_status
from tests.vllm.waiting import comes_back, eventually


@pytest.fixture(scope="module")
def cluster(venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = ["serve", str(checkpoint), "--engine", "sglang", "--replicas", "2", "--served-name", MODEL]
    words += ["--command", str(venv / "bin" / "python"), "--block_size", str(PAGE), f"--args={','.join(CPU_FLAGS)}"]
    words += ["--frontend.port", str(free_port()), "--supervise.start_timeout", str(START_LIMIT)]
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
