"""Equal bytes under any hash seed: no decision may depend on the order of a set."""

import hashlib
import os
import subprocess
import sys

from tests.stateful.test_router_chaos import effects_of

SEEDS = range(30)


def digest() -> str:
    return hashlib.sha256(b"".join(effects_of(seed) for seed in SEEDS)).hexdigest()


def test_the_hash_seed_of_the_process_changes_nothing() -> None:
    found = set()
    for hash_seed in ("1", "2", "4711"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.stateful.test_hash_seed"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout.strip())
    assert found == {digest()}


if __name__ == "__main__":
    print(digest())
