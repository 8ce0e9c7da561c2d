"""The life cycle of a block: its states, and the transitions between them as a table."""

from enum import IntEnum
from typing import NamedTuple


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


def _steps() -> dict[str, bytes]:
    steps: dict[str, list[int]] = {}
    for before, trigger, after, _ in TRANSITIONS:
        steps.setdefault(trigger, [FORBIDDEN] * len(BlockState))[before] = after
    return {trigger: bytes(row) for trigger, row in steps.items()}


STEPS = _steps()
"""Trigger -> state after, by state before, or `FORBIDDEN`: the table in the form that the manager reads."""
