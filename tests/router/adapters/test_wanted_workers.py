"""Is an adapter on as many workers as an operator wants: loaded where that costs least, kept, loaded elsewhere?"""

from penstock.kernel.values import RequestId, WorkerId
from penstock.router.events import (
    AdapterChange,
    AdapterFailed,
    AdapterLoaded,
    AdaptersListed,
    AdaptersWanted,
    Dispatch,
    Finished,
    WorkerLeft,
)
from penstock.router.router import Router
from penstock.router.settings import QueueSettings, RouterSettings
from penstock.testing import RouterWorld, arrived, card, none, only
from penstock.testing.router_world import MODEL


def world_of(*names: str, slots: int = 2, **settings: object) -> RouterWorld:
    return RouterWorld(*(card(name, adapter_slots=slots) for name in names), **settings)


def changes(
    world: RouterWorld, decides: bool = True, /, **workers: int
) -> list[tuple[str, str | None, tuple[str, ...]]]:
    effects = world.post(AdaptersWanted(model=MODEL, workers=workers, decides=decides))
    return [(one.card.id, one.load, one.unload) for one in effects if isinstance(one, AdapterChange)]


def loaded(world: RouterWorld, worker: str, adapter: str) -> None:
    world.post(AdapterLoaded(worker=WorkerId(worker), epoch=1, adapter=adapter, seconds=0.1))


def holders(world: RouterWorld, adapter: str) -> set[str]:
    return {str(worker) for worker in world.router.pools[MODEL].adapters.holders(adapter)}


def test_it_is_loaded_on_so_many_workers_once() -> None:
    world = world_of("a", "b", "c")
    first = changes(world, sql=2)
    assert {load for _, load, _ in first} == {"sql"} and len({worker for worker, _, _ in first}) == 2
    assert changes(world, sql=2) == [], "they are on their way"
    for worker, _, _ in first:
        loaded(world, worker, "sql")
    assert changes(world, sql=2) == []
    assert len(changes(world, sql=9)) == 1 and holders(world, "sql") == {"a", "b", "c"}


def test_the_least_loaded_workers_get_it() -> None:
    world = world_of("a", "b", "c")
    for number in range(9):
        world.post(arrived(f"r{number}", [number * 50 + n for n in range(8)]))
    busy = world.router.pools[MODEL].active
    loads = {
        worker.card.id: sum(busy.load(target).requests for target in worker.targets) for worker in world.router.roster
    }
    for name in [name for name in sorted(world.router.requests) if name != "r0"]:
        if str(world.router.requests[name].target.worker) != "a":  # type: ignore[union-attr]
            world.post(Finished(id=RequestId(name), attempt=1, tokens=1))
    assert loads["a"] and {worker for worker, _, _ in changes(world, sql=2)} == {"b", "c"}


def test_it_makes_room_for_no_other_where_it_is_needed() -> None:
    world = world_of("a", slots=2)
    changes(world, sql=1)
    loaded(world, "a", "sql")
    for name in ("one", "two", "three"):
        effects = world.post(arrived(name, adapter=name))
        change = only(effects, AdapterChange)
        assert "sql" not in change.unload
        loaded(world, "a", name)
        world.post(Finished(id=RequestId(name), attempt=1, tokens=1))
    assert changes(world) == [("a", None, ("sql",))], "nobody wants it any more"


def test_workers_full_of_wanted_adapters_take_no_others() -> None:
    world = world_of("a", slots=1, queue=QueueSettings(wait_max=5.0))
    changes(world, sql=1)
    loaded(world, "a", "sql")
    assert none(world.post(arrived("r", adapter="other")), Dispatch) and world.router.waiting(MODEL) == 1
    assert only(world.post(AdaptersWanted(model=MODEL, workers={})), Dispatch).id == "r"


def test_copies_that_came_by_demand_make_room_as_ever() -> None:
    world = world_of("a", "b", slots=1)
    changes(world, sql=1)
    (home,) = holders(world, "sql")
    loaded(world, home, "sql")
    other = WorkerId("b" if home == "a" else "a")
    world.post(AdaptersListed(worker=other, epoch=1, names=("sql",)))
    change = only(world.post(arrived("r", adapter="new")), AdapterChange)
    assert change.unload == ("sql",) and len(holders(world, "sql")) == 1
    loaded(world, str(change.card.id), "new")
    assert none(world.post(arrived("s", adapter="third")), AdapterChange), "the last one stays"


def test_fewer_workers_unload_it_and_none_in_use() -> None:
    world = world_of("a", "b", "c")
    for worker, _, _ in changes(world, sql=3):
        loaded(world, worker, "sql")
    used = only(world.post(arrived("r", adapter="sql")), Dispatch).target.worker
    gone = changes(world, sql=1)
    assert len(gone) == 2 and used not in {worker for worker, _, _ in gone} and holders(world, "sql") == {used}
    assert all(unload == ("sql",) for _, _, unload in gone)


def test_it_is_loaded_elsewhere_once_a_worker_goes_or_can_not_load_it() -> None:
    world = world_of("a", "b", "c")
    first = {worker for worker, _, _ in changes(world, sql=2)}
    for worker in first:
        loaded(world, worker, "sql")
    victim = sorted(first)[0]
    world.post(WorkerLeft(worker=WorkerId(victim), epoch=1, reason="test"))
    (third,) = changes(world, sql=2)
    assert third[0] not in first and third[1] == "sql"
    world.post(AdapterFailed(worker=WorkerId(third[0]), epoch=1, adapter="sql", reason="no such folder"))
    assert changes(world, sql=2) == [], "it is not asked again for a while"
    assert changes(world, sql=2) == []
    world.post(AdaptersWanted(model=MODEL, workers={"sql": 2}), after=11.0)
    assert third[0] in holders(world, "sql")


def test_only_one_router_decides_and_all_keep_it() -> None:
    world = world_of("a", slots=1)
    assert changes(world, False, sql=1) == [] and holders(world, "sql") == set()
    world.post(AdaptersListed(worker=WorkerId("a"), epoch=1, names=("sql",)))
    assert none(world.post(arrived("r", adapter="other")), AdapterChange)
    assert changes(world, False) == []


def test_a_restored_router_wants_the_same() -> None:
    world = world_of("a", slots=1)
    changes(world, sql=1)
    again = Router(RouterSettings(), name="router", seed=1)
    again.restore(world.router.snapshot())
    assert again.pools[MODEL].adapters.wanted == {"sql": 1}
