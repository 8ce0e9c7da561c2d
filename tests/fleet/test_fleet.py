"""What a fleet does about one thing at a time, effect by effect."""

from collections.abc import Sequence
from typing import Any

from penstock.fleet import events
from penstock.fleet.fleet import Fleet
from penstock.fleet.fleet_state import FleetTimes
from penstock.fleet.gpu_allocator import GpuAllocator
from penstock.fleet.victims import to_flip
from penstock.kernel.machine import Effect, Event, Wake, Woken, nanos
from penstock.kernel.values import Pool, Replica


class Driven:
    """A fleet whose effects are carried out at once, but for those that a test holds back."""

    def __init__(self, replicas: int = 1, *, gpus: int = 0, each: int = 0, hold: Sequence[type] = ()) -> None:
        self.fleet = Fleet(FleetTimes(), GpuAllocator.over(range(gpus), "the test"))
        self.now = 0
        self.hold = hold
        self.effects: list[Any] = []
        self.requests: dict[str, int] = {}
        self.post(events.PoolAdded(pool="main", configured=Pool(model="m", desired=replicas), gpus=each))
        self.post(events.Begun())

    def post(self, event: Event) -> None:
        queue = [event]
        while queue:
            effects = self.fleet.handle(self.now, queue.pop(0))
            self.fleet.check()
            self.effects += [effect for effect in effects if not isinstance(effect, Wake)]
            for effect in effects:
                if not isinstance(effect, tuple(self.hold)):
                    queue += self.answers(effect)

    def answers(self, effect: Effect) -> list[Event]:
        match effect:
            case events.Spawn():
                return [events.Started(worker=effect.worker, serial=effect.serial, pid=effect.serial)]
            case events.Probe():
                return [events.Probed(worker=effect.worker, serial=effect.serial)]
            case events.PublishReplica():
                return [events.Acknowledged(worker=effect.worker, serial=effect.serial)]
            case events.CountRequests():
                active = self.requests.get(effect.worker, 0)
                return [events.RequestsLeft(worker=effect.worker, serial=effect.serial, active=active)]
            case events.Stop():
                return [events.Stopped(worker=effect.worker, serial=effect.serial)]
            case events.ReplaceFrontend():
                return [events.FrontendReplaced(index=effect.index)]
        return []

    def wait(self, seconds: float) -> None:
        """Let time pass; the machine is woken when it asked for that."""
        end = self.now + nanos(seconds)
        while (due := self.fleet.state.woken_at) is not None and due <= end:
            self.now = due
            self.post(Woken())
        self.now = end

    def die(self, worker: str, **how: Any) -> None:
        life = self.fleet.state.lives[worker]
        self.post(events.Died(worker=worker, serial=life.serial, reason="was killed", **how))

    def took(self) -> list[str]:
        """Return the effects since the last call, as words."""
        found, self.effects = self.effects, []
        return [f"{type(e).__name__} {getattr(e, 'worker', '')}".strip() for e in found]

    @property
    def states(self) -> dict[str, str]:
        return {replica.id: replica.state for replica in self.fleet.pools()["main"].replicas or ()}


def test_a_replica_comes_and_goes_step_by_step() -> None:
    here = Driven()
    assert here.took() == ["Spawn main-0", "Probe main-0", "PublishReplica main-0"]
    assert here.states == {"main-0": "ready"}
    here.post(events.Desired(pool="main", replicas=0))
    assert [word for word in here.took() if "Report" not in word] == [
        *("PublishReplica main-0", "CountRequests main-0", "Withdraw main-0", "Stop main-0", "Forget main-0"),
    ]
    assert here.states == {}


def test_a_frontend_that_died_holds_nobody_up_for_long() -> None:
    here = Driven(hold=(events.PublishReplica,))
    life = here.fleet.state.lives["main-0"]
    here.post(events.Published(worker="main-0", serial=life.publication))
    here.wait(2.9)
    assert here.states == {"main-0": "starting"}
    here.wait(0.2)
    assert here.states == {"main-0": "ready"}


