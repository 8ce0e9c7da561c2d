"""Contract suite of a `Connector`: what its users rely on, whichever adapter it is.

A test module imports all names and has a fixture ``connectors``, a `ConnectorHarness` over the connector under test:

    from penstock.testing.connector_contract import *
"""

import asyncio
from typing import Protocol

import pytest

from penstock.adapters.seams import Connector, ConnectorError
from penstock.kernel.values import Pool, Replica


class ConnectorHarness(Protocol):
    """A connector with a pool ``main`` of 2, and a way to make a replica fail."""

    connector: Connector

    async def crash(self, replica: Replica) -> None:
        """End a replica by force."""
        ...

    async def close(self) -> None:
        """End everything."""
        ...


async def settled(harness: ConnectorHarness, ready: int) -> Pool:
    """Wait until a pool has what is wanted of it; return it."""
    async with asyncio.timeout(30):
        async for pools in harness.connector.watch():
            found = pools["main"]
            if found.settled and found.ready == ready:
                return found
    raise AssertionError("the watch ended")


def ids(pool: Pool) -> set[str]:
    return set(pool.ids)


def processes(pool: Pool) -> set[tuple[str, int | None]]:
    return {(replica.id, replica.pid) for replica in pool.replicas or ()}


async def test_a_pool_starts_as_it_was_configured(connectors: ConnectorHarness) -> None:
    found = await settled(connectors, 2)
    assert found.desired == 2 and len(ids(found)) == 2


async def test_more_are_added_and_those_that_serve_stay(connectors: ConnectorHarness) -> None:
    before = await settled(connectors, 2)
    await connectors.connector.scale("main", 4)
    after = await settled(connectors, 4)
    assert ids(before) < ids(after)
    assert processes(before) <= processes(after)


async def test_fewer_means_that_some_of_those_there_go(connectors: ConnectorHarness) -> None:
    await connectors.connector.scale("main", 3)
    before = await settled(connectors, 3)
    await connectors.connector.scale("main", 1)
    assert ids(await settled(connectors, 1)) < ids(before)


async def test_a_pool_can_be_emptied_and_filled_again(connectors: ConnectorHarness) -> None:
    await settled(connectors, 2)
    await connectors.connector.scale("main", 0)
    assert not ids(await settled(connectors, 0))
    await connectors.connector.scale("main", 2)
    await settled(connectors, 2)


async def test_the_newest_decision_counts(connectors: ConnectorHarness) -> None:
    for replicas in (5, 0, 1, 4, 3):
        await connectors.connector.scale("main", replicas)
    found = await settled(connectors, 3)
    assert found.desired == 3


async def test_saying_it_again_changes_nothing(connectors: ConnectorHarness) -> None:
    before = await settled(connectors, 2)
    await connectors.connector.scale("main", 2)
    await connectors.connector.scale("main", 2)
    assert processes(await settled(connectors, 2)) == processes(before)


async def test_one_that_is_named_goes_and_is_not_counted(connectors: ConnectorHarness) -> None:
    await connectors.connector.scale("main", 3)
    named = sorted(ids(await settled(connectors, 3)))[1]
    await connectors.connector.scale("main", 2, without=[named])
    assert named not in ids(await settled(connectors, 2))
    await connectors.connector.scale("main", 3, without=[named])
    assert named not in ids(await settled(connectors, 3)), "it stays away while it is named"


async def test_a_replica_that_fails_is_replaced(connectors: ConnectorHarness) -> None:
    before = await settled(connectors, 2)
    crashed = (before.replicas or ())[0]
    await connectors.crash(crashed)
    async with asyncio.timeout(30):
        async for pools in connectors.connector.watch():
            found = pools["main"]
            if found.settled and crashed not in (found.replicas or ()):
                break
    assert found.ready == 2


@pytest.mark.parametrize(("pool", "replicas"), [("none", 1), ("main", -1), ("main", 1_000_000)])
async def test_what_can_not_be_is_refused_and_changes_nothing(
    connectors: ConnectorHarness, pool: str, replicas: int
) -> None:
    await settled(connectors, 2)
    with pytest.raises(ConnectorError, match=pool):
        await connectors.connector.scale(pool, replicas)
    assert (await settled(connectors, 2)).desired == 2


async def test_nothing_moves_after_a_close(connectors: ConnectorHarness) -> None:
    await settled(connectors, 2)
    await connectors.connector.close()
    await connectors.connector.close()
