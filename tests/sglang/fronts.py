"""How do the tests put Penstock before real servers, and wait until it has heard what they announced?"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.adapters.engine_ports import free_port
from penstock.kernel.hashing import block_hashes
from tests.live.cluster import Served, served, until
from tests.sglang.server import PAGE, SglangServer
from tests.vllm.asking import Answer
from tests.vllm.attached.heard import worker_status
from tests.vllm.truth import Truth
from tests.vllm.waiting import eventually


@contextmanager
def attached(servers: Sequence[SglangServer], folder: Path) -> Iterator[Served]:
    """Attach a frontend that is told nothing but the servers' URLs, and expects nothing but what it heard of them."""
    quiet = ("--canary.idle", "0", "--router.index.predicted_ttl", "0")
    urls = [server.url for server in servers]
    with served(folder, "attach", *urls, "--frontend.port", str(free_port()), *quiet) as cluster:
        until(lambda: len(cluster.get("/admin/status")[1]["workers"]) == len(urls), 30.0, lambda: cluster.text)
        yield cluster


def errors(front: Served) -> list[dict[str, Any]]:
    """Return what `penstock doctor` calls an error."""
    command = [sys.executable, "-m", "penstock", "doctor", "--url", front.url, "--json"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    found = json.loads(said.stdout)["findings"]
    assert any(finding["check"] == "cache" for finding in found), said.stdout
    return [finding for finding in found if finding["level"] == "error"]


async def heard(front: Served, worker: str, truth: Truth, prompt: Sequence[int]) -> None:
    """Wait until a worker has announced all blocks of a prompt that it answered, and the frontend has applied them."""
    blocks = block_hashes(prompt, PAGE)

    def applied() -> int:
        return int(worker_status(front, worker)["kv_events"]["applied"])

    def both() -> bool:
        return truth.catch_up().depth(blocks) == len(blocks) and applied() >= truth.total

    await eventually(both, story=lambda: f"{worker}: {applied()} of {truth.total} events, {truth.depth(blocks)} blocks")


def whole(answer: Answer) -> bool:
    """Return whether an answer came in full."""
    return answer.status == 200 and answer.error is None and answer.finish_reason is not None