def test_a_drain_of_a_worker_that_is_not_there_changes_nothing() -> None:
    here = Driven(2)
    here.took()
    here.post(events.DrainDesired(worker="main-7", at=1.0))
    here.post(events.DrainDesired(worker="other-0", at=1.0))
    assert here.took() == []
    assert here.states == {"main-0": "ready", "main-1": "ready"}


def test_requests_that_run_at_the_deadline_end_before_the_frontends_drop_the_worker() -> None:
    here = Driven()
    here.requests["main-0"] = 3
    here.took()
    here.post(events.Desired(pool="main", replicas=0, timeout=5.0))
    here.wait(4.9)
    assert here.states == {"main-0": "draining"}
    here.wait(0.2)
    report = here.effects[-4]
    assert (report.state, report.cut, report.seconds) == ("done", 3, 5.0)
    assert here.took()[-4:] == ["DrainReported main-0", "Stop main-0", "Withdraw main-0", "Forget main-0"]


def test_a_worker_that_is_wanted_after_all_stays_as_it_is() -> None:
    here = Driven(2, hold=(events.CountRequests,))
    here.post(events.Desired(pool="main", replicas=1))
    here.took()
    here.post(events.Desired(pool="main", replicas=2))
    assert here.took() == ["PublishReplica main-1", "DrainForgotten main-1"]


def test_waits_double_with_each_crash_and_begin_anew_after_a_long_life() -> None:
    here = Driven()
    waits = []
    for _ in range(8):
        here.die("main-0")
        waits += [effect.wait for effect in here.effects if isinstance(effect, events.Crashed)]
        here.took()
        here.wait(waits[-1] - 0.001)
        assert here.states == {"main-0": "failed"}
        here.wait(0.002)
        assert here.states == {"main-0": "ready"}
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    here.took()
    here.wait(31.0)
    here.die("main-0")
    assert here.effects[0].wait == 0.5
    assert here.fleet.state.restarts == 9


def test_one_that_is_given_up_is_replaced_only_by_a_new_decision() -> None:
    here = Driven(2, gpus=2, each=1)
    here.die("main-1", restart="never")
    here.wait(100.0)
    assert here.states == {"main-0": "ready", "main-1": "failed"}
    assert here.fleet.state.gpus.free == 1
    here.post(events.Desired(pool="main", replicas=2, by_planner=True))
    assert here.states == {"main-0": "ready", "main-1": "ready"}


def test_who_does_not_serve_goes_first_then_the_youngest() -> None:
    here = Driven(2)
    here.now = 1
    here.post(events.Desired(pool="main", replicas=3))
    here.die("main-0")
    here.post(events.Desired(pool="main", replicas=2))
    assert here.states == {"main-1": "ready", "main-2": "ready"}
    here.post(events.Desired(pool="main", replicas=1))
    assert here.states == {"main-1": "ready"}


def test_a_change_of_role_takes_the_youngest_that_serve() -> None:
    replicas = [Replica(id=f"main-{n}", state="ready", role="prefill") for n in (0, 2, 10)]
    replicas.append(Replica(id="main-11", state="draining", role="prefill"))
    pools = [Pool(model="m", desired=4, replicas=tuple(replicas)), Pool(model="other", desired=1)]
    assert to_flip(pools, "m", "prefill", 2) == ["main-10", "main-2"]
    assert to_flip(pools, "m", "decode", 2) == []


def test_a_role_changes_once_the_worker_is_idle_and_back_again() -> None:
    here = Driven(2)
    here.requests["main-1"] = 1
    here.took()
    here.post(events.RoleDesired(worker="main-1", role="decode"))
    replica = here.fleet.pools()["main"].replicas[1]
    assert (replica.state, replica.role, replica.reason) == ("draining", "aggregated", "becomes decode once it is idle")
    serial = here.fleet.state.lives["main-1"].publication
    here.post(events.RequestsLeft(worker="main-1", serial=serial, active=0, finished=1))
    assert (here.states["main-1"], here.fleet.pools()["main"].replicas[1].role) == ("ready", "decode")
    here.requests.clear()
    here.post(events.RoleDesired(worker="main-1", role=None))
    assert here.fleet.pools()["main"].replicas[1].role == "aggregated"
    assert "Stop main-1" not in here.took()


