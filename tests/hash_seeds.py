"""What does a module print under several hash seeds? One process for each."""

import os
import subprocess
import sys


def printed_under(module: str, *hash_seeds: str) -> set[str]:
    """Run a module once for each seed; return the different things that it printed."""
    found = set()
    for hash_seed in hash_seeds:
        done = subprocess.run(
            [sys.executable, "-m", module],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout.strip())
    return found
