"""Who holds which leading blocks, done in the plainest way? A radix tree with exact sets: the index's naive twin.

It knows nothing of hashes: a block is the path of contents that leads to it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.kernel.values import TIERS, Target, Tier
from penstock.router.kv_index.indexer import HeldBlocks

Path = tuple[int, ...]
"""Contents of the blocks from the root on; it names its last block."""


@dataclass
class Node:
    children: dict[int, "Node"] = field(default_factory=dict)
    holders: dict[Tier, set[Target]] = field(default_factory=lambda: {tier: set() for tier in TIERS})


class RadixOracle:
    def __init__(self) -> None:
        self.root = Node()

    def store(self, target: Target, path: Path, tier: Tier = "device") -> None:
        """Let a target hold the last block of a path, and only that one."""
        self.node(path).holders[tier].add(target)

    def remove(self, target: Target, path: Path, tier: Tier = "device") -> None:
        self.node(path).holders[tier].discard(target)

    def clear(self, target: Target) -> None:
        for _, node in self.nodes():
            for holders in node.holders.values():
                holders.discard(target)

    def holds(self, target: Target, path: Path, tier: Tier | None = None) -> bool:
        return any(target in self.node(path).holders[t] for t in TIERS if tier in (None, t))

    def overlap(self, path: Path, targets: Sequence[Target]) -> dict[Target, HeldBlocks]:
        """Per target: leading blocks on the device, then on the host, then on disk; who has none is absent."""
        found = {}
        for target in targets:
            depth, per_tier = 0, []
            for tier in TIERS:
                start = depth
                while depth < len(path) and target in self.node(path[: depth + 1]).holders[tier]:
                    depth += 1
                per_tier.append(depth - start)
            if depth:
                found[target] = HeldBlocks(*per_tier)
        return found

    def held(self, target: Target) -> set[tuple[Tier, Path]]:
        return {(tier, path) for path, node in self.nodes() for tier in TIERS if target in node.holders[tier]}

    def pairs(self) -> int:
        return sum(len(holders) for _, node in self.nodes() for holders in node.holders.values())

    def node(self, path: Path) -> Node:
        node = self.root
        for content in path:
            node = node.children.setdefault(content, Node())
        return node

    def nodes(self) -> Iterator[tuple[Path, Node]]:
        waiting: list[tuple[Path, Node]] = [((), self.root)]
        while waiting:
            path, node = waiting.pop()
            yield path, node
            waiting.extend(((*path, content), child) for content, child in node.children.items())
