"""Does the tier machine give only right blocks, end every job and announce what is gone, whatever fails?"""

import random

import pytest

from penstock.blocks.tiers.tier_settings import TierSettings
from tests.blocks.tier_world import World, random_step
from tests.depth import deep


def settings_of(rng: random.Random) -> TierSettings:
    return TierSettings(
        block_bytes=1 << 20,
        block_tokens=16,
        host_blocks=rng.choice((2, 9, 24)),
        disk_blocks=rng.choice((0, 12, 40)),
        object_blocks=rng.choice((0, 20)),
        order=rng.choice(("lru", "lineage", "segmented", "priority")),
        offload=rng.choice(("all", "all", "presence", "second_hit")),
        min_priority=rng.choice((0, 0, 1)),
        write=rng.choice(("through", "selective", "back")),
        bytes_in_flight=rng.choice((1, 4, 100)) << 20,
    )


@pytest.mark.parametrize("seed", range(deep(60)))
def test_whatever_fails_no_wrong_block_is_given_and_every_job_ends(seed: int) -> None:
    rng = random.Random(seed)
    world = World(settings_of(rng), rng, faults=rng.choice((0.0, 0.3)))
    for _ in range(1_000):
        random_step(world)
        world.check()
    world.end_all()
    world.check()
