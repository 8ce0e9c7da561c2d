"""Attention groups of a hybrid model: how deep a prefix can be used, where each kind of layer has blocks of its own."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock.blocks.block_handle import BlockHandle
from penstock.blocks.block_key import BlockKey
from penstock.blocks.block_manager import BlockManager
from penstock.kernel.machine import Nanos


class AttentionGroup(msgspec.Struct, frozen=True):
    """Layers that share block tables.

    Args:
        window: blocks before a token that these layers read; None for all (full attention).
    """

    window: int | None = None


class GroupMatch(NamedTuple):
    """What was matched: ``depth`` blocks, and a handle per group with those blocks that the group needs for it."""

    depth: int
    handles: list[BlockHandle]


def usable_depth(manager: BlockManager, groups: Sequence[AttentionGroup], keys: Sequence[Sequence[BlockKey]]) -> int:
    """Return the deepest prefix for which every group has what its layers read: all blocks, or the last window.

    Args:
        keys: per group, the key of each block of the prompt, shape (groups, n).
    Cost: O(groups * n) look-ups. Reads only.
    """
    index = manager.table.index
    longest = min(len(each) for each in keys)
    usable = [True] * (longest + 1)
    for group, each in zip(groups, keys, strict=True):
        run = 0
        for depth in range(1, longest + 1):
            run = run + 1 if each[depth - 1] in index else 0
            if run < (depth if group.window is None else min(depth, group.window)):
                usable[depth] = False
    return max(depth for depth in range(longest + 1) if usable[depth])


def match_groups(
    manager: BlockManager,
    groups: Sequence[AttentionGroup],
    keys: Sequence[Sequence[BlockKey]],
    owner: str,
    now: Nanos,
) -> GroupMatch:
    """Hold the deepest prefix that every group has: all of it, or nothing of it."""
    depth = usable_depth(manager, groups, keys)
    handles: list[BlockHandle] = []
    for group, each in zip(groups, keys, strict=True):
        start = 0 if group.window is None else max(0, depth - group.window)
        handles.append(manager.match(each[start:depth], owner, now))
    return GroupMatch(depth, handles)
