"""How much CPU does the tier machine take per block?

``python bench/tier_machine.py``: microseconds of CPU per block for jobs of 2,000 blocks, with a host tier of 20,000 and
a disk of 100,000 blocks, by write policy and eviction order. Goal: about 5 us for a store or a load in all.
"""

import time
from collections import deque
from typing import get_args

from penstock.kernel.machine import Event
from penstock_kv.blocks.block_key import BlockKey
from penstock_kv.blocks.tiers import tier_events as events
from penstock_kv.blocks.tiers.tier_machine import TierMachine
from penstock_kv.blocks.tiers.tier_settings import TierSettings, WritePolicy

BLOCKS, JOBS = 2_000, 150
ORDERS = ("lru", "priority")


class Timed:
    """A machine whose moves all end well and at once, and the CPU that it takes."""

    def __init__(self, settings: TierSettings) -> None:
        self.machine = TierMachine(settings)
        self.seconds = 0.0

    def post(self, event: Event) -> None:
        pending: deque[Event] = deque([event])
        while pending:
            began = time.thread_time()
            effects = self.machine.handle(0, pending.popleft())
            self.seconds += time.thread_time() - began
            pending += [
                events.MoveEnded(id=effect.id, done=[True] * len(effect.keys), seconds=0.001)
                for effect in effects
                if isinstance(effect, events.Move)
            ]

    def per_block(self, some: list[Event]) -> float:
        """Return microseconds per block of jobs of `BLOCKS` blocks."""
        self.seconds = 0.0
        for event in some:
            self.post(event)
        return self.seconds / len(some) / BLOCKS * 1e6


def keys_of(job: int) -> list[BlockKey]:
    return [BlockKey(b"\1\1\0\0" + (job * 1_000_003 + number).to_bytes(16, "little")) for number in range(BLOCKS)]


def main() -> None:
    rows = range(BLOCKS)
    print("| write | order | store | load from host | answer | load from disk |\n|---|---|---:|---:|---:|---:|")
    for write in get_args(WritePolicy):
        for order in ORDERS:
            settings = TierSettings(
                block_bytes=1 << 16,
                block_tokens=16,
                host_blocks=20_000,
                disk_blocks=100_000,
                order=order,
                write=write,
            )
            timed = Timed(settings)
            old, new = range(JOBS - 40, JOBS - 20), range(JOBS - 5, JOBS)
            phases: list[list[Event]] = [
                [events.BlocksOffered(job=job, keys=keys_of(job), rows=rows) for job in range(JOBS)],
                [events.BlocksWanted(job=1_000 + job, keys=keys_of(job), rows=rows) for job in new],
                [events.BlocksAsked(query=job, keys=keys_of(job)) for job in old],
                [events.BlocksWanted(job=2_000 + job, keys=keys_of(job), rows=rows) for job in old],
            ]
            print(f"| {write} | {order} | " + " | ".join(f"{timed.per_block(phase):.2f}" for phase in phases) + " |")


if __name__ == "__main__":
    main()
