"""However slow and unreliable an API server is, the planner's connector never passes a hard ceiling of GPUs."""

import pytest

from tests.depth import seeds
from tests.stateful.kubernetes_world import KubernetesWorld

SEEDS = 400
"""In depth; PENSTOCK_SEEDS=10000 has been run for docs/guides/planner-operating.md."""
CHUNK = 40


@pytest.mark.parametrize("first", seeds(SEEDS, CHUNK))
def test_no_write_passes_the_ceiling(first: int) -> None:
    grown = late = refused = scaled = 0
    for seed in range(first, first + CHUNK):
        world = KubernetesWorld(seed)
        try:
            world.play()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        grown += world.objects.grown
        late += world.objects.late
        refused += world.objects.refused
        scaled += world.scaled
    # Late writes are rare: of 250 chunks one had none that was carried out. So only the first must have both kinds.
    rare = min(late, refused) if first == 0 else late + refused
    assert min(grown, scaled) > CHUNK and rare, "hardly anything happened: this is not tested then"
