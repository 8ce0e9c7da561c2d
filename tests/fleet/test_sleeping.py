"""Replicas that sleep in place of ending: who does, who is woken first, and what happens where that fails."""

from penstock.fleet import events
from penstock.kernel.machine import Effect, Event
from penstock.kernel.values import Pool
from tests.fleet.test_fleet import Driven


class Sleepy(Driven):
    """A fleet whose pool may have replicas asleep."""

    def __init__(self, replicas: int, sleeping: int, **more: object) -> None:
        super().__init__(0, **more)  # type: ignore[arg-type]
        configured = Pool(model="m", desired=replicas)
        each = int(bool(self.fleet.state.gpus.all))
        self.post(events.PoolAdded(pool="nap", configured=configured, gpus=each, sleeping=sleeping))
        self.post(events.Begun())
        self.took()

    def answers(self, effect: Effect) -> list[Event]:
        match effect:
            case events.Sleep():
                return [events.Slept(worker=effect.worker, serial=effect.serial, host_memory=7)]
            case events.Rouse():
                return [events.Awoke(worker=effect.worker, serial=effect.serial)]
        return super().answers(effect)

    def scale(self, replicas: int) -> list[str]:
        self.post(events.Desired(pool="nap", replicas=replicas))
        return [word for word in self.took() if "Report" not in word and "Count" not in word]

    @property
    def naps(self) -> dict[str, str]:
        return {
            replica.id: "asleep" if replica.asleep else replica.state
            for replica in self.fleet.pools()["nap"].replicas or ()
        }


def test_a_pool_that_shrinks_puts_one_to_sleep_and_wakes_it_before_it_starts_another() -> None:
    here = Sleepy(2, sleeping=1, gpus=2)
    assert here.scale(1) == ["PublishReplica nap-1", "Withdraw nap-1", "Sleep nap-1"]
    assert here.naps == {"nap-0": "ready", "nap-1": "asleep"}
    pool = here.fleet.pools()["nap"]
    assert pool.settled and pool.replicas[1].host_memory == 7 and pool.replicas[1].gpus == ()  # type: ignore[index]
    assert here.fleet.state.gpus.left == [1]
    assert here.scale(2) == ["Rouse nap-1", "Probe nap-1", "PublishReplica nap-1", "DrainForgotten nap-1"]
    assert here.naps == {"nap-0": "ready", "nap-1": "ready"}
    assert here.fleet.state.lives["nap-1"].gpus == (1,)


def test_no_more_sleep_than_may() -> None:
    here = Sleepy(3, sleeping=1)
    here.scale(1)
    assert sorted(here.naps.values()) == ["asleep", "ready"]


def test_a_replica_whose_gpus_another_pool_took_stays_asleep_and_another_one_is_started() -> None:
    here = Sleepy(2, sleeping=1, gpus=3)
    here.scale(1)
    here.post(events.PoolAdded(pool="rest", configured=Pool(model="m", desired=1), gpus=1))
    here.post(events.Begun())
    assert here.fleet.state.lives["rest-0"].gpus == (1,)
    here.took()
    assert here.scale(2)[0] == "Spawn nap-2"
    assert here.naps == {"nap-0": "ready", "nap-1": "asleep", "nap-2": "ready"}


def test_one_that_can_not_fall_asleep_ends() -> None:
    here = Sleepy(2, sleeping=1, hold=(events.Sleep,))
    here.scale(1)
    life = here.fleet.state.lives["nap-1"]
    here.post(events.SleepFailed(worker="nap-1", serial=life.serial, reason="too little memory is left"))
    assert here.took() == ["Stop nap-1", "Forget nap-1"]


def test_one_that_can_not_be_woken_ends_and_is_started_instead() -> None:
    here = Sleepy(2, sleeping=1, gpus=2, hold=(events.Rouse,))
    here.scale(1)
    assert here.scale(2) == ["Rouse nap-1"]
    here.die("nap-1", restart=0.0)
    here.wait(0.1)
    assert here.took() == [
        *("Crashed nap-1", "Stop nap-1", "Spawn nap-1", "Probe nap-1", "PublishReplica nap-1", "DrainForgotten nap-1"),
    ]
    assert here.naps == {"nap-0": "ready", "nap-1": "ready"}


def test_one_that_is_wanted_again_while_it_falls_asleep_is_woken_at_once() -> None:
    here = Sleepy(2, sleeping=1, gpus=2, hold=(events.Sleep,))
    here.scale(1)
    assert here.scale(2) == []
    life = here.fleet.state.lives["nap-1"]
    here.post(events.Slept(worker="nap-1", serial=life.serial))
    assert here.naps == {"nap-0": "ready", "nap-1": "ready"}
    assert here.took()[0] == "Rouse nap-1"


def test_a_replica_that_is_drained_by_name_ends_also_while_it_sleeps() -> None:
    here = Sleepy(2, sleeping=1)
    here.scale(1)
    here.post(events.DrainDesired(worker="nap-1", at=1.0))
    assert "Stop nap-1" in here.took()
    assert "nap-1" not in here.naps


def test_a_restart_ends_those_that_sleep() -> None:
    here = Sleepy(2, sleeping=1)
    here.scale(1)
    here.post(events.RestartDesired(revision="r"))
    assert "Stop nap-1" in here.took()


def test_requests_that_were_cut_off_end_the_replica() -> None:
    here = Sleepy(2, sleeping=1)
    here.requests["nap-1"] = 1
    here.post(events.Desired(pool="nap", replicas=1, timeout=1.0))
    here.wait(2.0)
    assert here.naps == {"nap-0": "ready"}


def test_a_start_is_recorded_by_phases_that_sum_up_to_the_whole() -> None:
    here = Sleepy(1, sleeping=1, hold=(events.Probe, events.PublishReplica))
    life = here.fleet.state.lives["nap-0"]
    here.now += 4_000_000_000
    here.post(events.Probed(worker="nap-0", serial=life.serial, phases={"spawn": 0.5, "weights": 2.0, "compile": None}))
    here.now += 1_000_000_000
    here.post(events.Acknowledged(worker="nap-0", serial=life.publication))
    (replica,) = here.fleet.pools()["nap"].replicas or ()
    start = replica.start
    assert start is not None and start.seconds == 5.0 and not start.woken
    assert start.phases == {"spawn": 0.5, "weights": 2.0, "compile": None, "announce": 1.0}
    assert start.other == 1.5


def test_an_adopted_engine_has_no_start_since_nobody_saw_it() -> None:
    here = Driven(0)
    here.post(events.PoolAdded(pool="old", configured=Pool(model="m", desired=1), adopted={0: ()}))
    here.post(events.Begun())
    (replica,) = here.fleet.pools()["old"].replicas or ()
    assert replica.state == "ready" and replica.start is None
    here.die("old-0")
    here.wait(1.0)
    (replica,) = here.fleet.pools()["old"].replicas or ()
    assert replica.state == "ready" and replica.start is not None
