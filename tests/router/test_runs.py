"""Do load, index and routing history of runs say what their block-by-block yardsticks say?"""

from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.kernel.values import KvCleared, KvRemoved, KvStored, Target, WorkerId
from penstock.router.kv_index.approximate_index import ApproximateIndex
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.router.workers.active_sequences import TargetLoad
from penstock_lab.engine.run_cache import RunCache
from penstock_lab.runs.block_runs import Chain, Stretches, chain_of, stretches_of
from penstock_lab.runs.run_history import RunHistory
from penstock_lab.runs.run_index import RunIndex
from penstock_lab.runs.run_load import RunLoad
from penstock_lab.simulate.prefix_tree import PrefixTree
from penstock_lab.traffic.traffic_request import TrafficRequest
from tests.depth import deep
from tests.router.written_states import written

TARGETS = [Target(WorkerId(f"w{n}"), 0) for n in range(3)]
PLACE = {target: place for place, target in enumerate([Target(WorkerId("idle"), 0), *reversed(TARGETS)])}
PROMPTS = st.tuples(st.integers(0, 1), st.integers(1, 6), st.integers(0, 3), st.integers(1, 9))


def by_place(held: Mapping[Target, Any], tier: int | None) -> list[int]:
    """Write an answer by name as a column: one tier of it, or, where None, the number that it is."""
    return [0 if target not in held else held[target] if tier is None else held[target][tier] for target in PLACE]


@pytest.fixture(autouse=True, scope="module")
def rows_for_few_holders() -> Iterator[None]:
    """Let a run have a row from two holders on, so that three targets come and go across that number."""
    with mock.patch("penstock_lab.runs.run_reach.ROW_MIN", 2):
        yield


class Twins(RuleBasedStateMachine):
    """Each thing beside its yardstick; what engines store is what real caches of theirs would."""

    def __init__(self) -> None:
        super().__init__()
        self.names = PrefixTree(1)
        self.now = 0
        self.load, self.load_by_block = RunLoad(), TargetLoad()
        self.using: list[Chain] = []
        self.history = RunHistory(ttl=5, blocks_max=20)
        self.history_by_block = ApproximateIndex(ttl=5, blocks_max=20)
        self.index, self.index_by_block = RunIndex(16), ExactIndex(16)
        for target in TARGETS:
            self.index_by_block.join(target, native=True)
        self.caches = {target: RunCache(12) for target in TARGETS}

    def chain(self, prompt: tuple[int, int, int, int]) -> Chain:
        trunk, fork, branch, length = prompt
        ids = [trunk * 1000 + (i if i < fork else (fork * 10 + branch) * 10 + i) for i in range(length)]
        return self.names.blocks(TrafficRequest(at=0.0, isl=length, osl=1, hash_ids=ids, block_size=1))

    @rule(prompt=PROMPTS)
    def use(self, prompt: tuple[int, int, int, int]) -> None:
        chain = self.chain(prompt)
        self.using.append(chain)
        self.load.use(chain)
        self.load_by_block.use(list(chain))

    @precondition(lambda self: self.using)
    @rule(place=st.integers(0, 20))
    def leave(self, place: int) -> None:
        chain = self.using.pop(place % len(self.using))
        self.load.leave(chain)
        self.load_by_block.leave(list(chain))

    @rule(prompt=PROMPTS, worker=st.sampled_from(TARGETS), later=st.integers(1, 3))
    def route(self, prompt: tuple[int, int, int, int], worker: Target, later: int) -> None:
        # Placements of one moment on several targets may be pruned in any order: there are none here.
        self.now += later
        chain = self.chain(prompt)
        self.history.routed(worker, chain, self.now)
        self.history_by_block.routed(worker, list(chain), self.now)

    @rule(prompt=PROMPTS, worker=st.sampled_from(TARGETS))
    def compute(self, prompt: tuple[int, int, int, int], worker: Target) -> None:
        """An engine computes a prompt and is done with it at once; the indexes hear what its cache did."""
        chain, cache = self.chain(prompt), self.caches[worker]
        length = len(chain)
        hit = cache.depth(chain, length)
        if hit:
            cache.hold(chain, 0, hit)
        events: list[Any] = []
        evicted = cache.take(length - hit)
        if evicted:
            events.append(KvRemoved(hashes=evicted))
        if hit < length:
            cache.name(chain, hit, length)
            parent = chain[hit - 1] if hit else None
            events.append(KvStored(hashes=Stretches(chain.cut(hit, length)), parent=parent))
        cache.release(chain, length, 0)
        for event in events:
            self.index.apply(worker, event)
            names = list(event.hashes)
            if isinstance(event, KvRemoved):
                self.index_by_block.apply(worker, KvRemoved(hashes=names[::-1]))
            else:
                self.index_by_block.apply(worker, KvStored(hashes=names, parent=event.parent))

    @rule(worker=st.sampled_from(TARGETS), gone=st.booleans())
    def forget(self, worker: Target, gone: bool) -> None:
        if gone:
            for index in (self.history, self.history_by_block, self.index, self.index_by_block):
                index.remove(worker)
            self.index_by_block.join(worker, native=True)
        else:
            for exact in (self.index, self.index_by_block):
                exact.apply(worker, KvCleared())
        self.caches[worker] = RunCache(12)

    @rule()
    def write_down_and_read_again(self) -> None:
        history, index = RunHistory(ttl=5, blocks_max=20), RunIndex(16)
        history.restore(written(self.history))
        index.restore(written(self.index))
        assert history.snapshot() == self.history.snapshot() and index.snapshot() == self.index.snapshot()
        self.history, self.index = history, index

    @rule(prompt=PROMPTS)
    def ask(self, prompt: tuple[int, int, int, int]) -> None:
        chain = self.chain(prompt)
        names = list(chain)
        assert chain_of(names).parts == list(chain.parts) and chain[2:5] == names[2:5] and chain[-1] == names[-1]
        assert stretches_of(names) == list(chain.cut(0, len(chain)))
        assert self.load.blocks_with(chain, 2) == self.load_by_block.blocks_with(names, 2)
        assert self.history.overlap(chain, self.now) == self.history_by_block.overlap(names, self.now)
        assert self.index.overlap(chain) == dict(self.index_by_block.overlap(names).items())
        for index, blocks in ((self.index, chain), (self.index_by_block, names)):
            device, lower = index.columns(blocks, PLACE)  # type: ignore[arg-type]
            assert [device.tolist(), list(lower)] == [by_place(self.index_by_block.overlap(names), 0), []]
        for history, blocks in ((self.history, chain), (self.history_by_block, names)):
            guessed = history.column(blocks, PLACE, self.now)  # type: ignore[arg-type]
            held = by_place(self.history_by_block.overlap(names, self.now), None)
            assert held == ([0] * len(PLACE) if guessed is None else guessed.tolist())

    @invariant()
    def adds_up(self) -> None:
        self.history.check()
        self.index.check()
        assert (self.load.blocks, self.load.users()) == (self.load_by_block.blocks, self.load_by_block.users())
        assert len(self.history) == len(self.history_by_block) and len(self.index) == len(self.index_by_block)
        assert self.history.expired == self.history_by_block.expired
        assert self.history.pruned == self.history_by_block.pruned
        for target in TARGETS:
            assert self.index.blocks_of(target) == self.index_by_block.blocks_of(target)
            assert self.index.resident(target) == self.index_by_block.resident(target)


Twins.TestCase.settings = settings(max_examples=deep(150), stateful_step_count=40, deadline=None)
test_runs_say_what_blocks_say = Twins.TestCase
