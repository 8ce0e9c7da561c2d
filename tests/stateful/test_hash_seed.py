"""Equal bytes under any hash seed: no decision may depend on the order of a set."""

import hashlib

from tests.hash_seeds import printed_under
from tests.stateful.test_router_chaos import effects_of

SEEDS = range(30)


def digest() -> str:
    return hashlib.sha256(b"".join(effects_of(seed) for seed in SEEDS)).hexdigest()


def test_the_hash_seed_of_the_process_changes_nothing() -> None:
    assert printed_under("tests.stateful.test_hash_seed", "1", "2", "4711") == {digest()}


if __name__ == "__main__":
    print(digest())
