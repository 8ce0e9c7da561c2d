"""How much CPU does the block manager take per block?

``python bench/blocks.py [BLOCKS]``: nanoseconds of CPU per block, best of 5, for each eviction order, in a tier of
20,000 blocks unless told. Goals: under 1,000 ns per block for match, allocate, register and release, and a prefix of
10,000 blocks matched in under 10 ms.
"""

import sys
import time
from typing import get_args

from penstock_kv.blocks.block_key import BlockKey, KeyIdentity, token_keys
from penstock_kv.blocks.block_manager import BlockManager, OrderName
from penstock_kv.blocks.block_table import BlockHandle

PREFIX, BLOCK_SIZE, ROUNDS, BATCH = 10_000, 16, 5, 64
COLUMNS = ("match", "release", "allocate", "apply", "register", "release new", "evict", "whole prefix, ms")


def measure(order: OrderName, blocks: int, keys: list[BlockKey]) -> list[float]:
    """Return the CPU of one round, in ns per block and, last, ms per prefix of 10,000 blocks."""
    manager = BlockManager(blocks, BLOCK_SIZE, order)
    times = dict.fromkeys(COLUMNS, 0)
    clock = time.process_time_ns

    def write(keys: list[BlockKey], allocation: str) -> None:
        handles: list[BlockHandle] = []
        parent: BlockKey | None = None
        for start in range(0, len(keys), BATCH):
            some = keys[start : start + BATCH]
            began = clock()
            handle = manager.allocate(len(some), "bench", 0)
            assert handle is not None
            allocated = clock()
            manager.apply(handle)
            applied = clock()
            manager.register(handle, some, parent=parent)
            registered = clock()
            times[allocation] += allocated - began
            times["apply"] += applied - allocated
            times["register"] += registered - applied
            parent = some[-1]
            handles.append(handle)
        began = clock()
        for handle in reversed(handles):
            handle.release()
        times["release new"] += clock() - began

    write(keys[:blocks], "allocate")
    for name in ("apply", "register", "release new"):
        times[name] = 0
    write(keys[blocks:], "evict")
    last = keys[blocks : blocks + PREFIX]
    assert manager.lookup(last) == PREFIX
    for start in range(0, PREFIX, BATCH):
        began = clock()
        handle = manager.match(last[start : start + BATCH], "bench", 0)
        matched = clock()
        handle.release()
        times["release"] += clock() - matched
        times["match"] += matched - began
    began = clock()
    whole = manager.match(last, "bench", 0)
    times["whole prefix, ms"] = clock() - began
    assert len(whole) == PREFIX
    whole.release()
    count = {"match": PREFIX, "release": PREFIX, "allocate": blocks, "whole prefix, ms": 1_000_000}
    return [times[name] / count.get(name, len(keys) - blocks) for name in COLUMNS]


def main() -> None:
    blocks = max(PREFIX, int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
    identity = KeyIdentity(model="bench", dtype="bf16", layout="NHD", block_size=BLOCK_SIZE)
    began = time.process_time_ns()
    keys = token_keys(range((blocks + PREFIX) * BLOCK_SIZE), identity)
    print(f"key of a block of {BLOCK_SIZE} tokens: {(time.process_time_ns() - began) / len(keys):,.0f} ns")
    print("| order | " + " | ".join(COLUMNS) + " |\n|---|" + "---:|" * len(COLUMNS))
    for order in get_args(OrderName):
        rounds = [measure(order, blocks, keys) for _ in range(ROUNDS)]
        best = [min(column) for column in zip(*rounds, strict=True)]
        print(f"| {order} | " + " | ".join(f"{each:,.0f}" for each in best[:-1]) + f" | {best[-1]:.1f} |")


if __name__ == "__main__":
    main()
