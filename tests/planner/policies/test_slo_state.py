"""Tests for what a planner makes of work that waits: for how long, and who was there to do it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.kernel.values import WorkerId
from penstock.planner.observation import EngineState, ModelState, Observation
from penstock.planner.policies.slo_state import STEADY, busy_for, smallest_fleet
from tests.planner.pool_states import pool_state

TICK = 5.0


def context(waiting: Sequence[tuple[float, float]], fleet: Sequence[tuple[float, int]], at: float) -> Any:
    """Return looks up to a second.

    Args:
        waiting: stretches of time in which work waits.
        fleet: from which second on there are how many workers.
    """
    looks = []
    for place in range(int(at / TICK) + 1):
        now = place * TICK
        waits = 20 if any(start <= now <= end for start, end in waiting) else 0
        count = [number for since, number in fleet if since <= now][-1]
        engines = tuple(EngineState(worker=WorkerId(f"w{each}"), waiting=waits) for each in range(count))
        pool = pool_state(role="aggregated", desired=count, ready=count, engines=engines)
        looks.append(Observation(at=now, window=TICK, models={"m": ModelState(traffic=None, pools={"main": pool})}))
    return SimpleNamespace(
        at=at,
        observations=looks,
        within=lambda seconds: [look for look in looks if look.at > at - seconds] or looks[-1:],
    )


@pytest.mark.parametrize(
    ("waiting", "at", "busy"),
    [
        ([], 300.0, 0.0),
        ([(100.0, 160.0)], 160.0, 60.0),
        ([(100.0, 160.0)], 160.0 + STEADY, 60.0 + STEADY),  # who waited is still being answered
        ([(100.0, 160.0)], 165.0 + STEADY, 0.0),
        ([(100.0, 160.0), (190.0, 200.0)], 200.0, 100.0),  # a short calm is part of it
        ([(20.0, 40.0), (190.0, 200.0)], 200.0, 10.0),
    ],
)
def test_how_long_work_has_been_waiting(waiting: list[tuple[float, float]], at: float, busy: float) -> None:
    assert busy_for(context(waiting, [(0.0, 2)], at), "m") == busy


def test_the_smallest_fleet_is_the_one_that_a_backlog_met() -> None:
    """Two serve now; when the work piled up there was one."""
    seen = context([(50.0, 150.0)], [(0.0, 1), (100.0, 2)], 160.0)
    assert smallest_fleet(seen, "m", "aggregated", 30.0) == 2.0
    assert smallest_fleet(seen, "m", "aggregated", 120.0) == 1.0
