"""Equal bytes under any hash seed: nothing in a simulated run may depend on the order of a set."""

import hashlib

from penstock.kernel.values import WorkerId
from penstock_lab.simulate.simulation_plan import Fault, StartUp
from tests.hash_seeds import printed_under
from tests.lab.simulate.test_simulated_cluster import Run, chat, plan


def digest() -> str:
    faults = [
        Fault(at=5.0, kind="fail", worker=WorkerId("main-0")),
        Fault(at=9.0, kind="drain", worker=WorkerId("main-2")),
    ]
    run = Run(plan(faults=faults, start_up=StartUp(median=2.0, sigma=0.5)), chat(20))
    return hashlib.sha256(run.bytes() + repr(run.cluster.gaps()).encode()).hexdigest()


def test_the_hash_seed_of_the_process_changes_nothing() -> None:
    assert printed_under("tests.lab.simulate.test_hash_seed", "1", "4711") == {digest()}


if __name__ == "__main__":
    print(digest())
