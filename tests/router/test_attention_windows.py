"""Does an index expect of hybrid models what engines find: full attention's prefix, and each window's last blocks?"""

import random
from collections.abc import Sequence

import pytest

from penstock.kernel.hashing import block_hashes
from penstock.kernel.values import KvCleared, KvEvent, KvRemoved, KvStored, Target, Tier, WorkerCard, WorkerId
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.router.kv_index.indexer import HeldBlocks
from penstock.runtime.kv_events.engine_blocks import EngineBlocks
from tests.depth import deep
from tests.router.written_states import written

SIZE, DEPTH = 4, 9
CHAINS = [[(chain if place >= 3 * SIZE else 0) * 100 + place for place in range(DEPTH * SIZE)] for chain in range(3)]
"""Prompts of which the first three blocks are the same."""
ONE, TWO, PLAIN = (Target(WorkerId(name)) for name in ("one", "two", "plain"))
Block = tuple[int, int]
"""Chain and depth."""


def name(chain: int, depth: int) -> int:
    return 1000 * (0 if depth < 3 else chain) + depth + 1


class Hybrid:
    """An engine with full attention and some windows: what it has, and what it says of that."""

    def __init__(self, windows: Sequence[int]) -> None:
        self.held: dict[tuple[Tier, int], set[int]] = {
            (tier, window): set() for tier in ("device", "host") for window in (0, *windows)
        }

    def stored(self, chain: int, window: int, depths: list[int], tier: Tier) -> KvStored:
        names = [name(chain, depth) for depth in depths]
        self.held[tier, window] |= set(names)
        if window or tier == "host":
            return KvStored(hashes=names, block_size=SIZE, tier=tier, window=window)
        first, end = depths[0], depths[-1] + 1
        parent = name(chain, first - 1) if first else None
        return KvStored(
            hashes=names, parent=parent, tokens=CHAINS[chain][first * SIZE : end * SIZE], block_size=SIZE, tier=tier
        )

    def removed(self, names: list[int], window: int, tier: Tier) -> KvRemoved:
        self.held[tier, window] -= set(names)
        return KvRemoved(hashes=names, tier=tier, window=window)

    def hit(self, chain: int, tier: Tier, at: int) -> int:
        """Return the deepest usable prefix as an engine finds it, trying each depth from the deepest."""
        names = [name(chain, depth) for depth in range(DEPTH)]
        for depth in range(DEPTH, at, -1):
            if all(
                set(names[(at if window == 0 else max(0, depth - window)) : depth]) <= held
                for (its_tier, window), held in self.held.items()
                if its_tier == tier
            ):
                return depth
        return at


def step(rng: random.Random, engine: Hybrid) -> KvEvent:
    tier: Tier = "device" if rng.random() < 0.7 else "host"
    _, window = rng.choice([place for place in engine.held if place[0] == tier])
    held, chain = engine.held[tier, window], rng.randrange(3)
    if held and rng.random() < 0.35:
        return engine.removed(rng.sample(sorted(held), rng.randint(1, min(3, len(held)))), window, tier)
    if rng.random() < 0.01 and any(names for place, names in engine.held.items() if place[0] != tier):
        for each in [place for place in engine.held if place[0] == tier]:
            engine.held[each].clear()
        return KvCleared(tier=tier)
    full = engine.held["device", 0]
    reach = next((depth for depth in range(DEPTH) if name(chain, depth) not in full), DEPTH)
    if window or tier == "host":
        depths = [depth for depth in range(DEPTH) if name(chain, depth) in full and rng.random() < 0.8]
        return engine.stored(chain, window, depths, tier)
    first = rng.randint(0, min(reach, DEPTH - 1))
    return engine.stored(chain, 0, list(range(first, rng.randint(first + 1, DEPTH))), tier)


def expected(engine: Hybrid, chain: int) -> HeldBlocks:
    device = engine.hit(chain, "device", 0)
    return HeldBlocks(device, engine.hit(chain, "host", device) - device)


@pytest.mark.parametrize("first", range(0, deep(60), 10))
@pytest.mark.parametrize("windows", [(2,), (1, 3)])
def test_what_is_expected_is_what_engines_find(first: int, windows: tuple[int, ...]) -> None:
    for seed in range(first, first + 10):
        rng = random.Random(seed)
        index, relayed = ExactIndex(SIZE, audit_every=3), ExactIndex(SIZE)
        engines = {ONE: Hybrid(windows), TWO: Hybrid(windows), PLAIN: Hybrid(())}
        blocks = {
            target: EngineBlocks(WorkerCard(id=target.worker, epoch=1, model="m", url="http://w", block_size=SIZE))
            for target in engines
        }
        for target in engines:
            relayed.join(target, native=True)
        first_words = [(target, window) for target in (ONE, TWO) for window in windows]
        for number in range(150):
            target = rng.choice(list(engines))
            if number < len(first_words):
                target, window = first_words[number]
                event: KvEvent = engines[target].stored(0, window, [0], "device")
            else:
                event = step(rng, engines[target])
            index.apply(target, event)
            for translated in blocks[target].apply(event):
                relayed.apply(target, translated)
            index.check()
            relayed.check()
        for again in (index, relayed, copied(index), dumped(blocks)):
            for chain in range(3):
                found = again.overlap(block_hashes(CHAINS[chain], SIZE))
                for target, engine in engines.items():
                    assert found.get(target, HeldBlocks()) == expected(engine, chain), (seed, target, chain)


