"""How are engines of an earlier supervisor taken over and replaced where they would be started in another way now?"""

from collections.abc import Collection
from typing import Any

import pytest

from penstock.fleet import events
from penstock.fleet.fleet import Fleet
from penstock.fleet.fleet_state import FleetTimes
from penstock.fleet.gpu_allocator import GpuAllocator
from penstock.kernel.machine import Effect, Event, Wake
from penstock.kernel.values import Pool
from tests.fleet.test_fleet import Driven


class TakenOver(Driven):
    """A fleet with engines that ran before it.

    Args:
        known: numbers of those that frontends know.
        draining: numbers of those to which frontends give no requests any more.
        broken: workers that never serve.
        strategy: ``surge`` and ``unavailable`` of its pool.
    """

    def __init__(
        self,
        desired: int,
        adopted: Collection[int],
        outdated: Collection[int],
        *,
        known: Collection[int] | None = None,
        draining: Collection[int] = (),
        gpus: int = 0,
        broken: Collection[str] = (),
        unplaced: Collection[str] = (),
        **strategy: Any,
    ) -> None:
        self.fleet = Fleet(FleetTimes(), GpuAllocator.over(range(gpus), "the test"))
        self.now = 0
        self.hold = ()
        self.effects: list[Any] = []
        self.requests: dict[str, int] = {}
        self.broken, self.unplaced = set(broken), set(unplaced)
        each = int(gpus > 0)
        taken = {number: (place,) * each for place, number in enumerate(adopted)}
        configured = Pool(model="m", desired=desired)
        self.post(
            events.PoolAdded(
                pool="main",
                configured=configured,
                gpus=each,
                adopted=taken,
                outdated=frozenset(outdated),
                **strategy,
            )
        )
        for number in adopted if known is None else known:
            aside = number in draining
            self.post(events.Recalled(worker=f"main-{number}", role="aggregated", draining=aside))
        self.post(events.Begun())

    def answers(self, effect: Effect) -> list[Event]:
        if isinstance(effect, events.Probe) and effect.worker in self.broken | self.unplaced:
            unplaced = effect.worker in self.unplaced
            why = "it is not scheduled" if unplaced else "its container waits"
            return [events.Probed(worker=effect.worker, serial=effect.serial, lack=why, unplaced=unplaced)]
        return super().answers(effect)

    def gone(self) -> list[str]:
        """Return who was announced as draining, started or ended, in order, but for what was taken over."""
        words = []
        for effect in self.effects:
            if isinstance(effect, events.PublishReplica) and effect.draining:
                words.append(f"drain {effect.worker}")
            elif isinstance(effect, events.Spawn | events.Stop):
                words.append(f"{type(effect).__name__.lower()} {effect.worker}")
        self.effects.clear()
        return words

    @property
    def waiting(self) -> dict[str, str]:
        return {each.id: each.outdated for each in self.fleet.pools()["main"].replicas or () if each.outdated}


def test_what_is_outdated_is_replaced_and_nothing_else() -> None:
    here = TakenOver(3, (0, 1, 2), outdated=(1,))
    assert here.gone()[3:] == ["spawn main-3", "drain main-1", "stop main-1"]
    assert set(here.states.values()) == {"ready"} and not here.waiting


def test_what_a_later_pool_brings_outdated_is_replaced_as_well() -> None:
    here = TakenOver(1, (0,), outdated=())
    here.gone()
    pool = Pool(model="m", desired=2)
    here.post(events.PoolAdded(pool="other", configured=pool, adopted={0: (), 1: ()}, outdated=frozenset({1})))
    for number in range(2):
        here.post(events.Recalled(worker=f"other-{number}", role="aggregated", draining=False))
    here.post(events.Begun())
    assert here.gone()[-3:] == ["spawn other-2", "drain other-1", "stop other-1"]


@pytest.mark.parametrize("draining", range(3))
def test_one_that_drained_already_is_the_one_that_goes(draining: int) -> None:
    """An operator that is replaced amid a scale-down had told frontends so: with another victim nobody may serve."""
    here = TakenOver(2, (0, 1, 2), outdated=(), draining=(draining,))
    assert here.gone()[-2:] == [f"drain main-{draining}", f"stop main-{draining}"]
    assert here.states == {f"main-{number}": "ready" for number in range(3) if number != draining}


def test_on_full_gpus_each_is_drained_before_its_successor_comes() -> None:
    here = TakenOver(2, (0, 1), outdated=(0, 1), gpus=2)
    assert here.gone()[2:] == [
        *("drain main-0", "stop main-0", "spawn main-0"),
        *("drain main-1", "stop main-1", "spawn main-1"),
    ]
    assert here.states == {"main-0": "ready", "main-1": "ready"} and not here.waiting


def test_none_goes_before_the_others_are_seen_to_serve() -> None:
    here = TakenOver(2, (0, 1), outdated=(0, 1), gpus=2, broken={"main-1"})
    assert here.gone()[2:] == [] and here.waiting["main-0"] == "others of its pool do not serve yet"
    here.broken.clear()
    here.wait(1.0)
    assert set(here.states.values()) == {"ready"} and not here.waiting


def test_one_that_serves_nobody_goes_first_and_at_once() -> None:
    here = TakenOver(2, (0, 1), outdated=(0, 1), known=(0,), gpus=2, broken={"main-1"})
    assert here.gone()[2:4] == ["stop main-1", "spawn main-1"]


