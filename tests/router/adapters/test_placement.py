"""Where does a request with a LoRA adapter go, and what is loaded and unloaded for it?"""

from penstock.kernel.machine import Woken
from penstock.kernel.values import RequestId, Target, WorkerId
from penstock.router.events import (
    AdapterChange,
    AdapterDesired,
    AdapterDropped,
    AdapterFailed,
    AdapterLoaded,
    AdapterMissing,
    AdaptersListed,
    Dispatch,
    Failed,
    Finished,
    FirstToken,
    PeerUpdate,
    Placement,
    Publish,
    WorkerJoined,
    WorkerLeft,
)
from penstock.router.router import Router
from penstock.router.settings import CostSettings, QueueSettings, RouterSettings
from penstock.testing import RouterWorld, arrived, card, none, only
from penstock.testing.router_world import MODEL

A, B = WorkerId("a"), WorkerId("b")


def world_of(*names: str, slots: int = 2, **settings: object) -> RouterWorld:
    return RouterWorld(*(card(name, adapter_slots=slots) for name in names), **settings)


def loaded(world: RouterWorld, worker: WorkerId, adapter: str, seconds: float = 0.1) -> None:
    world.post(AdapterLoaded(worker=worker, epoch=1, adapter=adapter, seconds=seconds))


def done(world: RouterWorld, name: str) -> None:
    world.post(Finished(id=RequestId(name), attempt=1, tokens=1))


def test_a_cold_adapter_is_loaded_before_its_request_is_sent() -> None:
    world = world_of("a")
    effects = world.post(arrived("r", adapter="sql"))
    change, dispatch = only(effects, AdapterChange), only(effects, Dispatch)
    assert (change.card.id, change.load, change.unload) == ("a", "sql", ())
    assert effects.index(change) < effects.index(dispatch)
    assert dispatch.decision.adapter == "adapter sql is loaded" and dispatch.decision.candidates[0].adapter > 0
    second = world.post(arrived("s", adapter="sql"))
    assert none(second, AdapterChange) and only(second, Dispatch).decision.adapter == "adapter sql is being loaded"
    loaded(world, A, "sql")
    third = only(world.post(arrived("t", adapter="sql")), Dispatch).decision
    assert third.adapter == "adapter sql is resident" and third.candidates[0].adapter == 0.0


def test_a_request_goes_where_its_adapter_is() -> None:
    world = world_of("a", "b")
    home = only(world.post(arrived("r", adapter="sql")), Dispatch).target.worker
    loaded(world, home, "sql")
    for number in range(4):
        dispatch = only(
            world.post(arrived(f"s{number}", [number * 100 + n for n in range(4)], adapter="sql")), Dispatch
        )
        assert dispatch.target.worker == home
    assert only(world.post(arrived("other", adapter="chat")), Dispatch).target.worker != home


def test_a_hot_adapter_is_loaded_on_another_worker_once_its_load_costs_more_than_that() -> None:
    for kind in ("blocks", "latency"):
        world = world_of("a", "b", cost=CostSettings(kind=kind))
        first = only(world.post(arrived("r", adapter="sql")), Dispatch).target.worker
        loaded(world, first, "sql")
        homes = []
        for number in range(400):
            tokens = list(range(number * 1000, number * 1000 + 90))
            homes.append(only(world.post(arrived(f"s{number}", tokens, adapter="sql")), Dispatch).target.worker)
            if homes[-1] != first:
                break
        assert homes[0] == first and set(homes) == {A, B}, kind
        assert homes.index(B if first == A else A) > 5, kind


def test_the_least_recently_used_adapter_without_a_request_makes_room() -> None:
    world = world_of("a")
    for name in ("one", "two"):
        world.post(arrived(name, adapter=name))
        loaded(world, A, name)
    done(world, "one")
    done(world, "two")
    world.post(arrived("again", adapter="one"))
    done(world, "again")
    change = only(world.post(arrived("three", adapter="three")), AdapterChange)
    assert change.unload == ("two",)
    assert world.sent("three").decision.adapter == "adapter three is loaded in place of two"


