"""Which sequences do both indexes get? The same for ours and the peer, made anew from the seed wherever needed.

A sequence is 256 blocks of 16 tokens: the first 64 are one of 8 shared system prompts, the rest is its own. It is
stored on a random worker. Loaded by two interpreters, so it needs only the standard library and xxhash.
"""

import random
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path

import xxhash

SEED = 1337
BLOCK = 16
BLOCKS, SHARED, PROMPTS = 256, 64, 8
DEPTHS = (8, 64, 256, 2000)
QUERIES = 1000
REMOVALS = 1000
SINGLES = 3000
DEEP = 2000
"""Blocks of one long sequence; four workers hold 2000, 1600, 1200 and 800 of it."""

U64 = (1 << 64) - 1


@dataclass
class Sequence:
    """``local``, ``own`` and ``engine``: per block, its local hash, our chained hash and the engine's opaque one."""

    worker: int
    tokens: list[int]
    local: list[int]
    own: list[int]
    engine: list[int]


class Workload:
    """Sequences by number.

    Args:
        tokens: also make the tokens, whose hashes the blocks then have; else the local hashes are random numbers.
    """

    def __init__(self, workers: int, pairs: int, tokens: bool) -> None:
        self.workers = workers
        self.count = pairs // BLOCKS
        self.tokens = tokens
        self._prompts = [self._blocks(random.Random(f"prompt {i}"), SHARED) for i in range(PROMPTS)]
        self._chained = [_chain(local, None) for _, local in self._prompts]

    def sequence(self, number: int) -> Sequence:
        rng = random.Random(number)
        worker, prompt = rng.randrange(self.workers), rng.randrange(PROMPTS)
        tokens, local = self._blocks(rng, BLOCKS - SHARED)
        head_tokens, head = self._prompts[prompt]
        own = self._chained[prompt] + _chain(local, self._chained[prompt][-1])
        return Sequence(worker, head_tokens + tokens, head + local, own, _engine(own))

    def deep(self) -> Sequence:
        tokens, local = self._blocks(random.Random("deep"), DEEP)
        own = _chain(local, None)
        return Sequence(0, tokens, local, own, _engine(own))

    def singles(self) -> Sequence:
        tokens, local = self._blocks(random.Random("singles"), SINGLES)
        own = _chain(local, None)
        return Sequence(0, tokens, local, own, _engine(own))

    def sampled(self, count: int) -> list[int]:
        """Numbers of sequences to ask for or to remove."""
        return random.Random("sample").sample(range(self.count), min(count, self.count))

    def misses(self, depth: int) -> list[int]:
        return numbers(random.Random(f"miss {depth}"), depth)

    def _blocks(self, rng: random.Random, count: int) -> tuple[list[int], list[int]]:
        if not self.tokens:
            return [], numbers(rng, count)
        raw = array("I")
        raw.frombytes(rng.randbytes(4 * BLOCK * count))
        tokens = [word & 0x1FFFF for word in raw]  # a vocabulary of 131,072
        data = array("I", tokens).tobytes()
        size = 4 * BLOCK
        return tokens, [xxhash.xxh3_64_intdigest(data[i : i + size], SEED) for i in range(0, len(data), size)]


def numbers(rng: random.Random, count: int) -> list[int]:
    """Return random unsigned 64-bit numbers, each an object of its own as a decoder makes them."""
    out = array("Q")
    out.frombytes(rng.randbytes(8 * count))
    return out.tolist()


def _chain(local: list[int], parent: int | None) -> list[int]:
    out = []
    for value in local:
        parent = value if parent is None else xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent, value), SEED)
        out.append(parent)
    return out


def _engine(own: list[int]) -> list[int]:
    return [(value * 0x9E3779B97F4A7C15 + 11) & U64 for value in own]


def resident_bytes() -> int:
    """Return this process's resident memory."""
    with Path("/proc/self/status").open() as status:
        for line in status:
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def middle(values: list[float]) -> float:
    """Return the median."""
    return sorted(values)[len(values) // 2]
