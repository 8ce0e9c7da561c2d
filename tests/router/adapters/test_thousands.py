"""Thousands of adapters over a few workers: is one in use ever unloaded, and is a capacity ever exceeded?"""

import random
from collections import Counter

import msgspec
import pytest

from penstock.kernel.machine import Effect
from penstock.kernel.values import RequestId, WorkerId
from penstock.router.events import (
    AdapterChange,
    AdapterFailed,
    AdapterLoaded,
    AdapterMissing,
    Closed,
    Dispatch,
    Failed,
    Finished,
    FirstToken,
    WorkerJoined,
    WorkerLeft,
)
from penstock.router.router import Router
from penstock.router.settings import QueueSettings
from penstock.testing import RouterWorld, arrived, card
from penstock.testing.router_world import MODEL
from tests.depth import deep

ADAPTERS = 5_000
WORKERS, SLOTS = 4, 6


class Engines:
    """The engines as they are: what each holds, what runs on it, and the loads that have not been answered."""

    def __init__(self) -> None:
        self.held: dict[WorkerId, set[str]] = {}
        self.running: dict[RequestId, tuple[WorkerId, str, int]] = {}
        self.loads: list[tuple[WorkerId, str]] = []
        self.most_homes = 0

    def take(self, effects: list[Effect], adapter_of: dict[RequestId, str]) -> None:
        for effect in effects:
            if isinstance(effect, AdapterChange):
                worker = effect.card.id
                in_use = {adapter for where, adapter, _ in self.running.values() if where == worker}
                assert not in_use & set(effect.unload), "an adapter with a request in flight was unloaded"
                self.held[worker] -= set(effect.unload)
                assert effect.load is not None and effect.load not in self.held[worker], "it is there already"
                self.held[worker].add(effect.load)
                assert len(self.held[worker]) <= SLOTS, "more than a worker holds"
                self.loads.append((worker, effect.load))
            elif isinstance(effect, Dispatch):
                adapter = adapter_of[effect.id]
                assert adapter in self.held[effect.target.worker], "sent to a worker that neither holds nor loads it"
                self.running[effect.id] = (effect.target.worker, adapter, effect.attempt)
            elif isinstance(effect, Closed):
                self.running.pop(effect.id, None)


@pytest.mark.parametrize("seed", range(deep(2)))
def test_no_adapter_in_use_is_unloaded_and_no_capacity_is_exceeded(seed: int) -> None:
    rng = random.Random(seed)
    cards = [card(f"w{number}", adapter_slots=SLOTS) for number in range(WORKERS)]
    world = RouterWorld(*cards, queue=QueueSettings(wait_max=30.0), seed=seed)
    engines = Engines()
    engines.held = {one.id: set() for one in cards}
    epochs = Counter({one.id: 1 for one in cards})
    adapter_of: dict[RequestId, str] = {}
    hot = f"lora-{seed}"
    for number in range(1_500):
        move = rng.random()
        effects: list[Effect] = []
        if move < 0.34:
            name = RequestId(f"r{number}")
            adapter_of[name] = hot if rng.random() < 0.3 else f"lora-{int(ADAPTERS * rng.random() ** 3)}"
            tokens = list(range(number * 1000, number * 1000 + rng.choice((64, 512, 4096)) // 16))
            effects = world.post(arrived(name, tokens, adapter=adapter_of[name]), after=0.01)
        elif move < 0.6 and engines.loads:
            worker, adapter = engines.loads.pop(rng.randrange(len(engines.loads)))
            if rng.random() < 0.05:
                engines.held[worker].discard(adapter)
                gone = [
                    (id, try_) for id, (at, what, try_) in engines.running.items() if (at, what) == (worker, adapter)
                ]
                for id, _ in gone:
                    del engines.running[id]
                event = AdapterFailed(worker=worker, epoch=epochs[worker], adapter=adapter, reason="broken")
                effects = world.post(event)
                engines.take(effects, adapter_of)
                effects = []
                for id, try_ in gone:
                    failed = Failed(id=id, attempt=try_, reason="no adapter", retryable=True, worker_at_fault=False)
                    engines.take(world.post(failed), adapter_of)
            else:
                loaded = AdapterLoaded(worker=worker, epoch=epochs[worker], adapter=adapter, seconds=0.5)
                effects = world.post(loaded)
        elif move < 0.97 and engines.running:
            id = rng.choice(list(engines.running))
            _, _, attempt = engines.running.pop(id)
            if rng.random() < 0.5:
                engines.take(world.post(FirstToken(id=id, attempt=attempt)), adapter_of)
            effects = world.post(Finished(id=id, attempt=attempt, tokens=3))
        elif move < 0.985 and engines.running:
            id = rng.choice(list(engines.running))
            worker, adapter, _ = engines.running[id]
            if (worker, adapter) not in engines.loads:
                engines.held[worker].discard(adapter)  # somebody else unloaded it
                effects = world.post(AdapterMissing(worker=worker, epoch=epochs[worker], adapter=adapter))
        elif move > 0.998:
            worker = rng.choice(list(engines.held))
            engines.held[worker] = set()
            engines.loads = [load for load in engines.loads if load[0] != worker]
            lost = [id for id, (where, _, _) in engines.running.items() if where == worker]
            engines.take(world.post(WorkerLeft(worker=worker, epoch=epochs[worker], reason="killed")), adapter_of)
            for id in lost:
                attempt = engines.running.pop(id)[2]
                failed = Failed(id=id, attempt=attempt, reason="reset", retryable=True)
                engines.take(world.post(failed), adapter_of)
            epochs[worker] += 1
            effects = world.post(WorkerJoined(card=card(worker, epoch=epochs[worker], adapter_slots=SLOTS)))
        engines.take(effects, adapter_of)
        table = world.router.pools[MODEL].adapters
        assert {worker: set(mine.resident) for worker, mine in table.workers.items()} == engines.held
        engines.most_homes = max(engines.most_homes, len(table.holders(hot)))
    counts = world.router.pools[MODEL].adapters.counts
    assert counts["load"] > 150 and counts["unload"] > 100 and counts["hit"] > 20 and counts["missing"] > 0
    assert engines.most_homes > 1, "the hot adapter had one home only"
    copy = Router(world.router.settings, name="router")
    copy.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(world.router.snapshot()), strict=False))
    copy.check()
    assert copy.snapshot() == world.router.snapshot()