def test_an_adapter_in_use_is_not_unloaded_and_the_request_waits_for_room() -> None:
    world = world_of("a")
    for name in ("one", "two"):
        world.post(arrived(name, adapter=name))
        loaded(world, A, name)
    effects = world.post(arrived("three", adapter="three"))
    assert none(effects, Dispatch) and none(effects, AdapterChange) and world.router.waiting(MODEL) == 1
    effects = world.post(Finished(id=RequestId("two"), attempt=1, tokens=1))
    assert only(effects, AdapterChange).unload == ("two",)
    assert world.sent("three").target == Target(A, 0)


def test_nobody_waits_for_room_for_ever() -> None:
    world = world_of("a", slots=1, queue=QueueSettings(wait_max=5.0))
    world.post(arrived("one", adapter="one"))
    loaded(world, A, "one")
    world.post(arrived("two", adapter="two"))
    world.post(Woken(), after=5.1)
    ended = world.ended("two")
    assert (ended.status, ended.fault) == (503, "overloaded") and "room for adapter two" in ended.reason


def test_a_worker_that_could_not_load_it_is_left_out_for_a_while() -> None:
    world = world_of("a", "b")
    first = only(world.post(arrived("r", adapter="sql")), Dispatch).target.worker
    world.post(AdapterFailed(worker=first, epoch=1, adapter="sql", reason="no such folder"))
    effects = world.post(
        Failed(id=RequestId("r"), attempt=1, reason="x", retryable=True, worker_at_fault=False, status=404)
    )
    second = only(effects, Dispatch)
    assert second.target.worker != first and only(effects, AdapterChange).card.id == second.target.worker
    world.post(AdapterFailed(worker=second.target.worker, epoch=1, adapter="sql", reason="no such folder"))
    world.post(Failed(id=RequestId("r"), attempt=2, reason="no", retryable=True, worker_at_fault=False, status=404))
    assert world.ended("r").status == 404
    world.post(arrived("s", adapter="sql"))
    assert world.ended("s").status == 503 and "no such folder" in world.ended("s").reason
    world.post(arrived("t", adapter="sql"), after=11.0)
    assert world.sent("t").attempt == 1
    assert all(worker.breaker == "closed" for worker in world.router.status(world.now).workers)


def test_what_an_engine_does_not_hold_is_loaded_again() -> None:
    world = world_of("a", slots=1)
    world.post(arrived("r", adapter="sql"))
    loaded(world, A, "sql")
    change = only(world.post(AdapterMissing(worker=A, epoch=1, adapter="sql")), AdapterChange)
    assert change.load == "sql"
    assert none(world.post(AdapterMissing(worker=A, epoch=1, adapter="sql")), AdapterChange)  # it is on its way
    assert world.router.status(world.now).models[0].adapters["missing"] == 1


def test_what_a_worker_lists_as_it_comes_is_not_unloaded_until_it_is_known_where_it_lies() -> None:
    world = RouterWorld(card("a", adapter_slots=1, adapters=("own",)))
    assert none(world.post(arrived("r", adapter="sql")), Dispatch)
    assert only(world.post(arrived("s", adapter="own")), Dispatch).decision.adapter == "adapter own is resident"
    done(world, "s")
    effects = world.post(AdaptersListed(worker=A, epoch=1, names=("own",)))
    assert only(effects, AdapterChange).unload == ("own",) and only(effects, Dispatch).id == "r"


def test_a_worker_that_loads_nothing_serves_what_it_listed() -> None:
    world = RouterWorld(card("a", adapters=("fixed",)), card("b", adapter_slots=1))
    effects = world.post(arrived("r", adapter="fixed"))
    assert only(effects, Dispatch).target.worker == "a" and none(effects, AdapterChange)
    assert only(world.post(arrived("s", adapter="sql")), Dispatch).target.worker == "b"


