"""Decisions through an etcd: written at once, waiting, out of order; and the other end as a process of its own."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from penstock.adapters.stores.etcd_client import EtcdClient
from penstock.config.settings.planning_settings import VirtualSettings
from penstock.planner.plugins.proposals import Reason
from penstock_dynamo.virtual.etcd_keys import EtcdKeys
from penstock_dynamo.virtual.virtual_client import UnknownDecision, VirtualClient, VirtualDecision
from penstock_dynamo.virtual.virtual_connector import VirtualConnector
from penstock_dynamo.virtual.virtual_keys import prefix_of, standing
from penstock_dynamo.virtual.virtual_keys_access import connect, keys_of
from tests import server_fixtures
from tests.servers import Etcd

etcd = server_fixtures.etcd
ROOT = Path(__file__).resolve().parents[3]
WHY = (Reason(code="test", text="a test wants it"),)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Namespace:
    """One namespace of a real etcd, seen raw and through both ends."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self.raw = EtcdClient([url])
        self.clock = Clock()

    def connector(self) -> VirtualConnector:
        known = VirtualSettings(namespace=self.name)
        pools = {"prefill": 1, "decode": 1}
        keys = keys_of(EtcdClient([self.url]), self.name)
        return VirtualConnector(keys, known, model="m", pools=pools, clock=self.clock)  # type: ignore[arg-type]

    def client(self) -> VirtualClient:
        return connect([self.url], self.name, every=0.02)

    async def keys(self) -> dict[str, str]:
        return await EtcdKeys(EtcdClient([self.url]), prefix_of(self.name)).read()

    async def put(self, name: str, value: str) -> None:
        await self.raw.put(f"/{self.name}/planner/{name}".encode(), value.encode())


@pytest.fixture
async def namespace(etcd: Etcd, request: pytest.FixtureRequest) -> AsyncIterator[Namespace]:
    found = Namespace(etcd.url, request.node.name)
    yield found
    await found.raw.close()


async def test_the_first_decision_has_id_0_and_stands_as_integers_in_text(namespace):
    connector = namespace.connector()
    before = await connector.look()
    assert {name: pool.desired for name, pool in before.items()} == {"prefill": 1, "decode": 1}
    assert await connector.scale({"decode": 3}, (), WHY) == {}
    assert await namespace.keys() == {"num_prefill_workers": "1", "num_decode_workers": "3", "decision_id": "0"}
    assert (await connector.look())["decode"].desired == 3


async def test_all_keys_of_a_decision_change_at_one_revision(namespace):
    await namespace.connector().scale({"prefill": 2, "decode": 3}, (), WHY)
    found = await namespace.raw.range(prefix_of(namespace.name).encode())
    assert len({item.revision for item in found.items}) == 1


async def test_equal_targets_write_nothing_and_say_so(namespace, caplog):
    connector = namespace.connector()
    await connector.scale({"prefill": 2, "decode": 3}, (), WHY)
    before = await namespace.raw.range(prefix_of(namespace.name).encode())
    with caplog.at_level(logging.INFO, "penstock.planner"):
        assert await connector.scale({"prefill": 2, "decode": 3}, (), WHY) == {}
    assert "No scaling needed (prefill=2, decode=3), skipping ETCD update" in caplog.messages
    assert (await namespace.raw.range(prefix_of(namespace.name).encode())).items == before.items


async def test_a_decision_waits_until_the_one_before_is_acknowledged_or_its_time_is_over(namespace):
    connector = namespace.connector()
    await connector.scale({"decode": 3}, (), WHY)
    refused = await connector.scale({"decode": 4}, (), WHY)
    assert "decision 0 is not acknowledged" in refused["decode"]
    assert (await namespace.keys())["num_decode_workers"] == "3"
    namespace.clock.now = 1799.0
    assert await connector.scale({"decode": 4}, (), WHY) == refused  # the same word again is no new alarm
    namespace.clock.now = 1801.0
    assert await connector.scale({"decode": 4}, (), WHY) == {}
    assert (await namespace.keys())["decision_id"] == "1"
    await namespace.put("scaled_decision_id", "1")
    assert await connector.scale({"decode": 5}, (), WHY) == {}


