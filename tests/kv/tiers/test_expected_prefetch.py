"""A tier process brings blocks up at the time at which a request for them was said to be likely."""

import time

from penstock_kv.inside.tier_protocol import PrefetchBlocks
from tests.kv.tiers.conftest import Start
from tests.kv.tiers.plain_engine import PlainEngine, block_hashes

AFTER = 1.0


def store_to_disk(engine: PlainEngine, prompt: str) -> set[bytes]:
    """Store a prompt's blocks, and return them when all are on disk, too: others may take their host memory then."""
    blocks = block_hashes(4, prompt)
    assert all(engine.store(blocks))
    engine.until(lambda: set(blocks) <= engine.stored.get("disk", set()))
    return set(blocks)


def test_blocks_come_up_from_disk_when_their_request_is_expected(start: Start) -> None:
    tiers = start(host=8, disk=64)
    with PlainEngine(tiers.socket) as engine:
        first = store_to_disk(engine, "first")
        for prompt in ("second", "third", "fourth", "fifth"):
            store_to_disk(engine, prompt)
        engine.until(lambda: not first & engine.stored["host"])
        said = time.monotonic()
        engine.send(PrefetchBlocks(hashes=block_hashes(4, "first"), after=AFTER))
        engine.until(lambda: bool(first & engine.stored["host"]))
        assert time.monotonic() - said >= AFTER
        assert all(engine.load(block_hashes(4, "first")))
