"""The host tier's slab: other processes map it, and memory that is not there is an error at once."""

import asyncio
import subprocess
import sys

import pytest
from xxhash import xxh3_64_intdigest

from penstock.kernel.errors import ConfigError
from penstock_kv.transfer.storage.host_slab import PIECE, HostSlab, memory_limit
from penstock_kv.transfer.storage.record_header import SECTOR
from tests.kv.transfer.block_store_contract import block, empty, payload_of

SIZE = 5000

READER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    slab = mmap.mmap(file.fileno(), 0)
    sys.stdout.buffer.write(slab[int(sys.argv[2]):int(sys.argv[2]) + int(sys.argv[3])])
"""


def test_another_process_maps_the_slab() -> None:
    slab = HostSlab(SIZE, 4)
    payload = payload_of(1, SIZE)
    slab.put(block(2, b"key", 1, payload))
    assert slab.stride == 2 * SECTOR
    arguments = [sys.executable, "-c", READER, slab.shared().path, str(2 * slab.stride), str(SIZE)]
    assert subprocess.run(arguments, capture_output=True, check=True).stdout == payload
    asyncio.run(slab.close())


async def test_bytes_that_came_from_elsewhere_are_adopted_with_their_checksum() -> None:
    slab = HostSlab(SIZE, 4)
    one = block(0, b"key", 3, payload_of(1, SIZE))
    result = slab.put(one)
    assert slab.checksum(0) == result.checksum
    assert slab.checksum(1) is None
    slab.view(1)[:] = one.buffer
    assert slab.adopt(one._replace(slot=1, checksum=result.checksum)) == result
    assert slab.get(empty(one)._replace(slot=1)).outcome == "ok"
    slab.view(1)[7] ^= 1
    assert slab.get(empty(one)._replace(slot=1)).outcome == "corrupt"
    slab.forget([0])
    assert slab.get(empty(one)).outcome == "absent"
    await slab.close()


@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17])
def test_a_copy_in_pieces_has_the_checksum_of_the_whole(size: int) -> None:
    slab = HostSlab(size, 2)
    one = block(1, b"key", 1, payload_of(size, size))
    read = empty(one)
    assert slab.put(one).checksum == xxh3_64_intdigest(one.buffer) == slab.get(read).checksum
    assert bytes(read.buffer) == bytes(one.buffer)
    slab.view(1)[size - 1] ^= 1
    assert slab.get(empty(one)).outcome == "corrupt"
    asyncio.run(slab.close())


async def test_forget_fails_writes_that_wait_and_no_later_ones() -> None:
    slab = HostSlab(SIZE, 4)
    one, two = block(1, b"one", 1, payload_of(1, SIZE)), block(1, b"two", 2, payload_of(2, SIZE))
    for _ in range(50):
        writing = asyncio.ensure_future(slab.write([one], 30))
        await asyncio.sleep(0)
        slab.forget([1])
        (result,) = await writing
        assert slab.get(empty(one)).outcome == "absent"
        assert result.outcome in ("ok", "failed"), "it was written before, or not at all"
        slab.forget([1])
        assert slab.put(two).outcome == "ok"
        assert (await slab.read([empty(two)], 30))[0].outcome == "ok"
    await slab.close()


def test_memory_that_is_not_there_is_refused_before_it_is_touched() -> None:
    assert memory_limit() > 0
    with pytest.raises(ConfigError, match=r"more than the .* bytes of memory that are available"):
        HostSlab(1 << 20, memory_limit() // (1 << 20) + 1000)
