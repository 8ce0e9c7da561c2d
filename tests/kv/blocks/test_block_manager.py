"""Does the block manager count as a naive one does, over every eviction order and a million random operations?"""

import random
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.kernel.errors import ConfigError, InvariantError
from penstock_kv.blocks.block_manager import BlockManager, OrderName
from penstock_kv.blocks.block_table import TRANSITIONS, BlockHandle, WeakHandle
from tests.depth import deep
from tests.kv.blocks.naive_blocks import CHAINS, Twins, random_step

ORDERS: tuple[OrderName, ...] = get_args(OrderName)
OPERATIONS = 1_000_000
SEEDS = 25


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("order", ORDERS)
def test_random_operations_end_as_those_of_the_naive_manager(order: OrderName, seed: int) -> None:
    rng = random.Random(seed)
    twins = Twins(order)
    for number in range(deep(OPERATIONS // SEEDS // len(ORDERS))):
        random_step(twins, rng)
        twins.compare()
        if number % 50 == 0:
            twins.compare_all()
    twins.compare_all()
    counts = twins.manager.counts
    assert counts.evicted > 100
    assert min(counts.matched, counts.duplicates, counts.invalidated, counts.refused, counts.stale, counts.leaked) > 0


positions = st.integers(0, 63)


class BlockTwins(RuleBasedStateMachine):
    """The same operations, chosen so that hypothesis can shrink what fails."""

    @initialize(order=st.sampled_from(ORDERS))
    def begin(self, order: OrderName) -> None:
        self.twins = Twins(order)

    @rule(count=st.integers(1, 9))
    def allocate(self, count: int) -> None:
        self.twins.allocate(count)

    @rule(chain=positions, length=st.integers(1, 9))
    def match(self, chain: int, length: int) -> None:
        self.twins.match(chain, length)

    @precondition(lambda self: self.twins.handles)
    @rule(
        which=positions, chain=positions, depth=st.integers(0, 8), count=st.integers(1, 9), priority=st.integers(0, 2)
    )
    def fill_and_register(self, which: int, chain: int, depth: int, count: int, priority: int) -> None:
        self.twins.apply(which)
        self.twins.register(which, chain, depth, count, priority)

    @precondition(lambda self: self.twins.handles)
    @rule(which=positions, at=positions, trigger=st.sampled_from(("add", "pop", "commit")), tokens=st.integers(1, 5))
    def write(self, which: int, at: int, trigger: str, tokens: int) -> None:
        self.twins.write(which, at, trigger, tokens)

    @precondition(lambda self: self.twins.handles)
    @rule(which=positions, dropped=st.booleans())
    def release(self, which: int, dropped: bool) -> None:
        self.twins.release(which, dropped)

    @rule(chain=positions, depth=st.integers(0, 8))
    def invalidate_and_remember(self, chain: int, depth: int) -> None:
        self.twins.remember(chain + 1, depth)
        self.twins.invalidate(chain, depth)

    @rule(which=positions)
    def upgrade(self, which: int) -> None:
        self.twins.upgrade(which)

    @rule(chain=positions, depth=st.integers(0, 8), length=st.sampled_from((0, 3, 30)), passed=st.integers(0, 5))
    def pin(self, chain: int, depth: int, length: int, passed: int) -> None:
        self.twins.pin(chain, depth, length)
        self.twins.available(passed)

    @rule()
    def restart(self) -> None:
        self.twins.restart()

    @rule()
    def clear_idle(self) -> None:
        self.twins.clear_idle()

    @invariant()
    def same(self) -> None:
        if hasattr(self, "twins"):
            self.twins.compare()
            self.twins.compare_all()


TestBlockTwins = BlockTwins.TestCase
TestBlockTwins.settings = settings(max_examples=deep(300), stateful_step_count=50, deadline=None)


def filled(manager: BlockManager, chain: int = 0, length: int = 4, **options: int) -> BlockHandle:
    """Return a handle of a chain's registered blocks."""
    handle = manager.allocate(length, "test", 0)
    assert handle is not None
    manager.apply(handle)
    manager.register(handle, CHAINS[chain][:length], **options)
    return handle


def test_an_allocation_that_does_not_fit_evicts_nothing() -> None:
    manager = BlockManager(8, 4)
    filled(manager).release()
    with filled(manager, chain=6, length=3):
        assert manager.allocate(6, "too many", 0) is None
        assert manager.idle == 4
        assert manager.counts.refused == 1


def test_a_handle_releases_itself_also_after_an_error() -> None:
    manager = BlockManager(8, 4)
    handle = filled(manager)
    with pytest.raises(RuntimeError), handle:
        raise RuntimeError("the engine failed")
    assert (manager.active, manager.idle, manager.open_handles()) == (0, 4, [])
    assert manager.counts.leaked == 0


def test_a_forgotten_handle_is_taken_back_and_counted() -> None:
    manager = BlockManager(8, 4)
    handle = filled(manager)
    assert [opened.owner for opened in manager.open_handles(before=1)] == ["test"]
    assert manager.open_handles(before=0) == []
    del handle
    assert manager.available(0) == 8
    assert manager.counts.leaked == 1


def test_a_handle_of_another_manager_or_of_before_a_restart_is_stale() -> None:
    manager, other = BlockManager(8, 4), BlockManager(8, 4)
    handle, theirs = filled(manager), filled(other)
    with pytest.raises(InvariantError, match="stale"):
        manager.release(theirs)
    manager.restore(manager.snapshot())
    with pytest.raises(InvariantError, match="stale"):
        handle.release()
    del handle
    assert manager.available(0) == 4, "the object of before the restart released the blocks of its successor"
    manager.reopen(1).release()
    assert manager.available(0) == 8
    theirs.release()


def test_what_was_invalidated_can_neither_be_matched_nor_registered_again() -> None:
    manager = BlockManager(8, 4)
    handle = filled(manager)
    assert manager.invalidate(CHAINS[0][1])
    assert manager.lookup(CHAINS[0][:4]) == 1
    with pytest.raises(InvariantError, match="invalid, not complete"):
        manager.register(handle, CHAINS[0][1:2], first=1)
    handle.release()
    assert (manager.free, manager.idle) == (5, 3)


def test_what_a_carrier_read_is_void_once_the_slot_has_another_block() -> None:
    manager = BlockManager(4, 4)
    filled(manager).release()
    weak = manager.weak(CHAINS[0][0])
    assert weak is not None
    assert manager.valid(weak)
    filled(manager, chain=6).release()
    filled(manager).release()
    assert not manager.valid(weak), "the same key in a slot that was written in between"
    assert manager.counts.stale == 1


def test_a_duplicate_holds_the_block_that_existed() -> None:
    manager = BlockManager(8, 4)
    first, second = filled(manager), filled(manager)
    assert first.slots == second.slots
    assert manager.free == 4
    assert manager.counts.duplicates == 4
    first.release()
    second.release()


@pytest.mark.parametrize("order", ORDERS)
def test_a_prefix_that_is_idle_is_evicted_from_its_end_but_for_what_was_used_last(order: OrderName) -> None:
    manager = BlockManager(8, 4, order)
    filled(manager).release()
    weak = manager.weak(CHAINS[0][3])
    assert weak is not None
    with manager.upgrade(weak, "test", 0) or pytest.fail("evicted"):
        pass  # now the prefix's last block was used last
    filled(manager, chain=6).release()
    with manager.allocate(3, "test", 0) or pytest.fail("no room") as handle:
        assert [CHAINS[0].index(key) for _, key in handle.evicted] == [2, 1, 0]


def test_a_pin_holds_until_its_time_and_then_the_block_goes_first() -> None:
    manager = BlockManager(8, 4, "priority")
    filled(manager, priority=2).release()
    filled(manager, chain=6, priority=1).release()
    assert manager.pin(CHAINS[0][:4], until=100) == 4
    assert manager.available(99) == 4
    assert manager.allocate(5, "test", 99) is None
    with manager.allocate(4, "test", 100) or pytest.fail("no room") as handle:
        assert {key for _, key in handle.evicted} == set(CHAINS[0][:4])


def test_blocks_whose_pin_ran_out_go_before_others_of_the_lowest_priority() -> None:
    manager = BlockManager(8, 4, "priority")
    filled(manager).release()
    filled(manager, chain=6).release()
    assert manager.pin(CHAINS[6][:4], until=100) == 4
    with manager.allocate(4, "test", 100) or pytest.fail("no room") as handle:
        assert {key for _, key in handle.evicted} == set(CHAINS[6][:4])


def test_blocks_evicted_ahead_of_need_free_their_slots_when_their_bytes_are_saved() -> None:
    manager = BlockManager(8, 4)
    filled(manager).release()
    filled(manager, chain=6).release()
    handle, columns = manager.vacate(6, lambda key: key in CHAINS[0][2:4], "test", 0)
    assert [key for _, key in handle.evicted] == [*CHAINS[0][3::-1], *CHAINS[6][3:1:-1]]
    assert columns.keys == CHAINS[0][3:1:-1]
    assert columns.parents == [CHAINS[0][2], CHAINS[0][1]]
    assert (manager.free, manager.idle, manager.active) == (4, 2, 2)
    manager.check()
    handle.release()
    assert manager.free == 6


def test_a_tier_takes_back_what_it_had_before_a_restart() -> None:
    manager = BlockManager(8, 4)
    slots, generations = [5, 2, 5, 99], [7, 0, 0, 0]
    assert manager.adopt(CHAINS[0][:4], slots, generations, [None, *CHAINS[0][:3]]) == [2, 3]
    manager.check()
    assert manager.weak(CHAINS[0][0]) == WeakHandle(5, 7, CHAINS[0][0])
    with manager.allocate(7, "test", 0) or pytest.fail("no room") as handle:
        assert [key for _, key in handle.evicted] == CHAINS[0][:1], "the longest unused goes first"


def test_blocks_that_become_dear_are_evicted_later() -> None:
    manager = BlockManager(8, 4, "priority")
    filled(manager).release()
    filled(manager, chain=6).release()
    manager.prefer(CHAINS[0][:4], 1)
    manager.check()
    with manager.allocate(4, "test", 0) or pytest.fail("no room") as handle:
        assert {key for _, key in handle.evicted} == set(CHAINS[6][:4])


def test_wrong_settings_name_the_fix() -> None:
    with pytest.raises(ConfigError, match="lru, priority"):
        BlockManager(8, 4, "mru")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least one block"):
        BlockManager(0, 4)
    manager = BlockManager(8, 4)
    filled(manager).release()
    with pytest.raises(ConfigError, match="priority"):
        manager.pin(CHAINS[0][:1], 5)


def test_the_page_has_the_life_cycle_as_the_code_reads_it() -> None:
    page = (Path(__file__).parents[3] / "docs/concepts/blocks.md").read_text()
    for row in TRANSITIONS:
        assert f"| {row.before.name.lower()} | {row.trigger} | {row.after.name.lower()} | {row.check} |" in page