async def test_values_out_of_order_are_reported_and_ids_never_go_back(namespace, caplog):
    connector = namespace.connector()
    for decode in (2, 3):
        await connector.scale({"decode": decode}, (), WHY)
        await namespace.put("scaled_decision_id", "0" if decode == 2 else "1")
    await namespace.put("scaled_decision_id", "7")
    assert "that one was never issued" in (await connector.look())["decode"].problem
    await namespace.put("scaled_decision_id", "1")
    assert (await connector.look())["decode"].problem is None
    await namespace.put("scaled_decision_id", "0")
    assert "scaled_decision_id went back from 1 to 0" in (await connector.look())["decode"].problem
    await namespace.put("scaled_decision_id", "1")
    await namespace.put("decision_id", "0")
    assert "decision_id went back from 1 to 0" in (await connector.look())["decode"].problem
    await namespace.put("num_decode_workers", "many")
    assert "'many', which is not a whole number" in (await connector.look())["decode"].problem
    assert connector.faults >= 4
    assert any("never issued" in message for message in caplog.messages)
    await connector.scale({"decode": 6}, (), WHY)
    assert (await namespace.keys())["decision_id"] == "2"  # not 1 a second time


async def test_two_planners_do_not_write_over_each_other(namespace):
    first, second = namespace.connector(), namespace.connector()
    answers = await asyncio.gather(*(each.scale({"decode": 3 + n}, (), WHY) for n, each in enumerate((first, second))))
    keys = await namespace.keys()
    assert keys["decision_id"] == "0"
    assert sorted(map(bool, answers)) == [False, True]


async def test_an_etcd_that_is_away_is_a_problem_and_no_error(tmp_path):
    connector = VirtualConnector(
        keys_of(EtcdClient(["http://127.0.0.1:1"], timeout=0.2), "n"), VirtualSettings(), model="m", pools={"decode": 1}
    )
    assert "can't be reached" in (await connector.scale({"decode": 2}, (), WHY))["decode"]


# --- the other end ---------------------------------------------------------------------------------------------------


async def test_a_client_gets_waits_and_completes(namespace):
    client, connector = namespace.client(), namespace.connector()
    assert await client.get() is None
    with pytest.raises(TimeoutError):
        await client.wait(timeout=0.1)
    waiting = asyncio.create_task(client.wait(timeout=10))
    await connector.scale({"prefill": 4, "decode": 2}, (), WHY)
    decision = await waiting
    assert decision == VirtualDecision(4, 2, 0)
    await client.complete(decision)
    await client.complete(decision)  # twice is once
    assert client.completed == 0
    assert (await namespace.keys())["scaled_decision_id"] == "0"


async def test_only_decisions_that_were_issued_can_be_completed(namespace):
    client, connector = namespace.client(), namespace.connector()
    with pytest.raises(UnknownDecision, match="the newest that was issued is -1"):
        await client.complete(VirtualDecision(1, 1, 0))
    await connector.scale({"decode": 2}, (), WHY)
    with pytest.raises(UnknownDecision, match="decision 5 can't be complete"):
        await client.complete(VirtualDecision(1, 1, 5))


async def test_a_late_acknowledgement_of_an_old_decision_takes_nothing_back(namespace):
    client, connector = namespace.client(), namespace.connector()
    await connector.scale({"decode": 2}, (), WHY)
    old = await client.wait(timeout=10)
    await client.complete(old)
    await connector.scale({"decode": 3}, (), WHY)
    await client.complete(await client.wait(timeout=10))
    await client.complete(old)
    assert (await namespace.keys())["scaled_decision_id"] == "1"


@pytest.fixture
def scaler(namespace: Namespace) -> Iterator["subprocess.Popen[str]"]:
    words = [sys.executable, str(ROOT / "examples" / "external_scaler.py"), namespace.url, namespace.name]
    process = subprocess.Popen([*words, "--every", "0.05"], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


async def test_the_example_carries_out_what_the_planner_decides(namespace, scaler):
    connector = namespace.connector()
    for number, (prefill, decode) in enumerate([(1, 2), (3, 4), (1, 1)]):
        assert await connector.scale({"prefill": prefill, "decode": decode}, (), WHY) == {}
        line = await asyncio.to_thread(scaler.stdout.readline)
        assert json.loads(line) == {
            "num_prefill_workers": prefill,
            "num_decode_workers": decode,
            "decision_id": number,
        }
        async with asyncio.timeout(10):
            while not (await connector.look())["decode"].acknowledged:
                await asyncio.sleep(0.02)
    assert scaler.poll() is None


def test_values_that_are_none_are_faults_and_never_zero():
    found = standing({"num_decode_workers": "x", "num_prefill_workers": "-3", "decision_id": "2"})
    assert (found.prefill, found.decode, found.decision, found.scaled) == (None, None, 2, -1)
    assert len(found.faults) == 2
