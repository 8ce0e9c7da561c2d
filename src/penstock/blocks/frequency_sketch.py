"""The frequency sketch of TinyLFU: about how often each key was used lately, in a fixed number of bytes."""

import struct

from penstock.blocks.block_key import DIGEST, PREFIX, BlockKey

ROWS = 4
HIGHEST = 15
"""Counters are those of 4 bits, as in the TinyLFU paper (arXiv 1512.00727); a byte each, which is quicker here."""
SAMPLE = 10
"""Uses per block of the tier until all counters are halved: the paper's sample size."""

_words = struct.Struct(f"<{ROWS}I").unpack_from
_HALVED = bytes(value >> 1 for value in range(256))
assert DIGEST == 4 * ROWS, "a row for each 32 bits of a digest"


class FrequencySketch:
    """Counts of keys: never too low but for halving, too high where keys collide in all rows.

    A key's digest is random already, so its words are the hashes of the rows.

    Args:
        blocks: of the tier; each row has the next power of two of four times that, at least 64 counters.
    """

    def __init__(self, blocks: int) -> None:
        self._mask = (1 << max(6, (4 * blocks - 1).bit_length())) - 1
        self._limit = SAMPLE * blocks
        self._rows = [bytearray(self._mask + 1) for _ in range(ROWS)]
        self.uses = 0
        """Uses since the counters were halved."""

    def add(self, key: BlockKey) -> None:
        """Count a use."""
        mask = self._mask
        one, two, three, four = self._rows
        a: int
        b: int
        c: int
        d: int
        a, b, c, d = _words(key, PREFIX)
        # Row by row: a loop over them takes twice the time, and this runs for every block that is matched.
        if one[a := a & mask] < HIGHEST:
            one[a] += 1
        if two[b := b & mask] < HIGHEST:
            two[b] += 1
        if three[c := c & mask] < HIGHEST:
            three[c] += 1
        if four[d := d & mask] < HIGHEST:
            four[d] += 1
        self.uses += 1
        if self.uses >= self._limit:
            self._rows = [row.translate(_HALVED) for row in self._rows]
            self.uses = 0

    def count(self, key: BlockKey) -> int:
        """Return about how often a key was used, 0..15."""
        mask = self._mask
        one, two, three, four = self._rows
        a: int
        b: int
        c: int
        d: int
        a, b, c, d = _words(key, PREFIX)
        return min(one[a & mask], two[b & mask], three[c & mask], four[d & mask])

    def dump(self) -> bytes:
        """Return the counters."""
        return b"".join(self._rows)

    def load(self, raw: bytes, uses: int) -> None:
        """Become the sketch of this ``dump``."""
        width = self._mask + 1
        self._rows = [bytearray(raw[row * width : (row + 1) * width]) for row in range(ROWS)]
        self.uses = uses
