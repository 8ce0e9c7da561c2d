"""How many engines does a rolling restart replace at a time, and who serves meanwhile?"""

from typing import Any
from unittest import mock

import pytest

from penstock.fleet import events
from penstock.fleet.rolling_restart import RollingRestart
from penstock.kernel.machine import Effect
from tests.fleet.test_outdated import TakenOver


class Counted(TakenOver):
    """Counts, after each event, how many serve and how many there are.

    Args:
        order: a restart replaces all; else those that are outdated are.
        room: for engines, where their pool takes GPUs.
    """

    def __init__(self, replicas: int, *, order: bool, room: int = 0, **strategy: Any) -> None:
        self.serving: list[int] = []
        self.there: list[int] = []
        numbers = range(replicas)
        super().__init__(replicas, numbers, () if order else numbers, gpus=room, **strategy)
        if order:
            self.serving.clear()
            self.post(events.RestartDesired(revision="r"))

    def answers(self, effect: Effect) -> list[Any]:
        states = list(self.states.values())
        self.serving.append(states.count("ready"))
        self.there.append(len(states))
        return super().answers(effect)

    def least(self, first: int) -> int:
        """Return how few served at a time, once ``first`` did."""
        begun = next(place for place, count in enumerate(self.serving) if count >= first)
        return min(self.serving[begun:])


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize(
    ("replicas", "strategy", "surge"),
    [
        (200, {}, 10),
        (39, {}, 1),
        (60, {}, 3),
        (25, {"surge": 10}, 10),
        (5, {"surge": 10}, 5),
        (4, {"surge": 1}, 1),
    ],
)
def test_as_many_as_the_strategy_says_are_replaced_at_a_time_and_nobody_is_missed(
    replicas: int, strategy: dict[str, int], surge: int, order: bool
) -> None:
    here = Counted(replicas, order=order, **strategy)
    assert set(here.states.values()) == {"ready"} and len(here.states) == replicas
    assert not here.waiting and here.fleet.state.restart is None
    assert here.least(replicas) == replicas and max(here.there) == replicas + surge
    if order:
        assert set(here.states) == {f"main-{number}" for number in range(replicas)}
        done = [effect for effect in here.effects if isinstance(effect, events.RestartReported)][-1]
        assert done.state == "done" and len(set(done.done)) == replicas


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize(("strategy", "lacking"), [({}, 3), ({"unavailable": 8}, 8), ({"unavailable": 1}, 1)])
def test_where_no_gpu_is_free_as_many_lack_as_the_strategy_says(
    strategy: dict[str, int], lacking: int, order: bool
) -> None:
    here = Counted(60, order=order, room=60, **strategy)
    assert set(here.states.values()) == {"ready"} and len(here.states) == 60 and not here.waiting
    assert here.least(60 - lacking) == 60 - lacking and max(here.there) == 60


def test_room_for_some_is_used_and_not_exceeded() -> None:
    here = Counted(20, order=True, room=24, surge=10)
    assert max(here.there) == 24 and here.least(20) == 20
    assert set(here.states.values()) == {"ready"} and here.fleet.state.restart is None


def test_successors_that_no_machine_has_room_for_get_the_places_of_as_many_as_may_lack() -> None:
    fresh = [f"main-{number}" for number in range(8, 12)]
    here = TakenOver(8, range(8), (), unplaced=fresh, surge=4, unavailable=2)
    here.post(events.RestartDesired(revision="r"))
    drained = [word for word in here.gone() if word.startswith("drain")]
    assert len(drained) == 2 and list(here.states.values()).count("ready") == 6
    here.unplaced.clear()
    here.wait(60.0)
    assert set(here.states.values()) == {"ready"} and len(here.states) == 8
    assert here.fleet.state.restart is None


def test_a_successor_that_does_not_start_ends_the_restart_with_its_wave() -> None:
    here = TakenOver(40, range(40), (), broken=("main-41",))
    here.post(events.RestartDesired(revision="r"))
    here.die("main-41", restart="never")
    reports = [effect for effect in here.effects if isinstance(effect, events.RestartReported)]
    assert reports[-1].state == "failed" and "main-41 does not start" in (reports[-1].problem or "")
    assert list(here.states.values()).count("ready") == 40 and not here.fleet.state.pools["main"].retiring


def test_a_probe_that_brings_nothing_new_moves_no_restart() -> None:
    here = TakenOver(2, (0, 1), outdated=(0, 1), broken=("main-2",))
    with mock.patch.object(RollingRestart, "advance") as advance:
        here.wait(5.0)
    assert not advance.called
