"""The blocks of one tier: their life cycle as a table, their columns, and handles that hold some of them."""

from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple, Protocol

import msgspec

from penstock.kernel.machine import Nanos
from penstock_kv.blocks.block_key import BlockKey


class BlockState(IntEnum):
    """What a block contains."""

    RESET = 0
    """Nothing."""
    PARTIAL = 1
    """Some tokens; one holder writes."""
    COMPLETE = 2
    """A block's tokens; nobody else can match it."""
    REGISTERED = 3
    """A block's tokens, under a key that others match."""
    INVALID = 4
    """Wrong bytes: the block lost its key, and waits for its last holder."""


RESET, PARTIAL, COMPLETE, REGISTERED, INVALID = BlockState


class Transition(NamedTuple):
    """One row of the table.

    Args:
        check: what else must be so.
    """

    before: BlockState
    trigger: str
    after: BlockState
    check: str


TRANSITIONS = (
    Transition(RESET, "add", PARTIAL, "one holder; no more tokens than a block has"),
    Transition(PARTIAL, "add", PARTIAL, "one holder; no more tokens than a block has"),
    Transition(PARTIAL, "pop", PARTIAL, "one holder; no more tokens than the block contains"),
    Transition(PARTIAL, "commit", COMPLETE, "one holder; the block is full"),
    Transition(RESET, "apply", COMPLETE, "one holder; all of the block's tokens at once"),
    Transition(COMPLETE, "register", REGISTERED, "no block has the key; else the holder gets that block"),
    Transition(REGISTERED, "invalidate", INVALID, "its bytes are wrong: nobody can match or register them again"),
    Transition(RESET, "free", RESET, "last holder released it"),
    Transition(PARTIAL, "free", RESET, "last holder released it"),
    Transition(COMPLETE, "free", RESET, "last holder released it"),
    Transition(INVALID, "free", RESET, "last holder released it"),
    Transition(REGISTERED, "evict", RESET, "no holder"),
)

FORBIDDEN = 255


def _steps_of_transitions() -> dict[str, bytes]:
    steps: dict[str, list[int]] = {}
    for before, trigger, after, _ in TRANSITIONS:
        steps.setdefault(trigger, [FORBIDDEN] * len(BlockState))[before] = after
    return {trigger: bytes(row) for trigger, row in steps.items()}


STEPS = _steps_of_transitions()
"""Trigger -> state after, by state before, or `FORBIDDEN`: the table in the form that the manager reads."""


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


class HandleOwner(Protocol):
    """What a handle needs of its manager."""

    def release(self, handle: "BlockHandle") -> None: ...
    def dropped(self, id: int, slots: list[int]) -> None: ...


class BlockHandle:
    """Holds blocks for one holder, in order, until `release`, the end of a ``with``, or its last reference goes.

    The last is a leak: the manager counts it, and takes the blocks back with its next call.

    Args:
        slots: the blocks. `BlockManager.register` replaces those that exist already; nobody else writes.
        evicted: slot and key of what gave way for them: to be announced, and its bytes stay until the slot is written.
    """

    __slots__ = ("_manager", "evicted", "id", "released", "slots")

    def __init__(self, manager: HandleOwner, id: int, slots: list[int], evicted: list[tuple[int, BlockKey]]) -> None:
        self._manager = manager
        self.id = id
        self.slots = slots
        self.evicted = evicted
        self.released = False

    def __len__(self) -> int:
        return len(self.slots)

    def __enter__(self) -> "BlockHandle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.released:
            self.release()

    def __del__(self) -> None:
        if not self.released:
            self._manager.dropped(self.id, self.slots)

    def release(self) -> None:
        """Give the blocks back; registered ones stay matchable until they are evicted.

        Raises:
            InvariantError: it was released already.
        """
        self._manager.release(self)


class WeakHandle(msgspec.Struct, frozen=True):
    """Remembers a registered block without holding it: `BlockManager.upgrade` gives a handle as long as it is there."""

    slot: int
    generation: int
    key: BlockKey


class OpenHandle(msgspec.Struct, frozen=True):
    """The manager's record of a handle that is not released.

    Args:
        since: when the blocks were taken, in kernel time.
    """

    id: int
    owner: str
    slots: list[int]
    since: int
