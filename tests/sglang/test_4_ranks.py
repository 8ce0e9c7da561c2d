"""One SGLang server of two data-parallel ranks that schedules by priority, told nothing but its URL."""

import pytest

from tests.live.cluster import Served
from tests.sglang.fronts import errors, exact
from tests.sglang.server import PAGE, RANKED, TOKENS, SglangServer
from tests.vllm.attached.heard import worker_status
from tests.vllm.load import Prompts
from tests.vllm.overtaking import LATE, overtaken
from tests.vllm.truth import Truth

SERVERS = ((*RANKED, "--enable-priority-scheduling"),)
WORKER = "attached-0"


@pytest.fixture(scope="module")
def truths(servers: tuple[SglangServer]) -> dict[str, Truth]:
    return {WORKER: Truth(servers[0].rank(0)), f"{WORKER}/1": Truth(servers[0].rank(1))}


async def test_both_ranks_are_heard_and_known_exactly(front: Served, truths: dict[str, Truth]) -> None:
    assert await exact(front, truths, Prompts(9), 50) > 1_500
    assert all(truth.events["BlockStored"] > 10 for truth in truths.values()), "both ranks were asked"
    row = worker_status(front, WORKER)
    assert (row["index"], row["kv_events"]["lost"], row["kv_blocks"]) == ("exact", 0, 2 * TOKENS // PAGE)
    assert row["resident_blocks"] == sum(len(truth.held) for truth in truths.values())


def test_doctor_finds_no_error(front: Served) -> None:
    assert errors(front) == []


async def test_the_more_urgent_request_goes_first(servers: tuple[SglangServer], front: Served) -> None:
    """The server says itself that it schedules by priority; those that name none are not last of all."""
    pin = {"x-penstock-worker": WORKER, "x-penstock-dp-rank": "0"}

    async def behind(late: int | None, urgent: int | None) -> int:
        fields = [{} if said is None else {"nvext": {"agent_hints": {"priority": said}}} for said in (late, urgent)]
        # It tells both in all, and by priority.
        told = {"running": "sglang:num_running_reqs", "waits": "sglang:num_queue_reqs", "times": 2}
        return await overtaken(front.url, servers[0].url, pin, *fields, places=2, output=1500, **told)

    assert await behind(-3, 4) >= LATE // 2
    assert await behind(-3, None) >= LATE // 2
