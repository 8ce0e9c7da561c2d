"""What does the engine do with tiers below its memory, told one situation at a time? The tier here keeps everything."""

from collections.abc import Sequence

import msgspec

from penstock.kernel.machine import MILLISECOND, Nanos, Snapshot, Wake, Woken
from penstock.kernel.values import KvEvent, KvStored
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import (
    AbortRequest,
    ClearCache,
    EngineFinished,
    EngineFirstToken,
    KvChanged,
    SubmitRequest,
)
from penstock_lab.engine.external_kv.kv_tiers import LoadedBlocks
from penstock_lab.engine.settings import SimSettings
from tests.lab.engine.test_engine import SMALL

LOAD = 25 * MILLISECOND
FEW = msgspec.structs.replace(SMALL, kv_blocks=10)


class OneTier:
    """A tier without a limit, whose loads take `LOAD`; ``broken``: nothing comes of them."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.names: dict[int, None] = {}
        self.loads: list[tuple[Nanos, str, int]] = []
        self.cancelled: list[str] = []
        self.changes: list[KvEvent] = []

    @property
    def due(self) -> Nanos | None:
        return self.loads[0][0] if self.loads else None

    def lookup(self, submit: SubmitRequest, chain: Sequence[int], start: int, end: int, now: Nanos) -> int:
        names = chain[start:end]
        return next((place for place, name in enumerate(names) if name not in self.names), len(names))

    def load(self, submit: SubmitRequest, chain: Sequence[int], start: int, end: int, now: Nanos) -> None:
        self.loads.append((now + LOAD, submit.id, 0 if self.broken else end - start))

    def cancel(self, id: str, now: Nanos) -> None:
        self.cancelled.append(id)
        self.loads = [load for load in self.loads if load[1] != id]

    def store(self, submit: SubmitRequest, chain: Sequence[int], start: int, end: int, now: Nanos) -> None:
        assert not set(chain[start:end]) & self.names.keys() or self.broken  # what was loaded is not offered again
        self.names.update(dict.fromkeys(chain[start:end]))
        self.changes.append(KvStored(hashes=chain[start:end], tier="host"))

    def use(self, chain: Sequence[int], end: int, now: Nanos) -> None:
        pass

    def advance(self, now: Nanos) -> list[LoadedBlocks]:
        over = [load for load in self.loads if load[0] <= now]
        self.loads = self.loads[len(over) :]
        return [LoadedBlocks(id, blocks, {"host": blocks} if blocks else {}) for _, id, blocks in over]

    def take_changes(self) -> list[KvEvent]:
        changes, self.changes = self.changes, []
        return changes

    def blocks(self) -> dict[str, tuple[int, int]]:
        return {"host": (len(self.names), 1 << 30)}

    def snapshot(self) -> Snapshot:
        return {"names": list(self.names), "loads": [list(load) for load in self.loads]}

    def restore(self, state: Snapshot) -> None:
        self.names = dict.fromkeys(state["names"])
        self.loads = [(at, id, blocks) for at, id, blocks in state["loads"]]

    def check(self) -> None:
        pass


class Run:
    """An engine with a tier, run through timed requests to its end."""

    def __init__(self, settings: SimSettings, tier: OneTier | None) -> None:
        self.tier = tier
        self.engine = Engine(settings, tiers=None if tier is None else lambda settings, timing: tier)
        self.effects: list = []
        self.at: Nanos | None = None

    def post(self, now: Nanos, event: object, until: Nanos | None = None) -> None:
        """Hand an event in, then let happen what comes of it."""
        self.take(self.engine.handle(now, event))
        while self.at is not None and (until is None or self.at <= until):
            at, self.at = self.at, None
            self.take(self.engine.handle(at, Woken()))

    def take(self, effects: Sequence[object]) -> None:
        self.engine.check()
        for effect in effects:
            if isinstance(effect, Wake):
                self.at = effect.at
            else:
                self.effects.append(effect)

    def ended(self, id: str) -> EngineFinished:
        return next(each for each in self.effects if isinstance(each, EngineFinished) and each.id == id)

    def first(self, id: str) -> Nanos:
        return next(each.at for each in self.effects if isinstance(each, EngineFirstToken) and each.id == id)


def ask(id: str, begin: int = 0, length: int = 14, max_tokens: int = 1) -> SubmitRequest:
    return SubmitRequest(id=id, tokens=list(range(begin, begin + length)), max_tokens=max_tokens)


def filled(run: Run) -> None:
    """Compute a prompt, then another one that takes all of the cache."""
    run.post(0, ask("a"))
    run.post(100 * MILLISECOND, ask("b", 100, 39))


def test_what_was_evicted_is_loaded_and_counts_as_cached() -> None:
    tier = OneTier()
    run = Run(FEW, tier)
    filled(run)
    assert run.engine.cached_blocks == 9 and len(tier.names) == 3 + 9
    run.post(200 * MILLISECOND, ask("again"))
    done = run.ended("again")
    assert (done.cached, done.sources) == (12, {"host": 12})
    assert done.started == 200 * MILLISECOND + LOAD
    assert run.first("again") > done.started
    counters = run.engine.counters(10**9)
    assert (counters.tier_queries, counters.tier_hits, counters.prefix_hits) == (14 + 39 + 14, {"host": 12}, 0)
    stored = [event for each in run.effects if isinstance(each, KvChanged) for event in each.events]
    assert [event.tier for event in stored if isinstance(event, KvStored)].count("host") == 2


def test_other_requests_go_on_while_one_loads() -> None:
    run = Run(SMALL, OneTier())
    run.post(0, ask("a"))
    run.post(49 * MILLISECOND, ClearCache())
    run.post(50 * MILLISECOND, ask("loads"), until=50 * MILLISECOND)
    assert run.engine.pulling == 1
    run.post(51 * MILLISECOND, ask("computes", 500))
    assert run.first("computes") < 50 * MILLISECOND + LOAD < run.first("loads")
    assert run.ended("loads").cached == 12


def test_a_load_of_which_nothing_comes_is_computed() -> None:
    run = Run(FEW, OneTier(broken=True))
    filled(run)
    run.post(200 * MILLISECOND, ask("again"))
    done = run.ended("again")
    assert (done.cached, done.sources, done.tokens) == (0, {}, 1)
    assert run.engine.counters(10**9).loads_failed == 1


def test_an_abort_while_it_loads_frees_its_blocks() -> None:
    tier = OneTier()
    run = Run(FEW, tier)
    filled(run)
    run.post(200 * MILLISECOND, ask("again"), until=200 * MILLISECOND)
    assert run.engine.kv_usage > 0
    run.post(201 * MILLISECOND, AbortRequest(id="again"))
    assert tier.cancelled == ["again"] and run.engine.kv_usage == 0
    run.post(202 * MILLISECOND, ask("c", 300))
    assert run.ended("c").tokens == 1


def test_a_snapshot_goes_on_in_the_middle_of_a_load() -> None:
    tier = OneTier()
    run = Run(FEW, tier)
    filled(run)
    run.post(200 * MILLISECOND, ask("again"), until=200 * MILLISECOND)
    other = Run(FEW, OneTier())
    other.engine.restore(msgspec.json.decode(msgspec.json.encode(run.engine.snapshot())))
    other.at, before = run.at, len(run.effects)
    for each in (run, other):
        each.post(201 * MILLISECOND, ask("c", 300))
    assert other.effects == run.effects[before:] and len(other.effects) > 4


def test_an_engine_without_tiers_is_what_it_was() -> None:
    with_tier, without = Run(SMALL, OneTier()), Run(SMALL, None)
    for run in (with_tier, without):
        filled(run)
        run.effects = [each for each in run.effects if not isinstance(each, KvChanged)]
    assert with_tier.effects == without.effects