def copied(index: ExactIndex) -> ExactIndex:
    again = ExactIndex(SIZE)
    again.restore(written(index))
    again.check()
    assert again.snapshot() == index.snapshot()
    return again


def dumped(blocks: dict[Target, EngineBlocks]) -> ExactIndex:
    again = ExactIndex(SIZE)
    for target, held in blocks.items():
        again.join(target, native=True)
        for event in held.dump():
            again.apply(target, event)
    return again


def test_a_shared_beginning_is_no_hit_once_its_window_is_gone() -> None:
    engine, index = Hybrid((2,)), ExactIndex(SIZE)
    index.apply(ONE, engine.stored(0, 2, [7, 8], "device"))  # the group of the window may come first
    index.apply(ONE, engine.stored(0, 0, list(range(DEPTH)), "device"))
    assert index.overlap(block_hashes(CHAINS[0], SIZE))[ONE].device == DEPTH
    assert ONE not in index.overlap(block_hashes(CHAINS[1], SIZE))
    index.apply(ONE, engine.stored(0, 2, [1, 2], "device"))
    assert index.overlap(block_hashes(CHAINS[1], SIZE))[ONE].device == 3
    index.apply(ONE, KvCleared())
    index.apply(ONE, Hybrid(()).stored(0, 0, list(range(DEPTH)), "device"))
    assert ONE not in index.overlap(block_hashes(CHAINS[1], SIZE)), "its layers are as they were"
    index.remove(ONE)
    index.apply(ONE, Hybrid(()).stored(0, 0, list(range(DEPTH)), "device"))  # a model without windows in its place
    assert index.overlap(block_hashes(CHAINS[1], SIZE))[ONE].device == 3


def test_another_process_may_have_no_windows() -> None:
    index = ExactIndex(SIZE)
    index.apply(ONE, Hybrid((2,)).stored(0, 2, [7, 8], "device"))
    index.clear(ONE)  # its events were lost, or another process publishes
    index.apply(ONE, Hybrid(()).stored(0, 0, list(range(DEPTH)), "device"))
    assert index.overlap(block_hashes(CHAINS[1], SIZE))[ONE].device == 3


def test_kinds_of_windows_are_bounded_and_those_of_nobody_cost_nothing() -> None:
    index = ExactIndex(SIZE)
    for number in range(100):
        index.apply(ONE, KvRemoved(hashes=[1], window=1000 + number))
        index.apply(ONE, Hybrid((1 + number,)).stored(0, 1 + number, [0], "device"))
    assert index.windowed(ONE) and index.counters.unplaced == 100, "84 too many; of the others the names are awaited"
    assert len(index.snapshot().windows) == 16 * 3
    index.remove(ONE)
    index.apply(TWO, Hybrid(()).stored(0, 0, [0], "device"))
    assert not index.windowed() and index.overlap(block_hashes(CHAINS[0], SIZE))[TWO].device == 1
    index.check()


def test_blocks_of_another_size_are_no_window() -> None:
    index = ExactIndex(SIZE)
    blocks = EngineBlocks(WorkerCard(id=ONE.worker, epoch=1, model="m", url="http://w", block_size=SIZE))
    odd = KvStored(hashes=[name(0, 1)], block_size=2 * SIZE, window=1)
    for event in (Hybrid(()).stored(0, 0, list(range(DEPTH)), "device"), odd):
        index.apply(ONE, event)
        blocks.apply(event)
    assert index.overlap(block_hashes(CHAINS[0], SIZE))[ONE].device == DEPTH, "as if there were none"
    assert dumped({ONE: blocks}).overlap(block_hashes(CHAINS[0], SIZE))[ONE].device == DEPTH


def test_windows_that_never_agree_end() -> None:
    index, engine = ExactIndex(SIZE), Hybrid((1, 2))
    index.apply(ONE, engine.stored(0, 0, list(range(DEPTH)), "device"))
    index.apply(ONE, engine.stored(0, 1, list(range(0, DEPTH, 2)), "device"))
    index.apply(ONE, engine.stored(0, 2, list(range(1, DEPTH, 2)), "device"))
    assert ONE not in index.overlap(block_hashes(CHAINS[0], SIZE))
