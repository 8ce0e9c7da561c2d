"""How does a test wait until a frontend has heard all that a server announced?"""

from typing import Any

from tests.live.cluster import Served
from tests.vllm.truth import Truth
from tests.vllm.waiting import eventually


def worker_status(front: Served, worker: str) -> dict[str, Any]:
    """Return what the frontend says of one worker."""
    status, found = front.get("/admin/status")
    assert status == 200, found
    return next(entry for entry in found["workers"] if entry["id"] == worker)


async def all_heard(front: Served, truths: dict[str, Truth]) -> None:
    """Wait until the frontend has applied every event that the servers announced.

    A server may announce its last events a moment after its last answer, so they are asked for until both agree.
    """
    for worker, truth in truths.items():

        def applied(worker: str = worker) -> int:
            return int(worker_status(front, worker)["kv_events"]["applied"])

        await eventually(
            lambda: applied() == truth.catch_up().total,  # noqa: B023 - it is awaited before the next turn
            story=lambda: f"{worker}: {applied()} of {truth.total} events",  # noqa: B023
        )
