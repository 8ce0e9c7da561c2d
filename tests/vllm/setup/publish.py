"""What does vLLM's own publisher send? One batch of every kind of event, again and again, without an engine behind it.

usage: VENV/bin/python publish.py ENDPOINT...      ends when its standard input does; prints where it publishes
"""

import json
import sys
import threading
import time

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

BLOCK = 4


def batch() -> KVEventBatch:
    """Return stored blocks (plain, then of an adapter with a salt), removals and a clear, as the engine writes them."""
    plain = BlockStored(
        block_hashes=[2**64 - 1, b"\x01" * 32],
        parent_block_hash=None,
        token_ids=list(range(2 * BLOCK)),
        block_size=BLOCK,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None, None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    special = BlockStored(
        block_hashes=[7],
        parent_block_hash=None,
        token_ids=list(range(BLOCK)),
        block_size=BLOCK,
        lora_id=1,
        medium="GPU",
        lora_name="poet",
        extra_keys=[("poet", "salt")],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    removed = BlockRemoved(block_hashes=[7], medium="GPU", group_idx=0)
    return KVEventBatch(ts=time.time(), events=[plain, special, removed, AllBlocksCleared()])


def main() -> None:
    publishers = [ZmqEventPublisher(0, endpoint, "tcp://*:0", topic="kv@test") for endpoint in sys.argv[1:]]
    configs = [publisher.get_publisher_config() for publisher in publishers]
    print(json.dumps([[config.endpoint, config.replay_endpoint] for config in configs]), flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(0.05):
        for publisher in publishers:
            publisher.publish(batch())
    for publisher in publishers:
        publisher.shutdown()


if __name__ == "__main__":
    main()
