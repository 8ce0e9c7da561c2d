"""Lower tiers that announce blocks before anybody told their tokens: does an index find them once it knows them?

So it is after a restart of an engine: its disk has blocks, and an announcement of a lower tier has names alone.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.kernel.hashing import block_extras, block_hashes
from penstock.kernel.values import TIERS, KvCleared, KvEvent, KvRemoved, KvStored, Target, Tier, WorkerCard, WorkerId
from penstock.router.kv_index import engine_hash_map
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.runtime.kv_events.engine_blocks import EngineBlocks
from tests.depth import deep
from tests.router.written_states import written

SIZE, CHAINS, DEPTH = 4, 6, 5
TARGET = Target(WorkerId("w"), 0)
CARD = WorkerCard(id=TARGET.worker, epoch=1, model="m", url="http://w", block_size=SIZE)


def tokens(chain: int, first: int, end: int) -> list[int]:
    return [chain if place == 0 else place for place in range(first * SIZE, end * SIZE)]


def identity(chain: int) -> dict[str, str]:
    return [{}, {"salt": "a"}, {"lora": "adapter"}][chain % 3]


def name(chain: int, depth: int) -> int:
    return 1000 * (chain + 1) + depth


class Told:
    """An engine's announcements, and what an index should know after each."""

    def __init__(self) -> None:
        self.placed: dict[Tier, set[tuple[int, int]]] = {tier: set() for tier in TIERS}
        self.awaited: dict[Tier, set[tuple[int, int]]] = {tier: set() for tier in TIERS}

    def known(self, block: tuple[int, int]) -> bool:
        return any(block in blocks for blocks in self.placed.values())

    def stored(self, chain: int, first: int, end: int) -> KvStored:
        """The engine computes blocks whose parent it has: that says their tokens."""
        return self.described(
            chain,
            first,
            end,
            "device",
            block_extras(first, end, SIZE, identity(chain).get("lora"), identity(chain).get("salt")),
        )

    def described(self, chain: int, first: int, end: int, tier: Tier, extras: list[bytes] | None) -> KvStored:
        for depth in range(first, end):
            block = chain, depth
            self.placed[tier].add(block)
            for other in TIERS:
                if block in self.awaited[other]:
                    self.awaited[other].remove(block)
                    self.placed[other].add(block)
        names = [name(chain, depth) for depth in range(first, end)]
        parent = name(chain, first - 1) if first else None
        return KvStored(
            hashes=names, parent=parent, tokens=tokens(chain, first, end), block_size=SIZE, extras=extras, tier=tier
        )

    def copied(self, blocks: Sequence[tuple[int, int]], tier: Tier) -> KvStored:
        """A lower tier names blocks; or it says their tokens and adapter as well, and never their salt."""
        (chain, first), end = blocks[0], blocks[-1][1] + 1
        if self.known(blocks[0]) and len(blocks) == end - first:
            lora = identity(chain).get("lora")
            return self.described(chain, first, end, tier, block_extras(first, end, SIZE, lora, None))
        for block in blocks:
            (self.placed if self.known(block) else self.awaited)[tier].add(block)
        return KvStored(hashes=[name(*block) for block in blocks], block_size=SIZE, tier=tier)

    def removed(self, blocks: Sequence[tuple[int, int]], tier: Tier) -> KvRemoved:
        self.placed[tier].difference_update(blocks)
        self.awaited[tier].difference_update(blocks)
        return KvRemoved(hashes=[name(*block) for block in blocks], tier=tier)

    def step(self, rng: random.Random) -> KvEvent:
        chain, tier = rng.randrange(CHAINS), rng.choice(TIERS[1:])
        some = [(chain, depth) for depth in sorted(rng.sample(range(DEPTH), rng.randint(1, DEPTH)))]
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                starts = [depth for depth in range(DEPTH) if depth == 0 or self.known((chain, depth - 1))]
                first = rng.choice(starts)
                return self.stored(chain, first, rng.randint(first + 1, DEPTH))
            case 4 | 5 | 6:
                return self.copied(some, tier)
            case 7 | 8:
                return self.removed(some, rng.choice([tier, "device"]))
            case _:
                if rng.random() < 0.9:
                    return self.removed(some, tier)
                if rng.random() < 0.5:
                    cleared = rng.choice(TIERS)
                    self.placed[cleared].clear()
                    self.awaited[cleared].clear()
                    return KvCleared(tier=cleared)
                self.__init__()  # type: ignore[misc]
                return KvCleared()

    def expected(self, tier: Tier) -> set[int]:
        return {
            block_hashes(tokens(chain, 0, depth + 1), SIZE, **identity(chain))[-1] for chain, depth in self.placed[tier]
        }


def index(*, native: bool) -> ExactIndex:
    made = ExactIndex(SIZE)
    made.join(TARGET, native=native)
    return made


@pytest.mark.parametrize("seed", range(deep(60)))
def test_random_announcements_end_as_a_model_of_them_says(seed: int) -> None:
    rng, told = random.Random(seed), Told()
    direct, early, kept = index(native=False), index(native=True), EngineBlocks(CARD)
    met = 0
    for number in range(120):
        event = told.step(rng)
        met += sum(map(len, told.awaited.values()))
        direct.apply(TARGET, event)
        for each in kept.apply(event):
            early.apply(TARGET, each)
        if number % 40 == 20:
            saved = written(direct)
            direct = index(native=False)
            direct.restore(saved)
            assert written(direct) == saved
        late = index(native=True)
        for each in kept.dump():
            late.apply(TARGET, each)
        direct.check()
        for tier in TIERS:
            for one in (direct, early, late):
                assert one.blocks_of(TARGET, tier) == told.expected(tier), (number, event, tier)
    assert met, "nothing was announced ahead"


def test_awaited_names_are_bounded_and_go_with_their_worker(monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_hash_map, "AWAITED_MAX", 3)
    made, told = index(native=False), Told()
    for chain in range(5):
        made.apply(TARGET, told.copied([(chain, 0)], "disk"))
    for chain in range(5):
        made.apply(TARGET, told.stored(chain, 0, 1))
    assert len(made.blocks_of(TARGET, "disk")) == 3
    made.apply(TARGET, told.copied([(5, 0)], "disk"))
    made.remove(TARGET)
    made.join(TARGET, native=False)
    made.apply(TARGET, told.stored(5, 0, 1))
    assert len(made.blocks_of(TARGET, "device")) == 1 and not made.blocks_of(TARGET, "disk")
