"""A cluster over two hosts: cut apart and joined again, without its store, without its broker, with a wrong clock.

Each host is a network namespace. What must hold meanwhile: no request is lost or answered twice, none goes to a worker
that is known to be gone, and the index is right again when it is over.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.live.cluster import Served, holders, served, until
from tests.live.hosts import Host, faketime, two_hosts
from tests.live.test_etcd import LIMIT, SECRET, ready
from tests.live.test_operate import FAST, load, penstock, workers
from tests.servers import Etcd, Nats

pytestmark = pytest.mark.slow

TTL = 2.0
OURS = {"main-0", "main-1"}
PATIENT = ["--frontend.upstream.connect_timeout", "1", "--frontend.upstream.stall_timeout", "4"]
PATIENT += ["--frontend.upstream.first_byte_timeout", "4"]


class Cluster:
    """The frontend and two engines on one host with etcd and NATS, two more engines on the other."""

    def __init__(self, here: Host, there: Host, etcd: Etcd, nats: Nats, up: Served, joined: Served) -> None:
        self.here, self.there = here, there
        self.etcd, self.nats = etcd, nats
        self.up, self.joined = up, joined
        self.theirs = ready(up) - OURS

    def only_ours(self) -> bool:
        return ready(self.up) == OURS

    def everybody(self) -> bool:
        return ready(self.up) == OURS | self.theirs


@contextmanager
def cluster(folder: Path, *, clock: str | None = None) -> Iterator[Cluster]:
    """Start all of it; the thread is on the first host meanwhile.

    Args:
        clock: how far the second host's clock is off.
    """
    with two_hosts() as (here, there), here.inside():
        etcd = Etcd(folder / "etcd", host=here.address, before=here.words)
        nats = Nats(folder / "nats", host=here.address, jetstream=True, before=here.words)
        etcd.start()
        nats.start()
        try:
            discovery = {
                "store": "etcd",
                "etcd.urls": etcd.url,
                "ttl": f"{TTL:g}",
                "kv_events": "nats",
                "nats.urls": nats.url,
            }
            common = [word for name, value in discovery.items() for word in (f"--discovery.{name}", value)]
            up = ["up", "--frontend.port", "0", "--set", "models.sim.pools.main.replicas=2", *FAST, *PATIENT, *common]
            join = ["join", "--model", "sim", "--replicas", "2", "--sim.timing.speed_up", "20", *common]
            off = [] if clock is None else faketime(clock)
            with served(folder, *up, "--discovery.host", here.address, env=SECRET, before=here.words) as first:
                joined = Served([*join, "--discovery.host", there.address], folder, SECRET, before=[*there.words, *off])
                try:
                    joined.wait_up()
                    until(lambda: len(ready(first)) == 4, LIMIT, lambda: joined.text)
                    yield Cluster(here, there, etcd, nats, first, joined)
                finally:
                    there.plug()
                    assert joined.stop() == 0, joined.text
        finally:
            etcd.kill()
            nats.kill()


def states(cluster: Cluster) -> dict[str, tuple[str, str | None]]:
    return {name: (worker["state"], worker["why_not"]) for name, worker in workers(cluster.up).items()}


def records(cluster: Cluster) -> list[dict[str, Any]]:
    path = cluster.up.run / "requests.jsonl"
    # It is written now and then, for the first time when there is something to write.
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def asked(cluster: Cluster, prompt: str) -> tuple[str, int]:
    """Ask; return who answered, and how many tokens of its cache the router expected."""
    status, body, headers = cluster.up.chat(prompt)
    assert status == 200, body
    return headers["x-penstock-worker"], int(headers["x-penstock-expected-cached-tokens"])


def is_right(cluster: Cluster) -> None:
    """Every worker's cache is as the router thinks: the doctor asks each a new prompt twice and compares."""
    told = penstock(cluster.up, "doctor", status=0)
    assert told.count("cache:") >= 1, told
    assert "ERROR" not in told