def test_a_revert_amid_a_restart_takes_back_the_one_that_came() -> None:
    here = TakenOver(2, (0, 1, 2), outdated=(2,), known=(0, 1), broken={"main-2"})
    assert here.gone()[3:] == ["stop main-2"]
    assert here.states == {"main-0": "ready", "main-1": "ready"}


def test_another_supervisor_amid_a_restart_goes_on_with_it() -> None:
    here = TakenOver(2, (0, 1, 2), outdated=(0, 1))
    assert here.gone()[3:] == ["drain main-0", "stop main-0", "spawn main-0", "drain main-1", "stop main-1"]
    assert here.states == {"main-0": "ready", "main-2": "ready"}


def test_one_too_many_that_serves_is_drained() -> None:
    here = TakenOver(1, (0, 1), outdated=())
    assert here.gone()[2:] == ["drain main-1", "stop main-1"]


def test_one_that_is_drained_while_it_is_looked_at_is_drained() -> None:
    here = TakenOver(2, (0, 1), outdated=(), broken={"main-1"})
    here.gone()
    here.post(events.Desired(pool="main", replicas=1))
    assert here.gone() == ["drain main-1", "stop main-1"]


def test_one_that_ends_while_it_is_looked_at_is_taken_from_the_frontends() -> None:
    here = TakenOver(1, (0,), outdated=(0,), broken={"main-0"})
    here.took()
    here.broken.clear()
    here.die("main-0")
    assert "Withdraw main-0" in here.took()
    here.wait(1.0)
    assert list(here.states.values()) == ["ready"] and not here.waiting, "what was started anew is as it should be"


def test_a_last_engine_without_a_gpu_for_its_successor_waits_and_says_so() -> None:
    here = TakenOver(1, (0,), outdated=(0,), gpus=1)
    assert here.states == {"main-0": "ready"} and "maxUnavailable" in here.waiting["main-0"]
    here.post(events.Desired(pool="main", replicas=0))
    here.post(events.Desired(pool="main", replicas=1))
    assert not here.waiting, "a new one is as it should be"
    freed = TakenOver(1, (0,), outdated=(0,), gpus=1, unavailable=1)
    assert freed.gone()[1:] == ["drain main-0", "stop main-0", "spawn main-0"]


def test_an_order_to_restart_all_does_not_wait_for_a_last_engine() -> None:
    here = TakenOver(1, (0,), outdated=(0,), gpus=1)
    here.took()
    here.post(events.RestartDesired(revision="r", force=True))
    assert [word for word in here.took() if word.startswith(("Spawn", "Stop"))] == ["Stop main-0", "Spawn main-0"]
    assert not here.waiting


@pytest.mark.parametrize(("desired", "unavailable", "gives_way"), [(2, None, True), (1, None, False), (1, 1, True)])
def test_a_successor_that_no_node_has_room_for_gets_that_of_its_predecessor(
    desired: int, unavailable: int | None, gives_way: bool
) -> None:
    adopted = range(desired)
    new = f"main-{desired}"
    here = TakenOver(desired, adopted, outdated=adopted, unplaced={new}, unavailable=unavailable)
    done = here.gone()[desired:]
    if gives_way:
        assert done[:3] == [f"spawn {new}", "drain main-0", "stop main-0"]
    else:
        assert done == [f"spawn {new}"] and here.waiting["main-0"] == (
            f"its successor {new} is starting: it is not scheduled"
        )
    here.unplaced.clear()
    here.wait(1.0)
    assert set(here.states.values()) == {"ready"} and not here.waiting and len(here.states) == desired


def test_a_strategy_without_surge_never_has_one_more() -> None:
    here = TakenOver(2, (0, 1), outdated=(0, 1), surge=0)
    assert here.gone()[2:4] == ["drain main-0", "stop main-0"]


def test_a_successor_that_does_not_start_is_waited_for() -> None:
    here = TakenOver(2, (0, 1), outdated=(0, 1), broken={"main-2"})
    life = here.fleet.state.lives["main-2"]
    here.post(events.Died(worker="main-2", serial=life.serial, reason="has no such image"))
    assert "main-2 is failed: has no such image" in here.waiting["main-0"]
    assert here.states["main-0"] == here.states["main-1"] == "ready"
    here.broken.clear()
    here.wait(60.0)
    assert set(here.states.values()) == {"ready"} and not here.waiting


def test_a_card_of_a_former_life_is_taken_from_the_frontends_before_the_next_one() -> None:
    here = TakenOver(2, (0, 1), outdated=(0, 1), gpus=2)
    order = [e for e in here.effects if isinstance(e, events.Spawn | events.Withdraw) and not isinstance(e, Wake)]
    for worker in ("main-0", "main-1"):
        words = [type(each).__name__ for each in order if each.worker == worker]
        assert words == ["Spawn", "Withdraw", "Spawn"]


def test_a_successor_that_was_taken_over_without_a_node_gets_room() -> None:
    here = TakenOver(1, (0, 1), outdated=(0,), known=(0,), unplaced={"main-1"}, unavailable=1)
    assert here.gone()[2:] == ["drain main-0", "stop main-0"]
    here.unplaced.clear()
    here.wait(1.0)
    assert here.states == {"main-1": "ready"} and not here.waiting
