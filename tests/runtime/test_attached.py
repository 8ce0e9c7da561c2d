"""A server that others run is announced while it is healthy, and described with what the operator says of it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from penstock.adapters.connectors.engine_process import EngineProcess
from penstock.adapters.engines.pool_overrides import overrides_of
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.fleet.events import DrainDesired, DrainDropped, DrainForgotten, DrainReported
from penstock.fleet.fleet_state import HealthLimits
from penstock.kernel.errors import EngineError
from penstock.kernel.values import Pool
from tests.adapters.connectors.holding import SETTINGS, Ward, eventually

URL = "http://gpu1:8000"


@pytest.fixture
async def ward(tmp_path: Path) -> AsyncIterator[Ward]:
    made = Ward(tmp_path / "ward")
    made.nurse.there.add(URL)
    server = EngineProcess("urls-0", "urls", URL, None, {})
    made.connector.attach("urls", Pool(model="m", desired=1), [server], HealthLimits(interval=0.001))
    await made.connector.start()
    yield made
    await made.close()


def test_what_the_operator_says_of_it_is_in_its_card() -> None:
    pool = PoolSettings(engine="vllm", urls=(URL,), events=("tcp://gpu1:5557",), topic="kv", block_size=32)
    said = overrides_of(pool, URL)
    assert (said["engine"], said["events"], said["topic"]) == ("vllm", ("tcp://gpu1:5557",), "kv")
    assert said["block_size"] == 32


async def test_it_goes_and_comes_back(ward: Ward) -> None:
    nurse = ward.nurse
    await ward.connector.ready()
    nurse.there.clear()
    gone = ["came urls-0", "crashed urls-0: stopped serving: no answer", "gone urls-0"]
    await eventually(lambda: nurse.told == gone)
    replica = ward.connector.fleet.pools()["urls"].replicas[0]
    assert (replica.state, replica.reason) in [("failed", "no answer"), ("failed", f"{URL} is away")]
    nurse.there.add(URL)
    await eventually(lambda: nurse.told == [*gone, "came urls-0"])


async def test_a_busy_one_keeps_its_place_and_its_requests_until_it_answers_again(ward: Ward) -> None:
    nurse = ward.nurse
    await ward.connector.ready()
    nurse.busy.add(URL)
    await eventually(lambda: nurse.told == ["came urls-0", "silent urls-0"])
    replica = ward.connector.fleet.pools()["urls"].replicas[0]
    assert (replica.state, replica.reason) == ("ready", "it is busy")
    nurse.busy.clear()
    await eventually(lambda: nurse.told == ["came urls-0", "silent urls-0", "heard urls-0"])
    nurse.busy.add(URL)
    await eventually(lambda: nurse.told[-1] == "silent urls-0")
    nurse.busy.clear()
    nurse.there.clear()
    await eventually(lambda: nurse.told[-1] == "gone urls-0")


async def test_one_that_is_not_there_at_the_start_is_told_once_and_may_still_come(tmp_path: Path) -> None:
    ward = Ward(tmp_path / "other")
    ward.connector.attach("urls", Pool(model="m", desired=1), [EngineProcess("urls-0", "urls", URL, None, {})])
    await ward.connector.start()
    try:
        with pytest.raises(EngineError, match="is away"):
            await ward.connector.ready()
        ward.nurse.there.add(URL)
        await eventually(lambda: ward.nurse.told == ["came urls-0"])
    finally:
        await ward.close()


@pytest.mark.parametrize("wait", [False, True])
async def test_a_fleet_starts_with_the_servers_that_answer_and_takes_the_others_in_when_they_come(
    tmp_path: Path, wait: bool
) -> None:
    ward = Ward(tmp_path / "some")
    ward.connector.use(msgspec.structs.replace(SETTINGS, wait=wait))
    other = "http://gpu2:8000"
    servers = [EngineProcess("urls-0", "urls", URL, None, {}), EngineProcess("urls-1", "urls", other, None, {})]
    ward.connector.attach("urls", Pool(model="m", desired=2), servers, HealthLimits(interval=0.001))
    if not wait:
        ward.nurse.there.add(other)
    await ward.connector.start()
    try:
        away = await ward.connector.ready()
        assert away == {"urls-0": f"{URL} is away", **({"urls-1": f"{other} is away"} if wait else {})}
        ward.nurse.there |= {URL, other}
        await eventually(lambda: {"came urls-0", "came urls-1"} <= set(ward.nurse.told))
    finally:
        await ward.close()


async def test_one_that_is_drained_gets_nothing_even_when_it_comes_back_until_that_is_undone(ward: Ward) -> None:
    nurse, connector = ward.nurse, ward.connector
    await connector.ready()
    connector.post(DrainDesired(worker="urls-0", revision="r"))
    connector.post(DrainDesired(worker="urls-0", revision="r"))
    await eventually(lambda: connector.fleet.state.lives["urls-0"].phase == "parked")
    nurse.there.clear()
    await eventually(lambda: nurse.told[-1] == "gone urls-0")
    nurse.there.add(URL)
    await eventually(lambda: nurse.told[-1] == "leave urls-0")
    assert nurse.told.count("came urls-0") == 1
    connector.post(DrainDropped(worker="urls-0"))
    connector.post(DrainDropped(worker="urls-0"))
    await eventually(lambda: nurse.told[-1] == "came urls-0")
    await asyncio.sleep(0.01)
    assert nurse.told.count("came urls-0") == 2
    reports = [nurse.statuses.get_nowait() for _ in range(nurse.statuses.qsize())]
    assert DrainReported(worker="urls-0", state="done", revision="r", seconds=reports[0].seconds) == reports[0]
    assert reports[-1] == DrainForgotten(worker="urls-0")
