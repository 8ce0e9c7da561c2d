"""Life of a process as its parent follows it: a line of JSON once it is ready, and the signals by which it ends."""

import asyncio
import json
import resource
import signal
import sys

SIBLING_ENV = "PENSTOCK_SIM_SIBLING"
"""Set for a simulated engine that starts beside another one of its pool, in a pool that shares its weights. Not an
argument: by its arguments a supervisor knows an engine again."""
FILES_MAX = 65_536
"""Files that a frontend may have open: four for each engine whose KV events it hears, two for each stream."""


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set from now on."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


def allow_files() -> None:
    """Raise this process's limit of open files as far as it may: a shell's is 1,024, which 250 engines use up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(FILES_MAX, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def report_ready(**fields: object) -> None:
    """Write the first line of standard output, from which the parent reads that this process serves, and where."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
