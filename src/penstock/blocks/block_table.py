"""The blocks of one tier as columns: one row per slot, and the index of registered keys."""

from dataclasses import dataclass, field

from penstock.blocks.block_key import BlockKey
from penstock.kernel.machine import Nanos


@dataclass(slots=True)
class BlockTable:
    """Columns of shape (slots,). Only the `BlockManager` writes; priority and pin are also the eviction order's.

    Args:
        slots: how many blocks there are.
        block_size: tokens.
    """

    slots: int
    block_size: int
    state: bytearray = field(init=False)
    """`BlockState` of each."""
    holders: list[int] = field(init=False)
    tokens: list[int] = field(init=False)
    """Tokens that each contains."""
    generation: list[int] = field(init=False)
    """How often each became empty: what was read under another generation is of another block."""
    key: list[BlockKey | None] = field(init=False)
    parent: list[BlockKey | None] = field(init=False)
    """Key of the block before it, while registered."""
    priority: list[int] = field(init=False)
    pinned_until: list[Nanos] = field(init=False)
    """0 is not pinned."""
    index: dict[BlockKey, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = bytearray(self.slots)
        self.holders = [0] * self.slots
        self.tokens = [0] * self.slots
        self.generation = [0] * self.slots
        self.key = [None] * self.slots
        self.parent = [None] * self.slots
        self.priority = [0] * self.slots
        self.pinned_until = [0] * self.slots
