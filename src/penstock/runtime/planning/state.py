"""What does a planner leave behind for the next one? Its memory, and up to where it counted: one file, all or none."""

import logging
from pathlib import Path

import msgspec

log = logging.getLogger("penstock.planner")


class PlannerState(msgspec.Struct, frozen=True, kw_only=True):
    """``restarts``: how often one took over; ``machine``: the planner's snapshot; ``observing``: of what looks."""

    version: int = 1
    restarts: int
    machine: msgspec.Raw
    observing: bytes


def write_state(path: Path, state: PlannerState) -> None:
    """Write it in the place of the one before. Blocks; a disk that is full costs only how much a successor knows."""
    spare = path.with_suffix(".new")
    try:
        spare.write_bytes(msgspec.msgpack.encode(state))
        spare.replace(path)
    except OSError as error:
        log.warning("what a planner that takes over would need can't be written: %s", error)


def read_state(path: Path) -> PlannerState | None:
    """Read it; None where there is none that can be read. Blocks."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=PlannerState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("what the planner before left can't be read: %s", error)
        return None
