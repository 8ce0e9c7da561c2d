"""How long does decoding one KV event message take? Budget: 1 ms for 64 events of one 16-token block each.

python bench/kv_wire.py
"""

import statistics
import time

from penstock.adapters.engines.kv_events.kv_event_codec import KvDecoder, encode_batch
from penstock.kernel.values import KvEvent, KvRemoved, KvStored

ROUNDS, REPEATS = 200, 7


def stored(first: int, blocks: int) -> KvStored:
    hashes = [(1 << 63) + first + i for i in range(blocks)]
    return KvStored(hashes=hashes, tokens=list(range(first, first + 16 * blocks)), block_size=16)


CASES: dict[str, list[KvEvent]] = {
    "64 stored events of 1 block": [stored(i, 1) for i in range(64)],
    "1 stored event of 64 blocks": [stored(0, 64)],
    "64 removed events of 1 block": [KvRemoved(hashes=[(1 << 63) + i]) for i in range(64)],
}


def microseconds(payload: bytes) -> float:
    decoder = KvDecoder()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        decoder.decode(payload)
    return (time.perf_counter() - start) / ROUNDS * 1e6


def main() -> None:
    print(f"{'message':32} {'bytes':>8} {'median us':>10} {'best us':>8}")
    for name, events in CASES.items():
        payload = encode_batch(1.0, events)
        taken = [microseconds(payload) for _ in range(REPEATS)]
        print(f"{name:32} {len(payload):8} {statistics.median(taken):10.1f} {min(taken):8.1f}")


if __name__ == "__main__":
    main()
