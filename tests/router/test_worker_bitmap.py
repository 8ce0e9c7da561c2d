"""Do many targets read the same of masks at once as each by its name, while targets come, go and come back?"""

import random

import pytest

from penstock.kernel.values import Target, WorkerId
from penstock.router.kv_index.worker_bitmap import BitLedger, WorkerBits


@pytest.mark.parametrize("count", [3, 23, 40, 700])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_column_says_what_the_masks_say(count: int, seed: int) -> None:
    rng, ledger = random.Random(seed), BitLedger()
    slots = WorkerBits(ledger)
    everyone = [Target(WorkerId(f"w-{number}")) for number in range(count)]
    place = {target: at for at, target in enumerate(rng.sample(everyone, count))}
    for _ in range(40):
        for target in rng.sample(everyone, count // 3):
            if target in slots:
                ledger.add(slots.bit(target).bit_length() - 1, rng.randrange(2))
                slots.leave(target)
            else:
                slots.join(target)
        if slots.sweep_due:
            slots.sweep_done()
        held = {target: rng.choice([0, 1, 2, 2, 2, 9]) for target in slots}
        masks = {depth: sum(slots.bit(target) for target, at in held.items() if at == depth) for depth in (1, 2, 9)}
        column = slots.column([(depth, mask) for depth, mask in masks.items() if mask], place)
        assert column.tolist() == [held.get(target, 0) for target in place]
