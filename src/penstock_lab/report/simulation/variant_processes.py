"""Processes of a comparison's variants: each variant in a process of its own, as many at once as there are cores."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from penstock.kernel.errors import PenstockError

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_processes(work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int, *, quiet: bool) -> list[Result]:
    """Return what ``work`` makes of each task, in the order of the tasks.

    Args:
        work: a function of a module; it, the tasks and the results must be picklable.
        jobs: most processes at once.
        quiet: show no progress on a terminal.
    Raises:
        PenstockError: a process ended before it was done.
        Exception: the first task, in their order, that failed: its exception; the other processes are ended.
    """
    before = set(multiprocessing.active_children())
    # A fork would copy locks of threads that the child does not have.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_follow_parent)
    done = False
    try:
        futures = [pool.submit(work, task) for task in tasks]
        hidden, console = quiet or not sys.stderr.isatty(), Console(stderr=True)
        results = [one.result() for one in track(futures, "variants", console=console, transient=True, disable=hidden)]
        done = True
        return results
    except BrokenProcessPool as error:
        raise PenstockError(
            "a process ended before its variant was done: it was killed, or its memory ran out",
            hint="--jobs 1 runs one variant after the other",
        ) from error
    finally:
        if not done:
            for child in set(multiprocessing.active_children()) - before:
                child.kill()
        pool.shutdown(cancel_futures=True)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it has ended, however that was."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
