"""Leader election: one of two operators acts, and stops before the other begins, whatever the hosts' clocks say."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("lightkube")

from lightkube import AsyncClient, KubeConfig

from penstock_kubernetes.operator.leader_election import LEASE_SECONDS, RENEW_WITHIN, LeaderElection
from tests.doubles.kubernetes.api.api_faults import ApiFault
from tests.doubles.kubernetes.api.api_server import ApiServer


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Election:
    """Two candidates, each with a clock of its own."""

    def __init__(self, api: ApiServer, client: AsyncClient) -> None:
        self.api = api
        self.clocks = Clock(1_000.0), Clock(-77_000.0)
        self.candidates = [
            LeaderElection(client, "default", "operator", name, clock=clock)
            for name, clock in zip("ab", self.clocks, strict=True)
        ]

    async def step(self, *which: int) -> list[bool]:
        for number in which:
            await self.candidates[number].step()
        return self.leading

    @property
    def leading(self) -> list[bool]:
        return [each.leading.is_set() for each in self.candidates]

    def pass_time(self, seconds: float) -> None:
        for clock in self.clocks:
            clock.now += seconds


@pytest.fixture
async def election(tmp_path: Path) -> AsyncIterator[Election]:
    async with ApiServer(tmp_path) as api:
        client = AsyncClient(config=KubeConfig.from_file(api.kubeconfig).get(), trust_env=False)
        yield Election(api, client)
        await client.close()


async def test_the_first_one_leads_for_as_long_as_it_renews(election: Election) -> None:
    assert await election.step(0, 1) == [True, False]
    for _ in range(20):
        election.pass_time(2.0)
        assert await election.step(1, 0) == [True, False]


async def test_a_silent_leader_is_followed_after_the_time_that_it_said(election: Election) -> None:
    await election.step(0, 1)
    election.pass_time(LEASE_SECONDS - 1)
    assert (await election.step(1))[1] is False
    election.pass_time(2.0)
    assert (await election.step(1))[1] is True


async def test_a_leader_that_can_not_renew_stops_before_another_begins(election: Election) -> None:
    await election.step(0, 1)
    election.api.faults.add(ApiFault(kind="error", resources=("leases",)))
    election.pass_time(RENEW_WITHIN + 0.1)
    assert await election.step(0) == [False, False]
    election.api.faults.clear()
    assert await election.step(1) == [False, False]
    election.pass_time(LEASE_SECONDS)
    assert await election.step(1) == [False, True]
    assert await election.step(0) == [False, True]


async def test_of_two_that_see_a_silent_leader_one_wins(election: Election) -> None:
    third = LeaderElection(election.candidates[0]._client, "default", "operator", "c", clock=election.clocks[0])
    await election.step(0, 1)
    await third.step()
    election.pass_time(LEASE_SECONDS + 1)
    await third.step()
    await election.step(1)
    assert (third.leading.is_set(), election.leading[1]) == (True, False)


async def test_a_clock_of_the_server_that_is_wrong_changes_nothing(election: Election) -> None:
    election.api.faults.add(ApiFault(kind="clock-skew", seconds=3600.0))
    await election.step(0, 1)
    election.pass_time(3.0)
    assert await election.step(1, 0) == [True, False]
