"""Known hashes: the block hashes of prompts, looked up as far as a prompt begins as an earlier one did.

A prompt is looked up in chunks. What a chunk's hashes follow from is kept with them and compared: its tokens, the hash
before it, and what else decides its blocks. So what is found is what would be computed, whatever collides.
"""

import threading
from array import array
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from penstock.kernel.bounded_table import BoundedTable
from penstock.kernel.hashing import block_extras, chain, local_hashes, token_bytes
from penstock.kernel.values import BlockHash

CHUNK_BLOCKS = 64
"""Blocks of one chunk: its look-up takes 1 us, its hashes 13, and on the average half of one is hashed again."""
BYTES_MAX = 64 << 20
"""Most memory for known chunks: nine million tokens in blocks of 16, as many as the text and tokens of 100 MB."""
_HASH_BYTES = 40
"""An int and the place that refers to it."""
_CHUNK_OVERHEAD = 400
"""Bytes of bookkeeping per chunk, beside its tokens and hashes."""


class _Origin(NamedTuple):
    """What the hashes of a chunk follow from; ``salt`` counts in a prompt's first block alone."""

    tokens: bytes
    parent: BlockHash | None
    block_size: int
    lora: str | None
    salt: str | None


class KnownHashes:
    """Hash prompts; may be called from several threads.

    Args:
        bytes_max: memory for known chunks; the longest unused go.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._lock = threading.Lock()
        self._chunks: BoundedTable[int, tuple[_Origin, list[BlockHash]]] = BoundedTable(
            bytes_max=bytes_max, bytes_of=_bytes_of
        )
        """By a digest of tokens and parent."""

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def bytes(self) -> int:
        return self._chunks.bytes

    def block_hashes(
        self, tokens: "array[int]", block_size: int, *, lora: str | None = None, salt: str | None = None
    ) -> list[BlockHash]:
        """Return the chained hash of every full block of a prompt, as `penstock.kernel.hashing.block_hashes` does.

        Cost: 1 us for each chunk that is known, 0.2 us for each further block.
        """
        end, stride = len(tokens) // block_size, CHUNK_BLOCKS * block_size * 4
        raw = token_bytes(tokens) if end >= CHUNK_BLOCKS else b""
        found: list[BlockHash] = []

        def origin(block: int) -> _Origin:
            at = block * block_size * 4
            parent = found[block - 1] if block else None
            return _Origin(raw[at : at + stride], parent, block_size, lora, None if block else salt)

        chunks = range(0, end - CHUNK_BLOCKS + 1, CHUNK_BLOCKS)
        with self._lock:
            for block in chunks:
                known = self._find(origin(block))
                if known is None:
                    break
                found += known
        known_blocks = len(found)
        extras = block_extras(known_blocks, end, block_size, lora, salt)
        parent = found[-1] if found else None
        found += chain(local_hashes(tokens[known_blocks * block_size :], block_size, extras), parent)
        with self._lock:
            for block in chunks[known_blocks // CHUNK_BLOCKS :]:
                self._keep(origin(block), found[block : block + CHUNK_BLOCKS])
        return found

    def _find(self, origin: _Origin) -> list[BlockHash] | None:
        """Return the hashes of a chunk that is known; the lock is held."""
        digest = _origin_digest(origin)
        known = self._chunks.get(digest)
        if known is None or known[0] != origin:
            return None
        self._chunks.use(digest)
        return known[1]

    def _keep(self, origin: _Origin, hashes: list[BlockHash]) -> None:
        """Add a chunk and drop the oldest; the lock is held."""
        self._chunks.put(_origin_digest(origin), (origin, hashes))


def _origin_digest(origin: _Origin) -> int:
    return xxh3_64_intdigest(origin.tokens, origin.parent or 0)


def _bytes_of(digest: int, chunk: tuple[_Origin, list[BlockHash]]) -> int:
    return len(chunk[0].tokens) + CHUNK_BLOCKS * _HASH_BYTES + _CHUNK_OVERHEAD
