"""Checksum of a KV block's bytes: xxh3 where xxhash can be imported, else CRC-32.

Engines' environments seldom have xxhash, so it is never required. A stored sum names its algorithm, and a sum of
another algorithm than this process's is no proof: its block is a miss.
"""

import zlib

try:
    import xxhash
except ImportError:
    xxhash = None  # type: ignore[assignment, unused-ignore]

CRC32, XXH3 = 1, 2
ALGORITHM = CRC32 if xxhash is None else XXH3
"""Of the sums that `checksum` returns."""
ALGORITHM_NAMES = {CRC32: "crc32", XXH3: "xxh3_64"}


def checksum(data: memoryview) -> int:
    """Return the sum of contiguous bytes; it releases the interpreter lock meanwhile.

    Cost: CRC-32 takes about 1 ms per MiB, xxh3 a tenth of that. CRC-32 finds every flip of up to 32 bits in a row; of
    other damage it misses 1 in 2**32.
    """
    if xxhash is None:
        return zlib.crc32(data)
    return xxhash.xxh3_64_intdigest(data)
