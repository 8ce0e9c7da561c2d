"""A cluster whose membership stands in a real etcd: joined, revoked, cut off from its store, given an empty one."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.adapters.stores.etcd_client import EtcdClient
from tests.live.cluster import Served, alive, served, until
from tests.live.test_operate import FAST, load, penstock, workers
from tests.servers import Etcd

SECRET = {"PENSTOCK_CLUSTER_SECRET": "a secret of the tests with etcd"}
LIMIT = 20.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path / "etcd")
    server.start()
    yield server
    server.kill()


def up(etcd: Etcd, *more: str) -> list[str]:
    store = ["--discovery.store", "etcd", "--discovery.etcd.urls", etcd.url, "--discovery.ttl", "2"]
    return ["up", "--frontend.port", "0", "--set", "models.sim.pools.main.replicas=2", *FAST, *store, *more]


def revoke(etcd: Etcd, key: str) -> None:
    async def run() -> None:
        client = EtcdClient([etcd.url])
        (item,) = (await client.range(f"/penstock/penstock/keys/{key}".encode())).items
        await client.revoke(item.lease)
        await client.close()

    asyncio.run(run())


async def standing(etcd: Etcd) -> set[str]:
    client = EtcdClient([etcd.url])
    prefix = b"/penstock/penstock/keys/"
    found = {item.key.removeprefix(prefix).decode() for item in (await client.range(prefix)).items}
    await client.close()
    return found


def ready(cluster: Served) -> set[str]:
    return {name for name, worker in workers(cluster).items() if worker["state"] == "ready"}


@pytest.mark.slow
def test_engines_join_through_etcd_and_a_revoked_lease_drains_one_of_them(tmp_path: Path, etcd: Etcd) -> None:
    with served(tmp_path, *up(etcd), env=SECRET) as cluster:
        assert ready(cluster) == {"main-0", "main-1"}
        words = ["join", "--model", "sim", "--discovery.store", "etcd", "--discovery.etcd.urls", etcd.url]
        joined = Served([*words, "--discovery.ttl", "2"], tmp_path, env=SECRET)
        try:
            joined.wait_up()
            until(lambda: len(ready(cluster)) == 3, LIMIT, lambda: joined.text)
            (theirs,) = ready(cluster) - {"main-0", "main-1"}
            pid = workers(cluster)[theirs]["pid"]
            with load(cluster, 4):
                revoke(etcd, f"workers/{theirs}")
                until(lambda: theirs not in ready(cluster), LIMIT)
                revoke(etcd, "workers/main-1")
                until(lambda: ready(cluster) == {"main-0"}, LIMIT)
                until(lambda: not alive(pid), LIMIT, lambda: joined.text)
                until(lambda: set(workers(cluster)) == {"main-0"}, LIMIT, lambda: str(workers(cluster)))
            # It counts as drained: a word of the operator's brings it back.
            until(lambda: "drains/main-1" in asyncio.run(standing(etcd)), LIMIT)
            penstock(cluster, "drain", "main-1", "--undo")
            until(lambda: ready(cluster) == {"main-0", "main-1"}, LIMIT, lambda: f"{workers(cluster)}\n{cluster.text}")
        finally:
            joined.stop()
    # Only a wish outlives a cluster's orderly end, and the next one forgets it.
    assert asyncio.run(standing(etcd)) == {f"drains/{theirs}"}
    with served(tmp_path, *up(etcd), env=SECRET):
        assert f"drains/{theirs}" not in asyncio.run(standing(etcd))


@pytest.mark.slow
def test_traffic_goes_on_without_etcd_and_membership_is_right_again_after_it(tmp_path: Path, etcd: Etcd) -> None:
    with served(tmp_path, *up(etcd), env=SECRET) as cluster, load(cluster, 4) as callers:
        for lose in (lambda: None, etcd.forget):
            etcd.kill()
            until(_found(cluster, "store can't be read"), LIMIT)
            count = sum(caller.whole for caller in callers)
            until(lambda count=count: sum(caller.whole for caller in callers) > count + 20, LIMIT)
            assert ready(cluster) == {"main-0", "main-1"}
            lose()
            etcd.start()
            until(lambda: not _found(cluster, "store can't be read")(), LIMIT)
            assert ready(cluster) == {"main-0", "main-1"}
        # It hears of changes again: an engine that ends is known to be gone.
        penstock(cluster, "scale", "main=1")
        until(lambda: ready(cluster) == {"main-0"}, LIMIT)


@pytest.mark.slow
def test_a_second_supervisor_of_one_cluster_is_refused(tmp_path: Path, etcd: Etcd) -> None:
    with served(tmp_path, *up(etcd), env=SECRET):
        other = Served([*up(etcd), "--supervise.namespace", "other"], tmp_path, env=SECRET)
        assert other.process.wait(LIMIT) == 1
        other.stop()
        assert "has a supervisor already" in other.text


def _found(cluster: Served, text: str) -> Callable[[], bool]:
    return lambda: any(text in finding["text"] for finding in cluster.get("/admin/status")[1]["findings"])
