"""The approximate index beside a list of placements that is searched from scratch."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.kernel.machine import SECOND
from penstock.kernel.values import Target, WorkerId
from penstock.router.kv_index.approximate_index import ApproximateIndex
from tests.depth import deep
from tests.router.written_states import written

TARGETS = [Target(WorkerId("a")), Target(WorkerId("a"), 1), Target(WorkerId("b"))]
A, RANK, B = TARGETS
TTL = 10

contents = st.integers(0, 2)
paths = st.lists(contents, max_size=7).map(tuple)
targets = st.sampled_from(TARGETS)


def chain(path: tuple[int, ...]) -> list[int]:
    """One number per block, which stands for its whole prefix."""
    return [hash_of(path[: i + 1]) for i in range(len(path))]


def hash_of(path: tuple[int, ...]) -> int:
    value = 1
    for content in path:
        value = value * 4 + content
    return value


class ApproximateMachine(RuleBasedStateMachine):
    """Placements, look-ups, clears and time against (target, block) -> end of its time in a plain dict."""

    @initialize(most=st.sampled_from([5, 12, 1000]))
    def begin(self, most: int) -> None:
        self.most = most
        self.index = ApproximateIndex(ttl=TTL, blocks_max=most)
        self.until: dict[tuple[Target, int], tuple[int, int]] = {}
        """(target, block) -> (end of its time, -depth): the smallest goes first."""
        self.now = 0

    @rule(on=targets, path=paths)
    def route(self, on: Target, path: tuple[int, ...]) -> None:
        self.expire()
        self.index.routed(on, chain(path), self.now)
        for depth, block in enumerate(chain(path)):
            self.until[on, block] = (self.now + TTL, -depth)

    @rule(step=st.integers(-2, TTL))
    def wait(self, step: int) -> None:
        """Time goes on, or is told wrongly backwards and must not be believed."""
        self.now += max(0, step)
        if step < 0:
            self.index.overlap([], self.now + step)

    @rule(on=targets, leaves=st.booleans())
    def clear(self, on: Target, leaves: bool) -> None:
        (self.index.remove if leaves else self.index.clear)(on)
        self.until = {key: value for key, value in self.until.items() if key[0] != on}

    @rule(path=paths, wanted=st.none() | st.sets(targets))
    def find(self, path: tuple[int, ...], wanted: set[Target] | None) -> None:
        found = self.index.overlap(chain(path), self.now, wanted)
        if wanted is None:
            column = self.index.column(chain(path), {target: at for at, target in enumerate(TARGETS)}, self.now)
            assert ([0] * len(TARGETS) if column is None else column.tolist()) == [found.get(to, 0) for to in TARGETS]
        expected = {}
        for target in TARGETS if wanted is None else wanted:
            depth = 0
            while depth < len(path) and self.until.get((target, chain(path)[depth]), (0, 0))[0] > self.now:
                depth += 1
            if depth:
                expected[target] = depth
        if self.most == 1000:
            assert found == expected
        else:  # pruning may have forgotten some, never invents any
            assert all(depth <= expected[target] for target, depth in found.items())

    @rule()
    def reload(self) -> None:
        saved = written(self.index)
        self.index = ApproximateIndex(ttl=TTL, blocks_max=self.most)
        self.index.restore(saved)
        assert written(self.index) == saved

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "index"):
            self.index.check()
            assert len(self.index) <= self.most

    def expire(self) -> None:
        self.until = {key: value for key, value in self.until.items() if value[0] > self.now}


TestApproximate = ApproximateMachine.TestCase
TestApproximate.settings = settings(max_examples=deep(100), stateful_step_count=40)


def test_a_placement_counts_until_its_time_is_over() -> None:
    index = ApproximateIndex(ttl=120 * SECOND)
    index.routed(A, [1, 2, 3], now=0)
    assert index.overlap([1, 2, 9], 120 * SECOND - 1) == {A: 2}
    assert index.overlap([1, 2, 9], 120 * SECOND) == {}
    assert index.expired == 3 and len(index) == 0


def test_a_later_sibling_keeps_the_shared_prefix() -> None:
    index = ApproximateIndex(ttl=10)
    index.routed(A, [1, 2, 3], now=0)
    index.routed(A, [1, 2, 4], now=5)
    assert index.overlap([1, 2, 3], 12) == {A: 2}


def test_pruning_takes_the_oldest_sequence_from_its_end() -> None:
    index = ApproximateIndex(ttl=100, blocks_max=10)
    index.routed(A, [1, 2, 3, 4, 5, 6], now=0)
    index.routed(B, [11, 12, 13, 14, 15], now=1)
    assert len(index) == 8 and index.pruned == 3
    assert index.overlap([1, 2, 3, 4, 5, 6], 1) == {A: 3}
    assert index.overlap([11, 12, 13, 14, 15], 1) == {B: 5}


def test_one_prompt_longer_than_the_bound_keeps_its_head() -> None:
    index = ApproximateIndex(ttl=100, blocks_max=10)
    index.routed(A, list(range(1, 101)), now=0)
    assert index.overlap(list(range(1, 101)), 0) == {A: 8}


def test_what_a_gone_target_leaves_behind_is_cleared_in_steps() -> None:
    index = ApproximateIndex(ttl=100)
    index.routed(A, list(range(2000)), now=0)
    index.remove(A)
    assert index.overlap(list(range(2000)), 0) == {} and len(index) == 0
    index.routed(B, [1], now=0)
    assert index.overlap([0, 1], 0) == {}
    for _ in range(6):
        index.check()
        index.overlap([], 0)
    assert len(index.snapshot().masks) == 1
    index.routed(RANK, [5], now=0)
    index.check()
    assert len(index.snapshot().slots.pairs) == 2, "the bit is free again"


def test_a_prompt_that_comes_again_refreshes_stretches_and_not_blocks() -> None:
    index = ApproximateIndex(ttl=10)
    prompt = list(range(1000))
    for now in range(3):
        index.routed(A, prompt, now)
    assert _stretches(index) == [(12, 1000)]
    index.routed(A, prompt[:600], 5)
    assert _stretches(index) == [(12, 400), (15, 600)]
    index.routed(A, [*prompt[:800], 2000, 2001], 6)
    assert _stretches(index) == [(12, 200), (16, 2), (16, 200), (16, 600)]
    index.routed(A, prompt, 7)
    assert _stretches(index) == [(16, 2), (17, 200), (17, 200), (17, 600)]
    index.check()
    assert index.overlap([*prompt[:800], 2000], 15) == {A: 801}
    assert index.overlap([*prompt[:800], 2000], 16) == {A: 800}


def _stretches(index: ApproximateIndex) -> list[tuple[int, int]]:
    (held,) = index.snapshot().slot_blocks.values()
    return [(until, len(blocks)) for until, blocks in held]


def test_blocks_that_agree_in_their_hash_cost_nothing_but_a_guess() -> None:
    index = ApproximateIndex(ttl=10, blocks_max=8)
    for now, blocks in enumerate(([1, 2, 1, 2], [5, 2, 6], [1, 9, 9], [7, 7, 7, 7, 7])):
        index.routed(A, blocks, now)
    assert index.overlap([1, 2], 30) == {} and len(index) == 0
    assert index.snapshot().masks == {}
