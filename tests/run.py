"""Run every suite, say how long each took, and end with one line that counts passes, failures and skips.

usage: python -m tests.run [SUITE ...]      without names: all of `SUITES` but those of `ONLY_BY_NAME`, in order
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from penstock.kernel.numeric_threads import ONE_THREAD

PURE = [
    *("tests/kernel", "tests/router", "tests/planner", "tests/engine", "tests/traffic", "tests/fleet"),
    *("tests/simulate", "tests/blocks"),
]
STATEFUL = ["tests/stateful"]
SHELL = [
    *("tests/config", "tests/cli", "tests/adapters", "tests/contracts", "tests/frontend", "tests/inside"),
    *("tests/kubernetes", "tests/page", "tests/picker", "tests/runtime", "tests/report", "tests/profiler"),
    *("tests/docs", "tests/security", "tests/testing", "tests/transfer"),
]
WITH_PROGRAMS = ("tests/kubernetes", "tests/picker")
"""Folders whose slow tests need the programs around Kubernetes: `make test-kubernetes` fetches those and runs them."""
ONCE_MORE = ["--reruns", "1"]
"""For suites with real processes, sockets and clocks only: a busy machine alone can fail such a test. It runs a second
time, is named and counted."""
SUITES: dict[str, list[str]] = {
    "pure": [*PURE, "-m", "not slow", "-n", "2"],
    "stateful": [*STATEFUL, "-n", "2"],
    "shell": [
        *SHELL,
        *("-m", "not slow"),
        *("-n", "4"),  # a third of their time is waiting
        *ONCE_MORE,
    ],
    "live": ["tests/live", "-m", "not slow", "-n", "2", "--dist", "loadfile", *ONCE_MORE],
    "engines": ["tests/vllm", "tests/llamacpp"],
    "random": [
        "tests",
        *(f"--ignore={folder}" for folder in [*PURE, *STATEFUL]),
        *("-m", "hypothesis and not slow"),
        *("-n", "2"),
    ],
    "slow": [
        "tests/soak",  # minutes, most of them waiting: with the others beside it
        "tests/live",
        *PURE,
        *(folder for folder in SHELL if folder not in WITH_PROGRAMS),
        *("-m", "slow"),
        *("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"),  # a fourth of their time is waiting
        *ONCE_MORE,
    ],
}
"""Suite -> pytest arguments. Live tests start processes of their own: two files at a time keep two cores busy.

The tests of real engines are here to be skipped by name: `make test-vllm` and `make test-llamacpp` make what they need
and run them.
"""
ONLY_BY_NAME = ("random", "slow")
"""The random tests of the other folders: they are in their suites as well, and go alone where they go in depth. The
slow ones have ten minutes and more."""

ON_COMPILED = ("pure", "stateful", "random", "shell", "live")
"""Suites of the run on the compiled build, which is that in depth in `.ci/run`: so its `random` has the random tests of
all folders, and its `shell` no random ones."""
PLAIN = ("tests/docs", "tests/inside", "tests/kubernetes", "tests/page", "tests/picker", "tests/transfer")
"""Folders whose subjects have no compiled module below them but kernel's: the compiled build's `shell` leaves them out.
Of the live tests it has those of `LIVE_COMPILED`, since the others ask what processes do with each other."""
LIVE_COMPILED = ("tests/live/test_up.py", "tests/live/test_handoff.py", "tests/live/test_planner.py")

_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error|rerun)")


def main(names: list[str]) -> int:
    compiled = "compiled" in os.environ.get("PENSTOCK_REQUIRE", "").split(",")
    counts = dict.fromkeys(("passed", "failed", "skipped", "error", "rerun"), 0)
    took: dict[str, float] = {}
    usual = ON_COMPILED if compiled else [name for name in SUITES if name not in ONLY_BY_NAME]
    for name in names or usual:
        started = time.monotonic()
        print(f"== {name}", flush=True)
        arguments = [part for part in SUITES[name] if not part.startswith("tests/") or Path(part).is_dir()]
        if compiled and name == "shell":
            arguments = [part for part in arguments if part not in PLAIN]
            arguments[arguments.index("-m") + 1] += " and not hypothesis"
        if compiled and name == "live":
            arguments = [*LIVE_COMPILED, *arguments[1:]]
        found = subprocess.run(
            [sys.executable, "-m", "pytest", "-rsR", "--durations=8", *arguments],
            capture_output=True,
            text=True,
            env={**ONE_THREAD, **os.environ},
            check=False,
        )
        print(found.stdout, found.stderr, sep="", flush=True)
        took[name] = time.monotonic() - started
        tail = found.stdout.strip().splitlines()[-1:] or [""]
        for number, word in _COUNT.findall(tail[0]):
            counts[word] += int(number)
        if found.returncode not in (0, 1) and not counts["error"]:
            counts["error"] += 1  # pytest itself broke: no count says so
    print("seconds per suite: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in took.items()))
    failed = counts["failed"] + counts["error"]
    again = f", {counts['rerun']} run a second time" if counts["rerun"] else ""
    print(f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped{again}")
    return 1 if failed or not counts["passed"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
