"""Does a tier process that was stopped in the middle of a load cost an engine no more than the load's deadline?"""

import os
import signal
import time
from pathlib import Path

import pytest

from penstock_kv.inside.tier_client import TierClient, TiersLost
from penstock_kv.inside.tier_protocol import FromTiers, JobDone, RequestHints, TierHello
from tests.kv.tiers.conftest import Start
from tests.kv.tiers.plain_engine import ROW_BYTES, block_hashes

pytestmark = pytest.mark.live
ROWS = 16


def until(client: TierClient, kind: type, limit: float = 20.0) -> list[FromTiers | TiersLost]:
    """Poll until a message of a kind is there; return all."""
    got: list[FromTiers | TiersLost] = []
    end = time.monotonic() + limit
    while not any(isinstance(message, kind) for message in got):
        assert time.monotonic() < end, got
        time.sleep(0.005)
        got += client.poll()
    return got


def test_a_stopped_tier_process_is_ended_and_its_load_is_a_miss(start: Start, tmp_path: Path) -> None:
    tiers = start(32)
    region = tmp_path / "region"
    region.write_bytes(os.urandom(ROWS * ROW_BYTES))
    hello = TierHello(
        model="m",
        dtype="bf16",
        layout="l",
        block_tokens=16,
        hash_algorithm="sha256_cbor",
        region=str(region),
        rows=ROWS,
        row_bytes=ROW_BYTES,
    )
    client = TierClient(str(tiers.socket), hello)
    end = time.monotonic() + 20.0
    while not client.connected:
        assert time.monotonic() < end
        time.sleep(0.005)
    hashes = block_hashes(4)
    assert client.store(1, hashes, [0, 1, 2, 3])
    assert JobDone(job=1, done=[True] * 4) in until(client, JobDone)
    os.kill(tiers.process.pid, signal.SIGSTOP)
    assert client.load(2, hashes, [4, 5, 6, 7], hints=RequestHints(deadline=0.2))
    assert JobDone(job=2, done=[False] * 4) in until(client, TiersLost)
    assert tiers.process.wait(20) == -signal.SIGKILL, "it can't write into rows that are used for others now"
    client.close()
