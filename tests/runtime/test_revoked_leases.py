"""Does a key that an operator took away become a wish to drain what it stood for, also after the store was away?"""

import asyncio

import pytest

from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.runtime.cluster_state import membership
from penstock.runtime.cluster_state.desired_state import DRAINS, DrainSpec, decode_all
from penstock.runtime.cluster_state.membership import REVOKED, RevokedLeases, drained_by


def test_workers_and_frontends_can_be_drained_and_nothing_else() -> None:
    assert drained_by("workers/main-0") == "main-0"
    assert drained_by("frontends/frontend-1-4711") == "frontend-1"
    assert [drained_by(key) for key in ("pools/main", "seen/frontend-0-1", "supervisor", "frontends/x")] == [None] * 4


async def test_each_revoked_key_is_one_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RETRY", 0.01)
    space = MemorySpace()
    store = MemoryStore(space)
    space.outage = "the test took it away"
    revoked = RevokedLeases()
    for key in ("workers/main-0", "pools/main", "frontends/frontend-0-12"):
        revoked.add(key)
    task = asyncio.create_task(revoked.run(store))
    try:
        await asyncio.sleep(0.05)
        space.outage = None
        async with asyncio.timeout(10):
            while len(wishes := decode_all(DrainSpec, await store.list(DRAINS), DRAINS)) < 2:
                await asyncio.sleep(0.005)
        assert {name: wish.by for name, wish in wishes.items()} == {"main-0": REVOKED, "frontend-0": REVOKED}
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
