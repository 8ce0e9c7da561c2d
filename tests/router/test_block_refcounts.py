"""An engine that keeps several copies of a block says so of each: is a block held until its last copy has gone?

vLLM announces every physical block. A prompt that it holds in full has its last block computed once more, and equal
prompts that run at the same time are not merged; each copy is evicted, and said to be, by itself.
"""

import hashlib
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.kernel.hashing import block_hashes
from penstock.kernel.values import KvCleared, KvRemoved, KvStored, Target, WorkerCard, WorkerId
from penstock.router.events import KvObserved, WorkerJoined
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from tests.depth import deep
from tests.router.written_states import written

BLOCK = 2
COPYING, PLAIN = Target(WorkerId("copying")), Target(WorkerId("plain"))

Path = tuple[int, ...]


def tokens(path: Path) -> list[int]:
    return [content + 10 for content in path for _ in range(BLOCK)]


def hashes(path: Path) -> list[int]:
    return list(block_hashes(tokens(path), BLOCK))


def name(path: Path, native: bool) -> int:
    return hashes(path)[-1] if native else int.from_bytes(hashlib.sha256(repr(path).encode()).digest()[:8], "big")


def stored(path: Path, behind: int, native: bool) -> KvStored:
    """Say that the blocks of a path behind its first ones were stored."""
    return KvStored(
        hashes=[name(path[: i + 1], native) for i in range(behind, len(path))],
        parent=name(path[:behind], native) if behind else None,
        tokens=[] if native else tokens(path)[behind * BLOCK :],
        block_size=BLOCK,
    )


def removed(*paths: Path, native: bool = False) -> KvRemoved:
    return KvRemoved(hashes=[name(path, native) for path in paths])


@pytest.mark.parametrize("native", [False, True])
def test_a_block_is_held_until_its_last_copy_has_gone(native):
    index = ExactIndex(BLOCK)
    index.join(COPYING, native=native, copies=True)
    path = (1, 2, 3)
    index.apply(COPYING, stored(path, 0, native))
    index.apply(COPYING, stored(path, 2, native))  # a full hit: the last block again
    index.apply(COPYING, removed(path, native=native))
    assert index.overlap(hashes(path))[COPYING].device == 3
    index.apply(COPYING, removed(path, native=native))
    assert index.overlap(hashes(path))[COPYING].device == 2
    assert index.counters.copies_removed == 1
    index.check()


def test_one_event_may_remove_two_copies():
    index = ExactIndex(BLOCK)
    index.join(COPYING, native=False, copies=True)
    for _ in range(3):
        index.apply(COPYING, stored((1, 2), 0, False))
    index.apply(COPYING, removed((1, 2), (1, 2), (1,)))
    assert index.blocks_of(COPYING) == set(hashes((1, 2)))
    index.apply(COPYING, removed((1, 2)))
    assert index.blocks_of(COPYING) == set(hashes((1,)))


def test_an_engine_that_says_the_same_twice_removes_it_once():
    index = ExactIndex(BLOCK)
    index.join(PLAIN, native=False)
    index.apply(PLAIN, stored((1, 2), 0, False))
    index.apply(PLAIN, stored((1, 2), 0, False))
    index.apply(PLAIN, removed((1, 2)))
    assert index.blocks_of(PLAIN) == set(hashes((1,)))


def test_what_the_bound_on_memory_drops_leaves_no_copies_behind():
    index = ExactIndex(BLOCK, blocks_max=2)
    index.join(COPYING, native=False, copies=True)
    for path in ((1,), (1,), (2,), (3,)):
        index.apply(COPYING, stored(path, 0, False))
        index.check()
    index.apply(COPYING, removed((1,), (1,)))
    index.apply(COPYING, stored((1,), 0, False))
    index.apply(COPYING, removed((1,)))
    assert hashes((1,))[0] not in index.blocks_of(COPYING), "the copies of before must not keep it"


@pytest.mark.parametrize(("engine", "held"), [("vllm", 1), ("openai", 0)])
def test_the_router_knows_which_engines_announce_copies(engine, held):
    router = Router(RouterSettings())
    card = WorkerCard(
        id=COPYING.worker, epoch=1, model="m", url="http://x", engine=engine, block_size=BLOCK, events=("tcp://x:1",)
    )
    router.handle(0, WorkerJoined(card=card))
    events = [stored((1,), 0, False), stored((1,), 0, False), removed((1,))]
    router.handle(1, KvObserved(worker=card.id, rank=0, epoch=1, sequence=0, events=events))
    index = router.pools["m"].index.exact
    assert index is not None and index.resident(COPYING) == held


class Copies(RuleBasedStateMachine):
    """A pool of physical blocks, each announced when it is filled and when it is taken for something else."""

    @initialize(native=st.booleans())
    def begin(self, native):
        self.native = native
        self.index = ExactIndex(BLOCK, audit_every=3)
        self.join()
        self.pool: list[Path] = []
        self.plain: set[Path] = set()

    def join(self):
        self.index.join(COPYING, native=self.native, copies=True)
        self.index.join(PLAIN, native=self.native)

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), hit=st.integers(0, 4))
    def compute(self, path, hit):
        """A request with this prompt: its first ``hit`` blocks are used as they are, where they are there."""
        while hit and not (hit < len(path) and all(path[: i + 1] in self.pool for i in range(hit))):
            hit -= 1
        self.index.apply(COPYING, stored(path, hit, self.native))
        self.pool += [path[: i + 1] for i in range(hit, len(path))]
        self.index.apply(PLAIN, stored(path, 0, self.native))
        self.plain |= {path[: i + 1] for i in range(len(path))}

    @rule(picks=st.lists(st.integers(0, 30), min_size=1, max_size=4, unique=True))
    def evict(self, picks):
        gone = [self.pool[i] for i in picks if i < len(self.pool)]
        self.pool = [path for i, path in enumerate(self.pool) if i not in picks]
        self.index.apply(COPYING, removed(*gone, native=self.native))
        self.index.apply(PLAIN, removed(*gone, native=self.native))
        self.plain -= set(gone)

    @rule(leaves=st.booleans())
    def clear(self, leaves):
        if leaves:
            self.index.remove(COPYING)
            self.join()
        else:
            self.index.apply(COPYING, KvCleared())
        self.pool = []

    @rule()
    def reload(self):
        saved = written(self.index)
        self.index = ExactIndex(BLOCK, audit_every=3)
        self.index.restore(saved)

    @invariant()
    def holds_what_has_a_copy(self):
        if hasattr(self, "pool"):
            self.index.check()
            held = Counter(self.pool)
            assert self.index.blocks_of(COPYING) == {hashes(path)[-1] for path in held}
            assert self.index.blocks_of(PLAIN) == {hashes(path)[-1] for path in self.plain}


TestCopies = Copies.TestCase
TestCopies.settings = settings(max_examples=deep(60), stateful_step_count=30)
