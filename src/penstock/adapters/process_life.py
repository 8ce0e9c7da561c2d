"""Life of a process as its parent follows it: a line of JSON once it is ready, and the signals by which it ends."""

import asyncio
import json
import signal
import sys


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set from now on."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


def report_ready(**fields: object) -> None:
    """Write the first line of standard output, from which the parent reads that this process serves, and where."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
