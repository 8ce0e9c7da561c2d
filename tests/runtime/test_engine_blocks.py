"""An index fed through `EngineBlocks`, from the start or from a dump on, comes to hold what the engine holds."""

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.hashing import SCHEME, chain, local_hashes
from penstock.kernel.values import TIERS, KvCleared, KvEvent, KvRemoved, KvStored, Target, WorkerCard, WorkerId
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.runtime.kv_events.engine_blocks import RUN_MAX, EngineBlocks

SIZE = 4
TARGET = Target(WorkerId("w"))


def card(**fields: Any) -> WorkerCard:
    return WorkerCard(id=WorkerId("w"), epoch=1, model="m", url="u", block_size=SIZE, **fields)


def index(of: WorkerCard, *, native: bool) -> ExactIndex:
    made = ExactIndex(SIZE)
    made.join(TARGET, native=native, copies=of.engine == "vllm")
    return made


def held(found: ExactIndex) -> dict[str, set[int]]:
    return {tier: found.blocks_of(TARGET, tier) for tier in TIERS}


class Engine:
    """Prompts of a few words share prefixes; a block has an opaque name, or our hash; vLLM may hold it twice."""

    def __init__(self, rng: random.Random, *, native: bool, copies: bool) -> None:
        self.rng = rng
        self.native = native
        self.copies = copies
        self.tokens: dict[int, tuple[int | None, list[int]]] = {}
        self.count: dict[int, int] = {}
        self.host: set[int] = set()

    def name(self, parent: int | None, tokens: list[int]) -> int:
        if self.native:
            return int(chain(local_hashes(tokens, SIZE), parent)[0])
        return hash((parent, tuple(tokens))) & (2**64 - 1)

    def step(self) -> KvEvent:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.55 or not self.count:
            return self.store()
        if kind < 0.9:
            return self.remove(rng.choice(sorted(self.count)))
        if kind < 0.94:
            return self.offload(rng.choice(sorted(self.count)))
        if kind < 0.98 and self.host:
            gone = rng.choice(sorted(self.host))
            self.host.discard(gone)
            return KvRemoved(hashes=[gone], tier="host")
        self.count.clear()
        self.host.clear()
        return KvCleared()

    def store(self) -> KvStored:
        parent: int | None = None
        words = [[self.rng.randrange(2)] * SIZE for _ in range(self.rng.randint(1, 5))]
        path = []
        for tokens in words:
            name = self.name(parent, tokens)
            path.append((parent, name, tokens))
            parent = name
        new = [i for i, (_, name, _) in enumerate(path) if name not in self.count]
        first = new[0] if new and not (self.copies and self.rng.random() < 0.3) else 0
        if not new and not self.copies:
            first = len(path) - 1
        part = path[first:]
        for _, name, tokens in part:
            self.count[name] = self.count.get(name, 0) + 1 if self.copies else 1
            self.tokens[name] = (None, tokens)
        told = [] if self.native and self.rng.random() < 0.5 else [t for _, _, tokens in part for t in tokens]
        return KvStored(hashes=[name for _, name, _ in part], parent=part[0][0], tokens=told, block_size=SIZE)

    def remove(self, name: int) -> KvRemoved:
        self.count[name] -= 1
        if not self.count[name]:
            del self.count[name]
        return KvRemoved(hashes=[name])

    def offload(self, name: int) -> KvStored:
        self.host.add(name)
        return KvStored(hashes=[name], block_size=SIZE, tier="host")


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_an_index_behind_it_holds_what_one_before_it_holds(seed: int, native: bool, copies: bool) -> None:
    rng = random.Random(seed)
    engine = Engine(rng, native=native, copies=copies)
    of = card(engine="vllm" if copies else "sim", hash_scheme=SCHEME if native else None)
    kept = EngineBlocks(of)
    direct, early = index(of, native=native), index(of, native=True)
    late: ExactIndex | None = None
    joins = rng.randrange(60)
    for number in range(60):
        if number == joins:
            late = index(of, native=True)
            for event in kept.dump():
                late.apply(TARGET, event)
        event = engine.step()
        direct.apply(TARGET, event)
        for told in kept.apply(event):
            assert not isinstance(told, KvStored) or native or not told.tokens
            for one in (early, late):
                if one is not None:
                    one.apply(TARGET, told)
        assert held(early) == held(direct)
        assert late is None or held(late) == held(direct)
    assert len(kept) == sum(map(len, held(direct).values()))
    # The last copies go in the same order everywhere.
    for name, count in list(engine.count.items()):
        for _ in range(count):
            event = KvRemoved(hashes=[name])
            direct.apply(TARGET, event)
            for told in kept.apply(event):
                early.apply(TARGET, told)
                if late is not None:
                    late.apply(TARGET, told)
        assert held(early) == held(direct) == (held(late) if late is not None else held(direct))


def test_a_long_chain_is_dumped_in_runs() -> None:
    kept = EngineBlocks(card(hash_scheme=SCHEME))
    kept.apply(KvStored(hashes=list(range(1, RUN_MAX + 2)), parent=None, block_size=SIZE))
    kept.apply(KvStored(hashes=[10**6], parent=1, block_size=SIZE))
    assert [(len(event.hashes), event.parent) for event in kept.dump()] == [(RUN_MAX, None), (1, RUN_MAX), (1, 1)]


def test_blocks_behind_an_unknown_parent_are_left_out_and_counted() -> None:
    kept = EngineBlocks(card())
    assert kept.apply(KvStored(hashes=[1], parent=9, tokens=[0] * SIZE, block_size=SIZE)) == []
    assert kept.apply(KvStored(hashes=[1], block_size=SIZE, tier="host")) == []
    assert kept.apply(KvRemoved(hashes=[1])) == []
    assert (kept.unplaced, len(kept)) == (3, 0)


def test_an_old_name_for_a_new_block_ends_the_old_one() -> None:
    kept = EngineBlocks(card())
    (first,) = kept.apply(KvStored(hashes=[1], tokens=[0] * SIZE, block_size=SIZE))
    assert isinstance(first, KvStored)
    gone, second = kept.apply(KvStored(hashes=[1], tokens=[7] * SIZE, block_size=SIZE))
    assert gone == KvRemoved(hashes=first.hashes)
    assert isinstance(second, KvStored)
    assert second.hashes != first.hashes
    assert len(kept) == 1
