"""Is an engine that hangs taken out before a request needs it? Its health route answers; a token does not come."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.live.cluster import Served, request
from tests.servers import children_of
from tests.vllm.asking import ask, asking, completion
from tests.vllm.children.conftest import WORKERS
from tests.vllm.waiting import eventually

VICTIM, OTHER = WORKERS


def row(cluster: Served, worker: str) -> dict[str, Any]:
    return next(w for w in cluster.get("/admin/status")[1]["workers"] if w["id"] == worker)


async def test_an_idle_engine_is_asked_for_a_token(cluster: Served) -> None:
    await eventually(lambda: all(row(cluster, w)["canary"]["sent"] > 0 for w in WORKERS))
    await eventually(lambda: all(row(cluster, w)["canary"]["verdict"] == "alive" for w in WORKERS))


async def test_an_engine_that_hangs_is_cordoned_until_it_goes_on(cluster: Served) -> None:
    """Its API server lives and says that all is well; the process that computes is stopped."""
    worker = row(cluster, VICTIM)
    core = engine_core(worker["pid"])
    os.kill(core, signal.SIGSTOP)
    try:
        assert request(f"{worker['url']}/health")[0] == 200
        await eventually(lambda: row(cluster, VICTIM)["state"] == "cordoned", 60.0, lambda: row(cluster, VICTIM))
        async with asking() as http:
            answers = [await ask(http, cluster.url, completion(f"Question {i}", 2)) for i in range(6)]
        assert [(a.status, a.worker) for a in answers] == [(200, OTHER)] * 6
    finally:
        os.kill(core, signal.SIGCONT)
    await eventually(lambda: row(cluster, VICTIM)["state"] == "ready", 60.0, lambda: row(cluster, VICTIM))
    async with asking() as http:
        answer = await ask(http, cluster.url, completion("Again", 2), headers={"x-penstock-worker": VICTIM})
    assert answer.status == 200


def engine_core(server: int) -> int:
    """Return the pid of a vLLM server's scheduler."""
    children = children_of(server)
    found = [pid for pid in children if b"EngineCor" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1, children
    return found[0]
