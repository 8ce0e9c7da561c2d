"""A planner's wish and a person's drain: who is drained by hand does not count, and stays drained."""

from penstock.runtime.cluster_state.desired_state import DESIRED, DRAINS, PLANNER, DrainSpec, PoolSpec, put
from tests.runtime.test_reconciler import Scene, scene, until

__all__ = ["scene"]


async def ready(here: Scene) -> list[str]:
    pools = await here.ward.connector.pools()
    return sorted(replica.id for replica in pools["main"].replicas if replica.state == "ready")


async def test_who_is_drained_by_hand_is_replaced_and_not_taken_back(scene):
    here = await scene(2)
    await put(here.store, DESIRED + "main", PoolSpec(replicas=2, by=PLANNER, timeout=5.0))
    await put(here.store, DRAINS + "main-0", DrainSpec())

    async def replaced() -> bool:
        return await ready(here) == ["main-1", "main-2"]

    await until(replaced)
    await put(here.store, DESIRED + "main", PoolSpec(replicas=3, by=PLANNER, timeout=5.0))

    async def three() -> bool:
        return len(await ready(here)) == 3

    await until(three)
    assert "main-0" not in await ready(here)  # a person's newer wish would have ended the drain
    assert here.fleet.driver.fleet.state.pools["main"].timeout == 5.0


async def test_a_person_takes_over_and_the_settings_say_again_how_long_a_drain_may_take(scene):
    here = await scene(1)
    await put(here.store, DESIRED + "main", PoolSpec(replicas=2, by=PLANNER, timeout=5.0))
    await here.ward.settled(ready=2)
    await put(here.store, DESIRED + "main", PoolSpec(replicas=1, by="key-1234"))
    await here.ward.settled(ready=1)
    assert here.fleet.driver.fleet.state.pools["main"].timeout is None
