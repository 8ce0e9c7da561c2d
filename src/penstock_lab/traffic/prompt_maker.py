"""Prompts that are made up: text of pronounceable words from a seed, and `PromptMaker`, which makes tokens of hash ids.

Prompts share exactly the prefixes that their hash ids share: each id names ``block_size`` tokens, made from the id and
a seed alone. A block begins with its id written out in digits of the allowed token range, so blocks of different ids
differ within `PromptMaker.distinct_after` tokens for certain; the rest is a counter run through the splitmix64 mixer
(Steele, Lea, Flood, OOPSLA 2014).
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_lab.traffic.traffic_request import TrafficRequest

_ONSETS = ("b", "br", "d", "dr", "f", "g", "gl", "h", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v")
_CORES = ("a", "e", "i", "o", "u", "ai", "ea", "oa")
_ENDS = ("", "n", "r", "s", "t", "l", "nd", "ck")
LETTERS_PER_TOKEN = 4
"""What common tokenizers make of plain text, roughly; a byte-level one makes four times as many tokens of it."""


@lru_cache(maxsize=1024)  # shared pieces (tool prompts, documents) are needed again and again
def words(tokens: int, seed: int) -> str:
    """Return text of about ``tokens`` tokens, the same for the same arguments."""
    rng = random.Random(seed)
    out: list[str] = []
    left = tokens * LETTERS_PER_TOKEN
    while left > 0:
        word = rng.choice(_ONSETS) + rng.choice(_CORES) + rng.choice(_ENDS)
        if rng.getrandbits(1):
            word += rng.choice(_ONSETS) + rng.choice(_CORES)
        out.append(word)
        left -= len(word) + 1
    return " ".join(out)


TOKENS = (3, 256)
"""Default range of token ids [low, high): bytes or common pieces in every vocabulary that we met, none special."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class PromptMaker:
    """Make the tokens of requests, as lists or as JSON text; both from the same cache of blocks.

    Args:
        seed: another seed gives other tokens with the same sharing.
        tokens: range [low, high) of token ids that the model accepts as plain text.
        blocks_cached: blocks whose tokens are kept; the least used go (a block of 512 is about 6 KB with its JSON).
    Cost: about 20 us per new block of 512 tokens, 2 us per new one of 16, under 1 us per block that is kept.
    """

    def __init__(self, seed: int = 0, *, tokens: tuple[int, int] = TOKENS, blocks_cached: int = 8192) -> None:
        low, high = tokens
        if not 0 <= low < high - 1 or high > 1 << 32:
            raise ValueError(f"token ids need a range [low, high) of at least 2 within 32 bits, not [{low}, {high})")
        self._low = low
        self._span = high - low
        self._seed = _mix_one(seed & _MASK)
        self._most = blocks_cached
        self._cache: OrderedDict[tuple[int, int], tuple[list[int], bytes]] = OrderedDict()
        digits, reach = 1, self._span
        while reach < 1 << 64:
            digits, reach = digits + 1, reach * self._span
        self.distinct_after = digits
        """Two blocks of different ids differ within so many tokens."""

    def tokens(self, request: TrafficRequest) -> list[int]:
        """Return the prompt's token ids, shape (isl,).

        Raises:
            ValueError: the prompt is text, or its hash ids do not cover ``isl``.
        """
        if request.token_ids is not None:
            return list(request.token_ids)
        out: list[int] = []
        for block, _ in self._blocks(_whole_block_ids(request), request.block_size):
            out += block
        del out[request.isl :]
        return out

    def json(self, request: TrafficRequest) -> bytes:
        """Return the prompt's token ids as a JSON array, joined from the text of its blocks."""
        if request.token_ids is not None:
            return msgspec.json.encode(request.token_ids)
        blocks = self._blocks(_whole_block_ids(request), request.block_size)
        parts = [text for _, text in blocks]
        rest = request.isl % request.block_size
        if rest:
            parts[-1] = msgspec.json.encode(blocks[-1][0][:rest])[1:-1]
        return b"[" + b",".join(parts) + b"]"

    def _blocks(self, ids: Sequence[int], size: int) -> list[tuple[list[int], bytes]]:
        """Return (tokens, JSON text without brackets) of each block; those that are not kept are made in one go."""
        cache = self._cache
        missing = [number for number in dict.fromkeys(ids) if (number, size) not in cache]
        made = dict(zip(missing, self._make(missing, size), strict=True)) if missing else {}
        out: list[tuple[list[int], bytes]] = []
        for number in ids:
            key = (number, size)
            block = cache.get(key)
            if block is None:
                # A block just made may have been dropped again while this very prompt went on.
                block = made.get(number) or self._make([number], size)[0]
                cache[key] = block
                if len(cache) > self._most:
                    cache.popitem(last=False)
            else:
                cache.move_to_end(key)
            out.append(block)
        return out

    def _make(self, ids: Sequence[int], size: int) -> list[tuple[list[int], bytes]]:
        names = np.array(ids, dtype=np.uint64)
        with np.errstate(over="ignore"):
            starts = _mix_array((_mix_array(names + np.uint64(_GOLDEN)) ^ np.uint64(self._seed)) + np.uint64(_GOLDEN))
            steps = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
            mixed = _mix_array(starts[:, None] + steps[None, :])
        # The upper 32 bits times the span, shifted back, spread evenly over the range without a division.
        tokens = ((mixed >> np.uint64(32)) * np.uint64(self._span)) >> np.uint64(32)
        rest = names
        for place in range(min(self.distinct_after, size)):
            tokens[:, place] = rest % np.uint64(self._span)
            rest = rest // np.uint64(self._span)
        rows: list[list[int]] = (tokens + np.uint64(self._low)).tolist()
        return [(row, msgspec.json.encode(row)[1:-1]) for row in rows]


def _whole_block_ids(request: TrafficRequest) -> Sequence[int]:
    if request.messages is not None and not request.hash_ids:
        raise ValueError("the prompt is text: only a tokenizer knows its tokens")
    wanted = -(-request.isl // request.block_size)
    if len(request.hash_ids) < wanted:
        given = f"{len(request.hash_ids)} hash ids of {request.block_size} tokens"
        raise ValueError(f"{given} do not cover {request.isl}: `numbered` names the blocks that a trace does not")
    return request.hash_ids[:wanted]


def _mix_one(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_array(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
