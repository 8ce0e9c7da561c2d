"""The store in Kubernetes under faults of the API server, of clocks and of people."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from penstock.adapters.seams import StoreUnavailable
from penstock.config.settings.discovery_settings import KubernetesSettings
from penstock.kernel.secret import ClusterSecret
from penstock.testing.store_contract import PATIENCE, TTL, alive_again, watching
from penstock_kubernetes.api import resource_watch
from penstock_kubernetes.api.api_client import open_client
from penstock_kubernetes.api.discovery_resources import DISCOVERY_LABEL, entry_class, entry_name, lease_class
from penstock_kubernetes.api.resource_watch import list_all
from penstock_kubernetes.store import kubernetes_view
from tests.kubernetes.conftest import RunningApi
from tests.kubernetes.discovery.api_cables import KubernetesHarness
from tests.kubernetes.discovery.conftest import fault

pytestmark = pytest.mark.slow


@pytest.fixture
async def client(kubernetes: KubernetesHarness) -> AsyncIterator[Any]:
    found = open_client(KubernetesSettings())
    yield found
    await found.close()


@pytest.fixture
def faults(entries: RunningApi) -> Iterator[Any]:
    def begin(**fields: object) -> None:
        fault(entries, **fields)

    yield begin
    if not entries.real:
        fault(entries)


async def leases_of(client: Any, kubernetes: KubernetesHarness) -> list[Any]:
    leases, _ = await list_all(client, lease_class(), labels={DISCOVERY_LABEL: kubernetes.cluster})
    return leases


async def until(check: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await check():
            await asyncio.sleep(0.05)


async def test_keys_of_a_process_have_one_lease_for_each_ttl(kubernetes, client):
    mine = kubernetes.open()
    for key in ("workers/a", "workers/b", "a text that is no label/c"):
        await mine.put(key, b"", ttl=5.0)
    await mine.put("frontends/a", b"", ttl=9.0)
    await mine.put("settings", b"")
    leases = {lease.metadata.name: lease for lease in await leases_of(client, kubernetes)}
    assert sorted(lease.spec.leaseDurationSeconds for lease in leases.values()) == [5, 9]
    entry = await client.get(entry_class(), entry_name(kubernetes.cluster, "workers/a"))
    assert entry.spec["key"] == "workers/a"
    assert entry.metadata.labels["penstock.io/key-prefix"] == "workers"
    (owner,) = entry.metadata.ownerReferences
    assert owner.uid == leases[owner.name].metadata.uid, "the garbage collector removes it with its lease"
    await mine.put("workers/a", b"stays")
    entry = await client.get(entry_class(), entry_name(kubernetes.cluster, "workers/a"))
    assert not entry.metadata.ownerReferences
    assert entry.spec.get("lease") is None


async def test_in_a_pod_the_lease_goes_with_the_pod(kubernetes, client, monkeypatch):
    monkeypatch.setenv("POD_NAME", "engine-0")
    monkeypatch.setenv("POD_UID", "11111111-2222-3333-4444-555555555555")
    await kubernetes.open().put("workers/a", b"", ttl=5.0)
    (lease,) = await leases_of(client, kubernetes)
    assert [(owner.kind, owner.name) for owner in lease.metadata.ownerReferences] == [("Pod", "engine-0")]


@pytest.mark.parametrize("off", [-3600.0, 3600.0])
async def test_a_wrong_clock_of_an_owner_does_not_matter(kubernetes, monkeypatch, off):
    from penstock_kubernetes.api import discovery_resources
    from penstock_kubernetes.store import kubernetes_leases

    def wrong() -> str:
        moment = discovery_resources.time.time() + off
        return discovery_resources.datetime.fromtimestamp(moment, discovery_resources.UTC).strftime(
            "%Y-%m-%dT%H:%M:%S.%fZ"
        )

    for module in (discovery_resources, kubernetes_leases):
        monkeypatch.setattr(module, "wall_time", wrong)
    mine, other = kubernetes.open(), kubernetes.open()
    await mine.put("k", b"1", ttl=TTL)
    async with watching(other, "") as watcher:
        assert watcher.alive == {"k": b"1"}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watcher.step(), 2.5)  # longer than the ttl: nothing must happen
        assert await kubernetes.open().list("") == {"k": b"1"}


async def test_a_wrong_clock_of_the_api_server_does_not_matter(kubernetes, faults):
    faults(kind="clock-skew", seconds=-7200.0)
    mine, other = kubernetes.open(), kubernetes.open()
    await mine.put("k", b"1", ttl=TTL)
    async with watching(other, "") as watcher:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watcher.step(), 1.5)
        assert watcher.alive == {"k": b"1"}


async def test_a_deleted_lease_is_reported_and_not_made_again(kubernetes, client):
    lost: list[str] = []
    mine, other = kubernetes.open(revoked=lost.append), kubernetes.open()
    await mine.put("workers/a", b"1", ttl=30.0)
    await mine.put("workers/b", b"1", ttl=4.0)  # long enough that a busy machine renews it
    by_ttl = {lease.spec.leaseDurationSeconds: lease.metadata.name for lease in await leases_of(client, kubernetes)}
    async with watching(other, "") as watcher:
        await client.delete(lease_class(), by_ttl[4])
        await watcher.until({"workers/a": b"1"})

        async def reported() -> bool:
            return bool(lost)

        await until(reported)
    assert lost == ["workers/b"]
    assert mine.revocations == 1
    assert await other.list("") == {"workers/a": b"1"}
    await mine.put("workers/b", b"2", ttl=4.0)  # a new put means that it is wanted
    assert await other.list("") == {"workers/a": b"1", "workers/b": b"2"}


async def test_a_lease_of_a_killed_owner_is_deleted_in_the_end(kubernetes, client, monkeypatch):
    monkeypatch.setattr(kubernetes_view, "LOOK_EVERY", 0.2)
    other = kubernetes.open()
    child = kubernetes.spawn_owner("k", "1", TTL)
    async with watching(other, "") as watcher:
        assert watcher.alive == {"k": b"1"}
        child.kill()
        await watcher.until({})

        async def deleted() -> bool:
            return not await leases_of(client, kubernetes)

        await until(deleted)


async def test_an_owner_that_was_taken_for_dead_puts_its_keys_again(kubernetes, client):
    from lightkube.types import PatchType

    mine, other = kubernetes.open(), kubernetes.open()
    await mine.put("k", b"1", ttl=TTL)
    (lease,) = await leases_of(client, kubernetes)
    ended = {"spec": {"holderIdentity": ""}}
    await client.patch(lease_class(), lease.metadata.name, ended, patch_type=PatchType.MERGE)
    await client.delete(lease_class(), lease.metadata.name)

    # To the owner it seems deleted while it renewed in time, unless it is told that a reader ended it.
    async def again() -> bool:
        return mine.regained + mine.revocations > 0

    await until(again)
    if mine.regained:
        assert await other.list("") == {"k": b"1"}


async def test_an_ended_lease_that_is_still_there_is_replaced(kubernetes, client):
    from lightkube.types import PatchType

    mine, other = kubernetes.open(), kubernetes.open()
    await mine.put("k", b"1", ttl=TTL)
    async with watching(other, "") as watcher:
        (lease,) = await leases_of(client, kubernetes)
        ended = {"spec": {"holderIdentity": ""}}
        await client.patch(lease_class(), lease.metadata.name, ended, patch_type=PatchType.MERGE)

        async def again() -> bool:
            return mine.regained == 1

        await until(again)
        await watcher.until({"k": b"1"})


async def test_a_gap_in_a_watch_yields_the_differences_only(kubernetes, faults):
    mine, other = kubernetes.open(), kubernetes.open()
    for key in ("stays", "goes", "changes"):
        await mine.put(key, b"1")
    async with watching(other, "") as watcher:
        kubernetes.cable.cut()
        faults(kind="forget-history")
        await mine.put("comes", b"2")
        await mine.delete("goes")
        await mine.put("changes", b"2")
        faults(kind="forget-history")
        await watcher.until({"stays": b"1", "comes": b"2", "changes": b"2"})
        assert watcher.left == ["goes"]


async def test_watches_that_are_dropped_again_and_again_lose_nothing(kubernetes, faults):
    mine, other = kubernetes.open(), kubernetes.open()
    wanted: dict[str, bytes] = {}
    async with watching(other, "") as watcher:
        for n in range(10):
            faults(kind="drop-watch", times=2)
            wanted[f"k/{n}"] = b"1"
            await mine.put(f"k/{n}", b"1", ttl=5.0)
        await watcher.until(wanted)
        assert watcher.left == []


async def test_a_stale_list_drops_nobody(kubernetes, faults):
    mine, other = kubernetes.open(), kubernetes.open()
    await mine.put("a", b"1", ttl=5.0)
    assert await other.list("") == {"a": b"1"}
    faults(kind="stale-list", times=2)
    await mine.put("b", b"2", ttl=9.0)
    assert await mine.list("") == {"a": b"1", "b": b"2"}
    async with watching(other, "") as watcher:
        await watcher.until({"a": b"1", "b": b"2"})
        faults(kind="stale-list", times=1)
        kubernetes.cable.cut()
        faults(kind="forget-history")
        await mine.put("c", b"3", ttl=5.0)
        await watcher.until({"a": b"1", "b": b"2", "c": b"3"})
        assert watcher.left == []


async def test_a_server_that_was_restored_from_a_backup_is_read_anew(kubernetes, client, monkeypatch):
    """Its versions are lower than the one that a reader knows, which it answers with 504, as long as that lasts."""
    mine = kubernetes.open()
    await mine.put("a", b"1")
    lists, watched = [], resource_watch.list_all

    async def of_before(*args: Any, **more: Any) -> tuple[list[Any], str]:
        found, version = await watched(*args, **more)
        lists.append(more["since"])
        return found, "99999999999" if len(lists) == 1 else version

    monkeypatch.setattr(resource_watch, "list_all", of_before)
    changes = resource_watch.follow(client, entry_class(), labels={DISCOVERY_LABEL: kubernetes.cluster})
    assert len(await anext(changes)) == 1
    with pytest.raises(StoreUnavailable, match="older than what it said before"):
        await anext(changes)
    assert lists[0] is None and len(lists) == 1, "the older lists were refused"


@pytest.mark.parametrize("kind", ["too-many-requests", "error", "lost-answer"])
async def test_a_server_that_is_busy_or_fails_is_asked_again_within_a_bound(kubernetes, faults, kind):
    mine, other = kubernetes.open(), kubernetes.open()
    await mine.put("k", b"1", ttl=5.0)
    faults(kind=kind, times=1, resources=["penstockentries"])
    await mine.put("k", b"2", ttl=5.0)
    assert await other.list("") == {"k": b"2"}
    if kind == "error":
        faults(kind=kind, resources=["penstockentries"])
        with pytest.raises(StoreUnavailable, match="500"):
            await mine.put("k", b"3", ttl=5.0)


async def test_conflicts_of_writers_end_with_one_value(kubernetes):
    stores = [kubernetes.open() for _ in range(4)]
    await asyncio.gather(*(store.put("k", str(n).encode(), ttl=5.0) for n, store in enumerate(stores)))
    values = [await store.list("") for store in stores]
    assert all(value == values[0] for value in values)
    assert list(values[0]) == ["k"]


async def test_a_reader_whose_own_lease_cant_be_renewed_drops_nobody(kubernetes, faults):
    mine, other = kubernetes.open(), kubernetes.open()
    await mine.put("theirs", b"1", ttl=TTL)
    await other.put("ours", b"1", ttl=TTL)
    with pytest.raises(StoreUnavailable, match="silence"):
        async with watching(other, "") as watcher:
            faults(kind="error", verbs=["patch"], resources=["leases"])
            while True:
                await watcher.step()
    assert watcher.left == []
    faults()
    assert set(await alive_again(other, "")) == {"theirs", "ours"}


async def test_a_foreign_or_copied_entry_is_left_out(kubernetes, client):
    secret = ClusterSecret("the secret of these tests")
    signed, plain = kubernetes.open(), kubernetes.open()
    signed.codec._secret = secret
    await signed.put("workers/good", b"1", ttl=5.0)
    await plain.put("workers/unsigned", b"2", ttl=5.0)
    entry = await client.get(entry_class(), entry_name(kubernetes.cluster, "workers/good"))
    copied = {"metadata": {"name": "copied", "labels": entry.metadata.labels}, "spec": dict(entry.spec)}
    copied["spec"]["key"] = "workers/copied"
    await client.create(entry_class()(copied))
    assert await signed.list("") == {"workers/good": b"1"}
    assert signed.codec.foreign == 1
    assert signed.codec.ignored == 1
    await client.delete(entry_class(), "copied")


async def test_many_changes_of_one_moment_are_few_states_for_a_reader(kubernetes, monkeypatch):
    monkeypatch.setattr(kubernetes_view, "SHOW_EVERY", 0.5)
    mine, other = kubernetes.open(), kubernetes.open()
    known: set[str] = set()
    states = 0
    now = asyncio.get_running_loop().time
    async with asyncio.timeout(PATIENCE), aclosing(other.watch("workers/")) as batches:
        await anext(batches)
        began = now()
        keys = [f"workers/{number}" for number in range(40)]

        async def put():
            for key in keys:
                await mine.put(key, b"1", ttl=TTL)

        putting = asyncio.create_task(put())
        while len(known) < len(keys):
            known |= {change.key for change in await anext(batches)}
            states += 1
        await putting
    assert states <= (now() - began) / kubernetes_view.SHOW_EVERY + 2
