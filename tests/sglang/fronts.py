"""How do the tests put Penstock before real servers, and wait until it has heard what they announced?"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.adapters.listen_address import free_port
from penstock.kernel.hashing import block_hashes
from tests.live.cluster import Served, served, until
from tests.sglang.server import PAGE, SglangServer
from tests.vllm.asking import Answer, ask, asking, completion
from tests.vllm.attached.heard import worker_status
from tests.vllm.load import Prompts
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


async def heard(front: Served, truths: Mapping[str, Truth], target: str, prompt: Sequence[int]) -> None:
    """Wait until an engine has announced all blocks of a prompt that it answered, and the frontend has applied them.

    Args:
        truths: by worker, or by worker and rank.
    """
    blocks, worker = block_hashes(prompt, PAGE), target.partition("/")[0]
    ranks = [truth for name, truth in truths.items() if name.partition("/")[0] == worker]

    def applied() -> int:
        return int(worker_status(front, worker)["kv_events"]["applied"])

    def both() -> bool:
        announced = sum(truth.catch_up().total for truth in ranks)
        return truths[target].depth(blocks) == len(blocks) and applied() >= announced

    await eventually(both, story=lambda: f"{target}: {applied()} events, {truths[target].depth(blocks)} blocks")


async def announced(front: Served, truths: Mapping[str, Truth]) -> None:
    """Wait until the frontend has applied what engines announced so far; see `heard`."""
    for worker in {name.partition("/")[0] for name in truths}:
        ranks = [truth for name, truth in truths.items() if name.partition("/")[0] == worker]
        await eventually(
            lambda: (
                worker_status(front, worker)["kv_events"]["applied"]  # noqa: B023
                >= sum(truth.catch_up().total for truth in ranks)  # noqa: B023
            )
        )


async def exact(front: Served, truths: Mapping[str, Truth], prompts: Prompts, count: int) -> int:
    """Ask one after the other; each answer's cached tokens are those that were predicted. Return how many in all."""
    cached = 0
    async with asking() as http:
        for _ in range(count):
            prompt = prompts.next()
            answer = await ask(http, front.url, completion(prompt, prompts.output()))
            assert whole(answer), answer
            assert answer.cached == answer.expected, f"{answer.worker}: {len(prompt)} tokens"
            cached += answer.cached
            await heard(front, truths, answer.worker, prompt)
    return cached


def whole(answer: Answer) -> bool:
    """Return whether an answer came in full."""
    return answer.status == 200 and answer.error is None and answer.finish_reason is not None