def test_operators_wishes_load_once_and_unload_everywhere() -> None:
    world = world_of("a", "b")
    change = only(world.post(AdapterDesired(model=MODEL, adapter="sql")), AdapterChange)
    assert change.load == "sql"
    assert none(world.post(AdapterDesired(model=MODEL, adapter="sql")), AdapterChange)
    world.post(AdapterMissing(worker=B if change.card.id == A else A, epoch=1, adapter="sql"))
    dropped = [one for one in world.post(AdapterDropped(model=MODEL, adapter="sql")) if isinstance(one, AdapterChange)]
    assert {(one.card.id, one.load, one.unload) for one in dropped} == {("a", None, ("sql",)), ("b", None, ("sql",))}
    assert world.router.pools[MODEL].adapters.holders("sql") == []


def test_routers_tell_each_other_what_was_loaded_and_what_is_in_use() -> None:
    world = world_of("a", slots=1)
    there = Placement(step="placed", id=RequestId("p"), model=MODEL, target=Target(A, 0), adapter="sql")
    world.post(PeerUpdate(router="other", placement=there))
    assert world.router.pools[MODEL].adapters.holders("sql") == ["a"]
    assert none(world.post(arrived("r", adapter="chat")), Dispatch)  # the other router's request runs with it
    ended = Placement(step="ended", id=RequestId("p"), model=MODEL, target=Target(A, 0))
    effects = world.post(PeerUpdate(router="other", placement=ended))
    assert only(effects, AdapterChange).unload == ("sql",)


def test_a_worker_that_routers_have_overfilled_takes_no_more_until_enough_are_idle() -> None:
    world = world_of("a", slots=2)
    for name in ("p", "q", "s"):  # another router decided before it heard of ours
        there = Placement(step="placed", id=RequestId(name), model=MODEL, target=Target(A, 0), adapter=f"of-{name}")
        world.post(PeerUpdate(router="other", placement=there))
    effects = world.post(arrived("r", adapter="sql"))
    for name in ("p", "q"):
        assert none(effects, Dispatch)
        ended = Placement(step="ended", id=RequestId(name), model=MODEL, target=Target(A, 0))
        effects = world.post(PeerUpdate(router="other", placement=ended))
    assert only(effects, AdapterChange).unload == ("of-p", "of-q") and only(effects, Dispatch).id == "r"


def test_a_placement_says_what_it_had_unloaded() -> None:
    router = Router(RouterSettings(), shared=True)
    router.handle(0, WorkerJoined(card=card("a", adapter_slots=1)))
    router.handle(1, arrived("r", adapter="sql"))
    router.handle(2, Finished(id=RequestId("r"), attempt=1, tokens=1))
    router.handle(3, AdapterLoaded(worker=A, epoch=1, adapter="sql", seconds=0.1))
    placed = only(router.handle(4, arrived("s", adapter="chat")), Publish).placement
    assert (placed.adapter, placed.unloaded) == ("chat", ("sql",))


def test_a_first_token_that_waited_for_an_adapter_teaches_no_speed() -> None:
    world = world_of("a")
    world.post(arrived("r", adapter="sql"))
    world.post(FirstToken(id=RequestId("r"), attempt=1), after=9.0)
    untaught = RouterWorld(card("a")).router.pools[MODEL]
    assert world.router.pools[MODEL].speeds.snapshot() == untaught.speeds.snapshot()


def test_a_worker_that_comes_back_holds_nothing() -> None:
    world = world_of("a")
    world.post(arrived("r", adapter="sql"))
    loaded(world, A, "sql")
    world.post(WorkerLeft(worker=A, epoch=1, reason="killed"))
    world.post(WorkerJoined(card=card("a", epoch=2, adapter_slots=2)))
    loaded(world, A, "late")  # of the life before
    assert world.router.pools[MODEL].adapters.workers[A].resident == {}


def test_requests_without_an_adapter_see_nothing_of_it() -> None:
    world = world_of("a", "b")
    effects = world.post(arrived("r"))
    assert none(effects, AdapterChange)
    decision = only(effects, Dispatch).decision
    assert decision.adapter == "" and all(cost.adapter == 0.0 for cost in decision.candidates)
