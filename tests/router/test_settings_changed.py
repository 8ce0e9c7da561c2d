"""Settings change while requests run and wait: the next decision is made by the new ones, and a replay sees it too."""

from typing import Any

import msgspec
import pytest

from penstock.kernel.hashing import SCHEME
from penstock.kernel.machine import Event, Woken
from penstock.kernel.values import KvStored, RequestId, Slo, WorkerId
from penstock.router.events import (
    Finished,
    FirstToken,
    KvObserved,
    OperatorNote,
    Preferences,
    SettingsChanged,
    WorkerJoined,
)
from penstock.router.router import Router
from penstock.router.settings import AffinitySettings, CostSettings, IndexSettings, QueueSettings, RouterSettings
from penstock.testing import RouterWorld, arrived, card, only, prompt

CACHED = WorkerId("cached")
BUSY = QueueSettings(threshold=0.0)
"""Hold requests as long as any worker prefills anything."""


def change(world: RouterWorld, **changes: Any) -> list[Any]:
    settings = msgspec.structs.replace(world.router.settings, **changes)
    return world.post(SettingsChanged(settings=settings, slo=Slo(), keys=tuple(changes), by="key-1"))


def stored(world: RouterWorld, worker: str, tokens: list[int]) -> None:
    blocks = arrived("x", tokens).prompt.blocks
    event = KvStored(hashes=blocks, tokens=tokens, block_size=16)
    world.post(KvObserved(worker=card(worker).id, rank=0, epoch=1, sequence=0, events=[event]))


def test_the_next_placement_weighs_by_the_new_cost() -> None:
    tokens = prompt(1, 160)
    native = {"hash_scheme": SCHEME, "events": ("tcp://e",)}
    world = RouterWorld(card("cached", **native), card("idle", **native), index=IndexSettings(predicted_ttl=0.0))
    stored(world, "cached", tokens)
    # The one that holds the prompt is the busier one.
    world.post(arrived("other", prompt(9, 48), preferences=Preferences(worker=CACHED)))
    world.post(arrived("one", tokens))
    assert world.sent("one").target.worker == "cached"
    noted = only(change(world, cost=CostSettings(overlap_credit=0.0, host_credit=0.0, disk_credit=0.0)), OperatorNote)
    assert noted.kind == "settings_changed" and "key-1" in noted.text and "cost" in noted.text
    world.post(arrived("two", tokens))
    assert world.sent("two").target.worker == "idle"
    change(world, cost=CostSettings(overlap_credit=2.0))
    world.post(arrived("three", tokens))
    assert world.sent("three").target.worker == "cached", "the index was kept meanwhile"


def test_who_waits_is_let_go_where_the_threshold_goes() -> None:
    world = RouterWorld(card("a"), queue=BUSY)
    for name in ("first", "second", "third"):
        world.post(arrived(name))
    assert len(world.router.pools["m"].queue) == 2
    change(world, queue=QueueSettings(threshold=None))
    assert world.sent("second").target.worker == world.sent("third").target.worker == "a"


def test_who_waits_is_ordered_by_the_new_policy() -> None:
    world = RouterWorld(card("a"), queue=BUSY)
    world.post(arrived("running"))
    for name in ("b", "c", "d"):
        world.post(arrived(name), after=0.1)
    change(world, queue=QueueSettings(threshold=0.0, policy="lcfs"))
    world.post(FirstToken(id=RequestId("running"), attempt=1))
    assert world.sent("d").target.worker == "a" and len(world.router.pools["m"].queue) == 2


@pytest.mark.parametrize(("limit", "ends_after"), [(5.0, 5.0), (100.0, 100.0)])
def test_a_longer_or_shorter_wait_counts_from_the_arrival(limit: float, ends_after: float) -> None:
    world = RouterWorld(card("a"), queue=QueueSettings(threshold=0.0, wait_max=20.0))
    world.post(arrived("running"))
    world.post(arrived("waits"))
    change(world, queue=QueueSettings(threshold=0.0, wait_max=limit))
    world.post(Woken(), after=ends_after - 0.1)
    assert RequestId("waits") in world.router.requests
    world.post(Woken(), after=0.2)
    assert world.ended("waits").status == 503


def test_sessions_are_remembered_over_a_change() -> None:
    world = RouterWorld(card("a"), card("b"), affinity=AffinitySettings(mode="hard"))
    pinned = arrived("one", preferences=Preferences(session="s"))
    world.post(pinned)
    home = world.sent("one").target
    change(world, affinity=AffinitySettings(mode="hard", ttl=10.0))
    world.post(arrived("two", prompt(5), preferences=pinned.preferences))
    assert world.sent("two").target == home
    world.post(arrived("three", prompt(6), preferences=pinned.preferences), after=11.0)
    assert "home" not in world.sent("three").decision.reason


def test_a_pool_that_comes_later_keeps_the_index_that_the_others_keep() -> None:
    world = RouterWorld(card("a"))
    change(world, cost=CostSettings(overlap_credit=0.0, host_credit=0.0))
    world.post(WorkerJoined(card=card("b", model="later")))
    assert world.router.pools["later"].index.exact is not None
    assert world.router.pools["later"].settings.cost.overlap_credit == 0.0


def events() -> list[tuple[float, Event]]:
    """A stretch of a run with a change in the middle of it."""
    found: list[tuple[float, Event]] = [(0.0, WorkerJoined(card=card("a"))), (0.0, WorkerJoined(card=card("b")))]
    found += [(0.05, arrived(f"r{n}", prompt(n % 3, 96))) for n in range(12)]
    changed = RouterSettings(cost=CostSettings(temperature=0.7), queue=QueueSettings(threshold=0.05, policy="wspt"))
    found.append((0.0, SettingsChanged(settings=changed, slo=Slo(), keys=("router.cost.temperature",))))
    found += [(0.05, arrived(f"s{n}", prompt(n % 3, 96))) for n in range(12)]
    found += [(0.01, FirstToken(id=RequestId(f"r{n}"), attempt=1)) for n in range(12)]
    found += [(0.01, Finished(id=RequestId(f"r{n}"), attempt=1, tokens=3)) for n in range(12)]
    return found


def test_a_replay_from_a_snapshot_decides_as_the_run_did() -> None:
    whole = RouterWorld()
    effects = [whole.post(event, after) for after, event in events()]
    for cut in range(len(effects)):
        first = RouterWorld()
        for after, event in events()[:cut]:
            first.post(event, after)
        again = RouterWorld()
        again.router = Router(RouterSettings(), seed=99)
        again.router.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(first.router.snapshot())))
        assert again.router.snapshot() == first.router.snapshot(), "what is restored is what was"
        again.now = first.now
        for (after, event), told in zip(events()[cut:], effects[cut:], strict=True):
            assert again.post(event, after) == told
    assert whole.router.settings.cost.temperature == 0.7


def test_the_event_is_data() -> None:
    event = SettingsChanged(
        settings=RouterSettings(attempts_max=7), slo=Slo(), keys=("router.attempts_max",), by="local"
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=SettingsChanged) == event
