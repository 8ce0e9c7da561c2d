"""Is a snapshot read by its own version only, and by one rule for every machine?"""

import msgspec
import pytest

from penstock.engine.engine import Engine
from penstock.engine.network_links import NetworkLinks
from penstock.engine.settings import SimSettings
from penstock.fleet.fleet import Fleet
from penstock.kernel.machine import read_snapshot, write_snapshot
from penstock.planner.planner import Planner
from penstock.planner.settings import PlannerSettings
from penstock.router.router import Router
from penstock.router.settings import RouterSettings


class Inner(msgspec.Struct):
    counts: dict[str, int]


class State(msgspec.Struct):
    inner: Inner
    last: float | None = None


def test_a_state_is_read_as_it_was_written():
    state = State(Inner({"a": 1}), 2.5)
    written = write_snapshot(state, 3)
    assert written == {"version": 3, "inner": {"counts": {"a": 1}}, "last": 2.5}
    assert read_snapshot(written, State, 3, "a test") == state


def test_what_is_no_such_state_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"a snapshot of a test can't be read: Expected `int`.*inner.counts"):
        read_snapshot({"version": 3, "inner": {"counts": {"a": "many"}}}, State, 3, "a test")


MACHINES = {
    "a router": lambda: Router(RouterSettings()),
    "a planner": lambda: Planner(PlannerSettings(), []),
    "a fleet": Fleet,
    "an engine": lambda: Engine(SimSettings()),
    "network links": lambda: NetworkLinks(1e9),
}


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_refuses_another_version_alike(name):
    machine = MACHINES[name]()
    snapshot = machine.snapshot()
    machine.restore(snapshot)
    for version in (snapshot["version"] - 1, snapshot["version"] + 1, None):
        with pytest.raises(ValueError, match=f"a snapshot of {name} has version {version}, and this release reads"):
            machine.restore({**snapshot, "version": version})
