"""Equal bytes of the planner under any hash seed: nothing that it wants or says may depend on the order of a set."""

import hashlib

import msgspec

from tests.hash_seeds import printed_under
from tests.stateful.planner_world import World
from tests.stateful.test_planner import policy, wanderers


def digest() -> str:
    found = hashlib.sha256()
    for seed in range(8):
        world = World(seed, policy("slo") if seed == 0 else wanderers(seed))
        world.run(100)
        for _, _, effects in world.past:
            found.update(msgspec.msgpack.encode(effects))
    return found.hexdigest()


def test_the_hash_seed_of_the_process_changes_nothing() -> None:
    assert printed_under("tests.stateful.test_planner_hash_seed", "1", "4711") == {digest()}


if __name__ == "__main__":
    print(digest())