def whole(cluster: Cluster, callers: list[Any]) -> None:
    """Each request that was asked stands in the record once, and ended well."""
    count = sum(caller.whole for caller in callers)
    until(lambda: len([r for r in records(cluster) if r["outcome"] == "ok"]) >= count, LIMIT)
    found = records(cluster)
    assert len({record["id"] for record in found}) == len(found)
    assert {record["outcome"] for record in found} == {"ok"}


def test_a_host_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        with load(found.up, 6) as callers:
            found.there.unplug()
            cut = time.monotonic()
            until(found.only_ours, LIMIT)
            noticed = time.monotonic() - cut
            # Its leases end by themselves: not before they may, and soon after.
            assert noticed > TTL / 2
            print(f"\na host that was cut off was noticed after {noticed:.1f} s, with a ttl of {TTL:g} s")
            count = sum(caller.whole for caller in callers)
            until(lambda: sum(caller.whole for caller in callers) > count + 40, LIMIT)
            # Nobody is sent to the dead any more; those who hung there went on elsewhere.
            began = max(record["arrival"] for record in records(found))
            until(lambda: len([r for r in records(found) if r["arrival"] > began]) > 40, LIMIT)
            late = [record for record in records(found) if record["arrival"] > began]
            assert not {leg["worker"] for record in late for leg in record["legs"]} & found.theirs
            found.there.plug()
            until(found.everybody, LIMIT, lambda: f"{states(found)}\n{found.joined.text}")
        whole(found, callers)
        is_right(found)


def test_the_store_dies_and_comes_back_empty(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        with load(found.up, 6) as callers:
            for empty in (False, True):
                found.etcd.kill()
                count = sum(caller.whole for caller in callers)
                end = time.monotonic() + 2 * TTL  # longer than any lease
                until(lambda end=end: time.monotonic() > end, LIMIT)
                assert found.everybody()
                assert sum(caller.whole for caller in callers) > count
                if empty:
                    found.etcd.forget()
                found.etcd.start()
                until(lambda: "store can't be read" not in str(found.up.get("/admin/status")[1]["findings"]), LIMIT)
                assert found.everybody()
            # It is heard of again who leaves.
            penstock(found.up, "scale", "main=1")
            until(lambda: ready(found.up) == {"main-0"} | found.theirs, LIMIT)
        whole(found, callers)
        is_right(found)


def test_the_broker_dies_and_the_index_is_right_when_it_is_back(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        with load(found.up, 6) as callers:
            found.nats.kill()
            prompt = f"{time.time_ns()} is asked while nobody hears what the engines store. " * 40
            worker, _ = asked(found, prompt)
            count = sum(caller.whole for caller in callers)
            until(lambda: sum(caller.whole for caller in callers) > count + 40, LIMIT)
            found.nats.start()
            back = time.monotonic()
            # Others hold it too, once they have been asked; what counts is that it is known of the first one.
            until(
                lambda: worker in holders(found.up, prompt), LIMIT, lambda: f"{worker} of {holders(found.up, prompt)}"
            )
            print(f"\nthe index was right {time.monotonic() - back:.1f} s after the broker was back")
        whole(found, callers)
        is_right(found)


@pytest.mark.parametrize("clock", ["+1h", "-1h"])
def test_a_host_whose_clock_is_off_by_an_hour_is_a_host_like_others(tmp_path: Path, clock: str) -> None:
    with cluster(tmp_path, clock=clock) as found:
        with load(found.up, 6) as callers:
            end = time.monotonic() + 3 * TTL  # time has to pass here: what we wait for is that nobody goes
            until(lambda: time.monotonic() > end, LIMIT)
            assert found.everybody()
            found.there.unplug()
            until(found.only_ours, LIMIT)
            found.there.plug()
            until(found.everybody, LIMIT, lambda: f"{states(found)}\n{found.joined.text}")
            one = min(found.theirs)
            penstock(found.up, "drain", one)
            until(lambda: one not in ready(found.up), LIMIT)
            penstock(found.up, "drain", one, "--undo")
            until(found.everybody, LIMIT, lambda: f"{states(found)}\n{found.joined.text}")
        whole(found, callers)
        is_right(found)
