"""Planner state file: a planner's snapshot and its observer's, in one file, for the next planner."""

import logging
from pathlib import Path

import msgspec

log = logging.getLogger("penstock.planner")


class PlannerState(msgspec.Struct, frozen=True, kw_only=True):
    """``restarts``: how often one took over; ``machine``: the planner's snapshot; ``observing``: the observer's."""

    version: int = 1
    restarts: int
    machine: msgspec.Raw
    observing: bytes


def write_state(path: Path, state: PlannerState) -> None:
    """Write the file, whole or not at all. Blocks; a full disk costs only how much a successor knows."""
    spare = path.with_suffix(".new")
    try:
        spare.write_bytes(msgspec.msgpack.encode(state))
        spare.replace(path)
    except OSError as error:
        log.warning("what a planner that takes over would need can't be written: %s", error)


def read_state(path: Path) -> PlannerState | None:
    """Read the file; None where it is missing or unreadable. Blocks."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=PlannerState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("what the planner before left can't be read: %s", error)
        return None
