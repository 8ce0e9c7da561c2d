"""A hybrid model's prefix counts where every group has what its layers read."""

import random

from penstock.blocks.attention_groups import AttentionGroup, match_groups, usable_depth
from penstock.blocks.block_key import in_group
from penstock.blocks.block_manager import BlockManager
from tests.blocks.naive_blocks import CHAINS
from tests.depth import deep

GROUPS = [AttentionGroup(), AttentionGroup(window=2), AttentionGroup(window=3)]
KEYS = [in_group(CHAINS[0], group) for group in range(3)]


def with_blocks(present: list[list[int]]) -> BlockManager:
    """Return a manager in which these positions of each group are registered."""
    manager = BlockManager(32, 4)
    for keys, positions in zip(KEYS, present, strict=True):
        for position in positions:
            handle = manager.allocate(1, "test", 0)
            assert handle is not None
            manager.apply(handle)
            manager.register(handle, keys[position : position + 1], parent=keys[position - 1] if position else None)
            handle.release()
    return manager


def test_a_window_group_needs_its_last_blocks_only() -> None:
    manager = with_blocks([[0, 1, 2, 3, 4], [3, 4], [2, 3, 4]])
    depth, handles = match_groups(manager, GROUPS, KEYS, "test", 0)
    assert depth == 5
    assert [len(handle) for handle in handles] == [5, 2, 3]
    for handle in handles:
        handle.release()


def test_a_hole_in_one_group_makes_all_shorter() -> None:
    assert usable_depth(with_blocks([[0, 1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 4]]), GROUPS, KEYS) == 2
    assert usable_depth(with_blocks([[0, 1, 2], [], [0, 1, 2]]), GROUPS, KEYS) == 0


def test_depth_is_the_naive_one() -> None:
    rng = random.Random(1)
    for _ in range(deep(300)):
        present = [[at for at in range(9) if rng.random() < 0.8] for _ in GROUPS]
        naive = max(
            depth
            for depth in range(10)
            if all(
                set(range(0 if group.window is None else max(0, depth - group.window), depth)) <= set(positions)
                for group, positions in zip(GROUPS, present, strict=True)
            )
        )
        assert usable_depth(with_blocks(present), GROUPS, KEYS) == naive
