"""Servers that others run join a pool and leave it."""

from collections import Counter

from penstock.fleet import events
from penstock.fleet.replica_lives import CHECKS_MAX
from penstock.kernel.values import Pool
from tests.fleet.test_fleet import Driven


class Attached(Driven):
    """A fleet with a pool of servers that come and go."""

    def __init__(self) -> None:
        super().__init__(replicas=0)
        self.post(events.PoolAdded(pool="pods", configured=Pool(model="m", desired=0), attached=True))
        self.post(events.Begun())
        self.took()

    def join(self, number: int = 0) -> None:
        self.post(events.ServerJoined(pool="pods", number=number))

    @property
    def servers(self) -> dict[str, str]:
        return {replica.id: replica.state for replica in self.fleet.pools()["pods"].replicas or ()}


def test_a_server_joins_without_being_started() -> None:
    here = Attached()
    here.join()
    assert here.took() == ["PublishReplica pods-0"]
    assert here.servers == {"pods-0": "ready"}
    assert here.fleet.pools()["pods"].desired == 1
    here.join()
    assert here.took() == []


def test_a_server_that_is_to_go_finishes_its_requests_first() -> None:
    here = Attached()
    here.join()
    here.took()
    here.requests["pods-0"] = 1
    here.post(events.ServerLeaving(worker="pods-0"))
    assert here.servers == {"pods-0": "draining"}
    life = here.fleet.state.lives["pods-0"]
    here.post(events.RequestsLeft(worker="pods-0", serial=life.publication, active=0, finished=1))
    assert [each for each in here.took() if each.startswith(("Withdraw", "Stop", "Forget"))] == [
        "Withdraw pods-0",
        "Stop pods-0",
        "Forget pods-0",
    ]
    assert here.servers == {}


def test_a_draining_server_that_is_ready_again_takes_requests_again() -> None:
    here = Attached()
    here.join()
    here.requests["pods-0"] = 1
    here.post(events.ServerLeaving(worker="pods-0"))
    here.took()
    here.join()
    assert here.took() == ["PublishReplica pods-0", "DrainForgotten pods-0"]
    assert here.servers == {"pods-0": "ready"}


def test_a_vanished_server_is_withdrawn_at_once() -> None:
    here = Attached()
    here.join()
    here.requests["pods-0"] = 3
    here.took()
    here.post(events.ServerLeaving(worker="pods-0", vanished=True))
    assert here.took() == ["Withdraw pods-0", "Forget pods-0"]
    assert here.servers == {}
    here.wait(5)
    assert here.took() == []  # it is not replaced: nobody here starts servers of others


def test_a_server_that_does_not_answer_goes_without_a_drain() -> None:
    here = Attached()
    here.hold = (events.Probe, events.PublishReplica)
    here.join()
    life = here.fleet.state.lives["pods-0"]
    here.post(events.PublishFailed(worker="pods-0", serial=life.publication, reason="serves another model"))
    here.took()
    here.post(events.ServerLeaving(worker="pods-0"))
    assert here.took() == ["Forget pods-0"]


def test_a_parked_server_that_is_deleted_goes() -> None:
    here = Attached()
    here.join()
    here.post(events.DrainDesired(worker="pods-0"))
    assert here.fleet.state.lives["pods-0"].phase == "parked"
    here.took()
    here.post(events.ServerLeaving(worker="pods-0"))
    assert here.took() == ["Withdraw pods-0", "Stop pods-0", "Forget pods-0"]


def test_a_server_that_leaves_before_it_was_announced_is_forgotten() -> None:
    here = Attached()
    here.hold = (events.PublishReplica,)
    here.join()
    here.post(events.ServerLeaving(worker="pods-0"))
    assert here.servers == {}
    here.post(events.ServerLeaving(worker="pods-7"))  # one that nobody knows


def _checks(here: Attached, seconds: int) -> Counter[str]:
    """Return worker -> its health checks within some time."""
    checks: Counter[str] = Counter()
    for _ in range(10 * seconds):
        here.wait(0.1)
        checks.update(each.removeprefix("Probe ") for each in here.took() if each.startswith("Probe "))
    return checks


def test_servers_of_a_large_fleet_that_are_well_are_checked_less_often_and_tell_nobody() -> None:
    few, many = Attached(), Attached()
    few.join()
    for number in range(600):
        many.join(number)
    few.took(), many.took()
    assert 9 <= _checks(few, 20)["pods-0"] <= 11
    longest = round(1.5 * 600 / CHECKS_MAX)
    told, checks = many.fleet.revision, _checks(many, longest)
    assert len(checks) == 600 and sum(checks.values()) <= 1.3 * longest * CHECKS_MAX
    assert many.fleet.revision == told, "checks of servers that are well show nowhere"


def test_a_server_of_a_large_fleet_that_missed_a_check_is_asked_again_soon() -> None:
    here = Attached()
    for number in range(600):
        here.join(number)
    here.took()
    here.hold = (events.Probe,)
    worker, waited = "", 0
    while not worker:
        here.wait(0.1)
        worker = next((each.removeprefix("Probe ") for each in here.took() if each.startswith("Probe ")), "")
    told = here.fleet.revision
    for lack in ("no answer", "no answer"):
        here.post(events.Probed(worker=worker, serial=here.fleet.state.lives[worker].serial, lack=lack))
        while f"Probe {worker}" not in here.took() and here.servers[worker] == "ready":
            here.wait(0.1)
            waited += 1
    assert waited <= 21 and here.servers[worker] != "ready" and here.fleet.revision > told
