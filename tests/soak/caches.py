"""Does each frontend's index hold what the engines hold? Told by their own events, asked again from number 0."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from penstock.adapters.engines.kv_events.kv_subscriber import KvSubscriber
from penstock.adapters.stores.sqlite_store import SqliteStore
from penstock.config.cluster_secret_file import stored_secret
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import KvCleared, KvRemoved, KvStored, WorkerCard
from penstock.runtime.cluster_state.membership import WORKERS, MembershipEntry
from penstock.runtime.cluster_state.placement_sync import FRONTENDS, FrontendCard

PATIENCE = 30.0


async def disagreements(run: Path) -> tuple[int, list[str]]:
    """Compare, as a member of the cluster; return how many blocks the engines hold and what differs.

    An index may take a moment to apply the last events, so it is asked until it agrees, or `PATIENCE` seconds.
    """
    secret, workers, frontends = await members(run)
    held = {card.id: await blocks_of(card, secret) for card in workers}
    wrong = [f"{worker} could not be asked for all its events" for worker, blocks in held.items() if blocks is None]
    total = sum(len(blocks) for blocks in held.values() if blocks is not None)
    async with aiohttp.ClientSession() as http:
        for card in frontends:
            pairs = await settled(http, card.admin_url, total)
            if pairs != total and not wrong:
                wrong.append(f"{card.id} has {pairs} blocks in its index, the engines hold {total}")
    if len(frontends) < 2 or not total:
        wrong.append(f"{len(frontends)} frontends and {total} blocks: the index was not tested")
    return total, wrong


async def tasks_of(run: Path, pid: int) -> int:
    """Return how many tasks the event loop of a frontend has."""
    _, _, frontends = await members(run)
    (card,) = [card for card in frontends if card.pid == pid]
    async with aiohttp.ClientSession() as http, http.get(f"{card.admin_url}/metrics?scope=process") as answer:
        lines = (await answer.text()).splitlines()
    return next(int(float(line.split()[-1])) for line in lines if line.startswith("penstock_tasks "))


async def members(run: Path) -> tuple[ClusterSecret, list[WorkerCard], list[FrontendCard]]:
    """Read the store as a process of the cluster does."""
    secret = ClusterSecret(stored_secret(run) or "")
    store = SqliteStore(run / "discovery", secret=secret)
    try:
        workers = [msgspec.json.decode(raw, type=MembershipEntry).card for raw in (await store.list(WORKERS)).values()]
        frontends = [msgspec.json.decode(raw, type=FrontendCard) for raw in (await store.list(FRONTENDS)).values()]
        return secret, workers, frontends
    finally:
        await store.close()


async def blocks_of(card: WorkerCard, secret: ClusterSecret) -> set[int] | None:
    """Return the hashes of what an engine holds on its device, or None where it has forgotten early events."""
    subscriber = KvSubscriber(card.events[0], card.replay[0], card.topic, secret=secret)
    batches = await subscriber.replay(0, 10.0)
    subscriber.close()
    if batches is None or [batch.sequence for batch in batches] != list(range(len(batches))):
        return None
    found: set[int] = set()
    for event in (event for batch in batches for event in batch.events):
        if isinstance(event, KvStored):
            found.update(event.hashes)
        elif isinstance(event, KvRemoved):
            found.difference_update(event.hashes)
        elif isinstance(event, KvCleared):
            found.clear()
    return found


async def settled(http: aiohttp.ClientSession, admin_url: str, wanted: int) -> int:
    """Return how many blocks of engines a frontend's index holds."""
    end = asyncio.get_running_loop().time() + PATIENCE
    while True:
        async with http.get(f"{admin_url}/admin/status?scope=process") as answer:
            found: dict[str, Any] = await answer.json()
        pairs = sum(model["index_pairs"] or 0 for model in found["models"])
        if pairs == wanted or asyncio.get_running_loop().time() > end:
            return int(pairs)
        await asyncio.sleep(0.2)
