"""Process memory: host memory of an engine's processes, what its machine has left, and when a process began."""

import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
LEFT_LEAST = 0.1
"""Part of a machine's memory that stays free: what sleeps must not make a machine swap."""


def session_memory(pid: int) -> int | None:
    """Return the resident bytes of all processes of the session that a process leads; None where it is gone.

    Pages that several of them share are counted for each.
    """
    total, seen = 0, False
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == pid:
                total += int((folder / "statm").read_text().split()[1]) * PAGE
                seen = True
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
    return total if seen else None


def memory_left() -> float:
    """Return the part of this machine's memory that is available, 0..1."""
    values = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    return int(values["MemAvailable"].split()[0]) / int(values["MemTotal"].split()[0])


def born_at(pid: int) -> float | None:
    """Return when a process began, in seconds of CLOCK_BOOTTIME, to a hundredth; None where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / TICKS
    except (OSError, ValueError, IndexError):
        return None
