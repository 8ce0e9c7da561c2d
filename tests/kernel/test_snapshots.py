"""Is a snapshot read by its own version only, and by one rule for every machine?"""

import msgspec
import pytest

from penstock.fleet.fleet import Fleet
from penstock.kernel.bounded_table import BoundedTable
from penstock.kernel.machine import read_snapshot, state_of, take_state, write_snapshot
from penstock.planner.planner import Planner
from penstock.planner.settings import PlannerSettings
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.network_links import NetworkLinks
from penstock_lab.engine.settings import SimSettings


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


class PartState(msgspec.Struct):
    seen: list[str]
    table: list[tuple[str, int]]
    index: dict[str, int] | None


class Index:
    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def snapshot(self) -> dict[str, int]:
        return self.sizes

    def restore(self, state: dict[str, int]) -> None:
        self.sizes = state


class Part:
    def __init__(self, index: Index | None = None) -> None:
        self.seen: list[str] = []
        self.table: BoundedTable[str, int] = BoundedTable(2)
        self.index = index
        self.derived = "not in the state"


def test_a_part_is_restored_from_its_attributes_and_parts() -> None:
    part = Part(Index())
    part.seen.append("a")
    part.table.put("x", 1)
    assert part.index is not None
    part.index.sizes["y"] = 2
    written = write_snapshot(state_of(part, PartState), 1)
    assert written == {"version": 1, "seen": ["a"], "table": [("x", 1)], "index": {"y": 2}}
    again = Part(Index())
    take_state(again, read_snapshot(written, PartState, 1, "a test"))
    assert state_of(again, PartState) == state_of(part, PartState) and again.seen is not part.seen


def test_a_part_that_was_not_there_stays_as_it_is() -> None:
    again = Part(Index())
    assert again.index is not None
    again.index.sizes["z"] = 3
    take_state(again, state_of(Part(), PartState))
    assert again.index.sizes == {"z": 3} and again.seen == []