def test_a_restart_replaces_one_after_another_and_names_stay() -> None:
    here = Driven(2)
    here.took()
    here.post(events.RestartDesired(revision="r", frontends=(0,)))
    spawned = [word for word in here.took() if word.startswith(("Spawn", "Stop", "Replace"))]
    assert spawned == [
        *("Spawn main-2", "Stop main-0", "Spawn main-0", "Stop main-1", "Spawn main-1", "Stop main-2"),
        "ReplaceFrontend",
    ]
    assert here.states == {"main-0": "ready", "main-1": "ready"}


def test_a_restart_takes_gpus_from_the_predecessor_where_there_are_no_others() -> None:
    here = Driven(2, gpus=2, each=1)
    here.took()
    here.post(events.RestartDesired(revision="r"))
    spawned = [word for word in here.took() if word.startswith(("Spawn", "Stop"))]
    assert spawned == ["Stop main-0", "Spawn main-0", "Stop main-1", "Spawn main-1"]


def test_the_last_engine_on_the_last_gpu_is_restarted_only_by_force() -> None:
    here = Driven(1, gpus=1, each=1)
    here.took()
    here.post(events.RestartDesired(revision="r"))
    (_, report) = here.effects
    assert report.state == "failed" and "--force" in str(report.problem)
    assert str(report.problem).endswith("refused ('penstock restart --force' does it all the same)"), "as errors say it"
    here.took()
    here.post(events.RestartDesired(revision="s", force=True))
    assert [word for word in here.took() if word.startswith(("Spawn", "Stop"))] == ["Stop main-0", "Spawn main-0"]


def test_answers_to_former_effects_change_nothing() -> None:
    here = Driven()
    before = here.fleet.snapshot()
    life = here.fleet.state.lives["main-0"]
    for event in (
        events.Died(worker="main-0", serial=life.serial - 1, reason="was killed"),
        events.PublishFailed(worker="main-0", serial=life.publication - 1, reason="it is unfit"),
        events.RequestsLeft(worker="main-0", serial=life.publication, active=0),
        events.Stopped(worker="main-0", serial=life.serial),
        events.Died(worker="nobody", serial=1, reason="was killed"),
    ):
        here.post(event)
    assert here.fleet.snapshot() == before


class Stuck(Driven):
    """A fleet whose one engine may be stuck."""

    def __init__(self, *, watched: bool = True) -> None:
        self.stuck: set[str] = set()
        super().__init__(replicas=0)
        self.post(events.PoolAdded(pool="own", configured=Pool(model="m", desired=1), watched=watched))
        self.post(events.Begun())
        self.took()

    def answers(self, effect: Effect) -> list[Event]:
        if isinstance(effect, events.Probe) and effect.worker in self.stuck:
            lack = "no answer to its health check within 5 s"
            return [events.Probed(worker=effect.worker, serial=effect.serial, lack=lack, silent=True)]
        return super().answers(effect)

    def marks(self) -> list[str]:
        """Return what was done since the last call, but for probes."""
        return [each for each in dict.fromkeys(self.took()) if not each.startswith("Probe")]


def test_an_engine_that_is_stuck_is_avoided_within_seconds_and_started_again() -> None:
    here = Stuck()
    here.stuck.add("own-0")
    here.wait(5.0)
    assert here.marks() == ["MarkSilent own-0"]
    here.wait(50.0)
    assert here.marks() == ["MarkSilent own-0"], "it may be busy"
    here.wait(15.0)
    assert here.marks()[:5] == ["MarkSilent own-0", "Crashed own-0", "Withdraw own-0", "Stop own-0", "Spawn own-0"]
    here.stuck.clear()
    here.wait(5.0)
    assert here.fleet.state.lives["own-0"].phase == "ready" and here.marks()[-1] != "MarkSilent own-0"


def test_an_engine_that_was_only_busy_is_not_started_again() -> None:
    here = Stuck()
    here.stuck.add("own-0")
    here.wait(40.0)
    here.stuck.clear()
    here.wait(40.0)
    here.stuck.add("own-0")
    here.wait(40.0)
    assert here.marks() == ["MarkSilent own-0"]


def test_a_fleet_on_virtual_time_is_not_asked_for_its_health() -> None:
    here = Stuck(watched=False)
    here.wait(100.0)
    assert here.took() == []
