"""What may users of a `Connector` rely on, whichever adapter it is?"""

import asyncio

import pytest

from penstock.adapters.seams import ConnectorError
from penstock.kernel.values import Pool


async def settled(harness, ready: int) -> Pool:
    """Wait until a pool has what is wanted of it; return it."""
    async with asyncio.timeout(30):
        async for pools in harness.connector.watch():
            found = pools["main"]
            if found.settled and found.ready == ready:
                return found
    raise AssertionError("the watch ended")


def ids(found: Pool) -> set[str]:
    return set(found.ids)


async def test_a_pool_starts_as_it_was_configured(connectors):
    found = await settled(connectors, 2)
    assert found.desired == 2 and len(ids(found)) == 2


async def test_more_are_added_and_those_that_serve_stay(connectors):
    before = await settled(connectors, 2)
    await connectors.connector.scale("main", 4)
    after = await settled(connectors, 4)
    assert ids(before) < ids(after)
    assert {r.pid for r in before.replicas} <= {r.pid for r in after.replicas}


async def test_fewer_means_that_some_of_those_there_go(connectors):
    await connectors.connector.scale("main", 3)
    before = await settled(connectors, 3)
    await connectors.connector.scale("main", 1)
    assert ids(await settled(connectors, 1)) < ids(before)


async def test_a_pool_can_be_emptied_and_filled_again(connectors):
    await settled(connectors, 2)
    await connectors.connector.scale("main", 0)
    assert not ids(await settled(connectors, 0))
    await connectors.connector.scale("main", 2)
    await settled(connectors, 2)


async def test_the_newest_word_counts(connectors):
    for replicas in (5, 0, 1, 4, 3):
        await connectors.connector.scale("main", replicas)
    found = await settled(connectors, 3)
    assert found.desired == 3


async def test_saying_it_again_changes_nothing(connectors):
    before = await settled(connectors, 2)
    await connectors.connector.scale("main", 2)
    await connectors.connector.scale("main", 2)
    assert {(r.id, r.pid) for r in (await settled(connectors, 2)).replicas} == {(r.id, r.pid) for r in before.replicas}


async def test_one_that_is_named_goes_and_is_not_counted(connectors):
    await connectors.connector.scale("main", 3)
    named = sorted(ids(await settled(connectors, 3)))[1]
    await connectors.connector.scale("main", 2, without=[named])
    assert named not in ids(await settled(connectors, 2))
    await connectors.connector.scale("main", 3, without=[named])
    assert named not in ids(await settled(connectors, 3)), "it stays away while it is named"


async def test_a_replica_that_fails_is_replaced(connectors):
    before = await settled(connectors, 2)
    await connectors.crash(before.replicas[0])
    async with asyncio.timeout(30):
        async for pools in connectors.connector.watch():
            found = pools["main"]
            if found.settled and before.replicas[0] not in found.replicas:
                break
    assert found.ready == 2


@pytest.mark.parametrize(("pool", "replicas"), [("none", 1), ("main", -1), ("main", 1_000_000)])
async def test_what_can_not_be_is_refused_and_changes_nothing(connectors, pool, replicas):
    await settled(connectors, 2)
    with pytest.raises(ConnectorError, match=pool):
        await connectors.connector.scale(pool, replicas)
    assert (await settled(connectors, 2)).desired == 2


async def test_nothing_moves_after_a_close(connectors):
    await settled(connectors, 2)
    await connectors.connector.close()
    await connectors.connector.close()
