"""Do the block caches count as a naive one does? Driven by random requests that take, name and release."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock_lab.engine.block_cache import BlockCache
from penstock_lab.engine.run_cache import RunCache
from penstock_lab.simulate.prefix_tree import PrefixTree
from penstock_lab.traffic.traffic_request import TrafficRequest
from tests.depth import deep

BLOCKS = 24


class CacheTwins(RuleBasedStateMachine):
    """The cache beside lists: each request a list of names or None."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = self.fresh()
        self.free = BLOCKS
        self.idle: list[int] = []
        self.requests: list[tuple[Any, list[int | None]]] = []

    def fresh(self) -> Any:
        return BlockCache(BLOCKS)

    def chain(self, names: list[int]) -> Any:
        return names

    def evicted(self, told: Any) -> list[int]:
        return told  # type: ignore[no-any-return]

    def holders(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for _, blocks in self.requests:
            for name in blocks:
                if name is not None:
                    counts[name] = counts.get(name, 0) + 1
        return counts

    @rule(trunk=st.integers(0, 2), fork=st.integers(1, 6), branch=st.integers(0, 3), length=st.integers(1, 9))
    def admit(self, trunk: int, fork: int, branch: int, length: int) -> None:
        chain = self.chain([trunk * 1000 + (i if i < fork else (fork * 10 + branch) * 10 + i) for i in range(length)])
        held = self.holders()
        depth = 0
        while depth < length and (chain[depth] in held or chain[depth] in self.idle):
            depth += 1
        assert self.cache.depth(chain, length) == depth
        assert self.cache.referenced_depth(chain, depth) == sum(name in held for name in chain[:depth])
        woken = sum(name in self.idle for name in chain[:depth])
        if length - depth + woken > self.cache.available:
            return
        if depth:
            self.cache.hold(chain, 0, depth)
        self.idle = [name for name in self.idle if name not in chain[:depth]]
        self.requests.append((chain, list(chain[:depth])))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 4))
    def take(self, data: st.DataObject, count: int) -> None:
        if count > self.cache.available:
            return
        _, blocks = data.draw(st.sampled_from(self.requests))
        evicted = self.cache.take(count)
        want = []
        for _ in range(count):
            if not self.free:
                want.append(self.idle.pop(0))
                self.free += 1
            self.free -= 1
            blocks.append(None)
        assert self.evicted(evicted) == want

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        chain, blocks = data.draw(st.sampled_from(self.requests))
        start = sum(name is not None for name in blocks)
        end = min(len(chain), len(blocks))
        if end <= start:
            return
        end = data.draw(st.integers(start + 1, end))
        held = self.holders()
        known = 0
        for place in range(start, end):
            if chain[place] in held or chain[place] in self.idle:
                known += 1
                self.free += 1
                if chain[place] in self.idle:
                    self.idle.remove(chain[place])
            blocks[place] = chain[place]
        assert self.cache.name(chain, start, end) == known

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.requests) - 1))
        chain, blocks = self.requests.pop(place)
        named = sum(name is not None for name in blocks)
        self.cache.release(chain, named, len(blocks) - named)
        held = self.holders()
        for name in reversed(blocks):
            if name is None:
                self.free += 1
            elif name not in held:
                self.idle.append(name)

    @rule()
    def drop_idle(self) -> None:
        assert self.evicted(self.cache.drop_idle()) == self.idle
        self.free += len(self.idle)
        self.idle = []

    @rule()
    def write_down_and_read_again(self) -> None:
        state = self.cache.snapshot()
        self.cache = self.fresh()
        self.cache.restore(state)
        assert self.cache.snapshot() == state

    @invariant()
    def adds_up(self) -> None:
        private = sum(name is None for _, blocks in self.requests for name in blocks)
        self.cache.check(self.holders(), private)
        assert (self.cache.free, self.cache.available) == (self.free, self.free + len(self.idle))
        assert self.cache.used == BLOCKS - self.free - len(self.idle)


class RunTwins(CacheTwins):
    """The same with prompts as runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names = PrefixTree(1)

    def fresh(self) -> Any:
        return RunCache(BLOCKS)

    def chain(self, names: list[int]) -> Any:
        return self.names.blocks(TrafficRequest(at=0.0, isl=len(names), osl=1, hash_ids=names, block_size=1))

    def evicted(self, told: Any) -> list[int]:
        if told is None:
            return []
        assert len(told) == len(list(told))
        return [run << 20 | block for run, start, end in told.parts for block in reversed(range(start, end))]


for twins in (CacheTwins, RunTwins):
    twins.TestCase.settings = settings(max_examples=deep(150), stateful_step_count=40, deadline=None)
test_the_cache_counts_as_a_naive_one = CacheTwins.TestCase
test_the_cache_of_runs_counts_as_a_naive_one = RunTwins.TestCase
