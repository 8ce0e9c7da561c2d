"""A tier process brings blocks up at the time at which a request for them was said to be likely."""

import time
from pathlib import Path

from penstock.inside.tier_protocol import PrefetchBlocks, StoredBlocks
from tests.runtime.kv_tiers.conftest import Start
from tests.runtime.kv_tiers.plain_engine import PlainEngine, block_hashes

AFTER = 1.0


def test_blocks_come_up_from_disk_when_their_request_is_expected(start: Start, tmp_path: Path) -> None:
    tiers = start(host=8, disk=64)
    first = block_hashes(4, "first")
    with PlainEngine(tiers.socket) as engine:
        assert all(engine.store(first))
        announced: set[bytes] = set()
        while not set(first) <= announced:  # else they would be taken for those that come up later
            announced |= set(engine.wait(StoredBlocks, tier="host").hashes)
        engine.wait(StoredBlocks, tier="disk")
        for name in ("second", "third", "fourth", "fifth"):  # they take the host memory
            assert any(engine.store(block_hashes(4, name)))
            engine.wait(StoredBlocks, tier="disk")
        said = time.monotonic()
        engine.send(PrefetchBlocks(hashes=first, after=AFTER))
        stored = engine.wait(StoredBlocks, tier="host")
        while not set(stored.hashes) & set(first):
            stored = engine.wait(StoredBlocks, tier="host")
        assert time.monotonic() - said >= AFTER
        assert all(engine.load(first))
