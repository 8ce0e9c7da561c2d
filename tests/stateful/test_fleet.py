"""Whatever befalls a fleet, no process is started twice, no request is cut off early, and all becomes as desired."""

import random
from functools import partial

import msgspec
import pytest

from penstock.fleet import events
from penstock.fleet.fleet import Fleet
from penstock.fleet.rolling_restart import OUTDATED
from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Wake, Woken
from tests.depth import seeds
from tests.stateful.fleet_world import FleetWorld, made

SEEDS = 10_000
CHUNK = 250


def as_desired(world: FleetWorld) -> str | None:
    """Return what is not as it should be once everything is calm; None where all is."""
    fleet, state = world.fleet, world.fleet.state
    waits = state.restart is not None and state.restart.order.outdated and bool(state.restart.waits)
    ends = [state for revision, state in world.restarts.items() if not (waits and revision == OUTDATED.revision)]
    if (state.restart is not None and not waits) or state.next_restart is not None or "running" in ends:
        return f"a restart never ends: {state.restart}"
    if waits and any("no GPU is free" not in why and "can have" not in why for why in state.restart.waits.values()):
        return f"outdated engines are replaced by nobody: {state.restart}"
    for name, pool in fleet.pools().items():
        own = state.pools[name]
        for replica in pool.replicas or ():
            life = state.lives[replica.id]
            if replica.asleep:
                continue
            role = world.fleet.state.roles.get(replica.id)
            aside = own.attached and replica.id in own.drains
            if replica.state != ("draining" if aside else "ready"):
                return f"{replica.id} stays {life.phase}: {life.reason}"
            if not aside and replica.role != (own.configured.role if role is None else role.role):
                return f"{replica.id} is {replica.role}, not {role}"
            if world.entries.get(replica.id) != aside:
                return f"the frontends read another state of {replica.id}"
        ids = {replica.id for replica in pool.replicas or () if not replica.asleep}
        if pool.asleep > own.sleeping:
            return f"{name} has {pool.asleep} replicas asleep, and may have {own.sleeping}"
        if not own.attached and (len(ids) != pool.desired or ids & own.without):
            return f"{name} should have {pool.desired} without {own.without}, and has {ids}"
    serving = {worker for worker, life in state.lives.items() if life.phase != "asleep"}
    if world.entries.keys() != serving or world.processes.keys() - state.lives.keys():
        return f"left over: {world.entries} {world.processes}"
    return None


def differs(world: FleetWorld, seed: int, place: int) -> str | None:
    """Restore a fleet after ``place`` events, go on, and say where it parts from the original."""
    first = made(seed, world.gpus)
    for now, event, effects in world.past[:place]:
        if list(first.handle(now, event)) != effects:
            return f"replayed, {event} leads to something else"
    twin = Fleet()
    twin.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(first.snapshot())))
    for now, event, effects in world.past[place:]:
        if (found := list(twin.handle(now, event))) != effects:
            return f"restored after {place} events, {event} leads to {found}, not {effects}"
    return None


@pytest.mark.parametrize("first", seeds(SEEDS, CHUNK))
def test_whatever_happens_all_becomes_as_desired(first: int) -> None:
    kinds: set[type] = set()
    for seed in range(first, first + CHUNK):
        world = FleetWorld(seed)
        try:
            world.run()
            wrong = world.settle(partial(as_desired, world), whole=seed % 10 == 0)
        except (AssertionError, InvariantError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert wrong is None, f"seed {seed}: {wrong}"
        place = random.Random(seed).randrange(len(world.past))
        assert (found := differs(world, seed, place)) is None, f"seed {seed}: {found}"
        kinds |= world.kinds
    named = {kind for kind in vars(events).values() if isinstance(kind, type) and kind.__module__ == events.__name__}
    assert named - kinds <= {events.TimesChanged}, "what never happened is not tested"
    assert {Wake, Woken} <= kinds


def test_a_snapshot_of_another_version_is_refused() -> None:
    fleet = Fleet()
    with pytest.raises(ValueError, match="a fleet has version 99, and this release reads 2"):
        fleet.restore({**fleet.snapshot(), "version": 99})
