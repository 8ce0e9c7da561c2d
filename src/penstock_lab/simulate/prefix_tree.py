"""Prefix tree of a trace's prompts: names their KV blocks as runs, equal as far as the prompts are equal.

A live router hashes tokens. A trace has none: it says which prompts share how much, by ids of blocks of its own size.
So the prompts so far are kept as a tree of runs (`penstock_lab.runs.block_runs`): one that follows a run to its end and
goes on makes it longer, one that leaves it earlier begins a run of its own.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeAlias

from penstock.kernel.hashing import block_hashes
from penstock_lab.runs.block_runs import RUN_MAX, Chain
from penstock_lab.traffic.traffic_request import TrafficRequest

_MASK = (1 << 64) - 1

Units: TypeAlias = "array[int]"
"""What runs are made of, in order: ids of the trace, or hashes of them, as 64-bit numbers."""
_UNSHARED: Units = array("Q")


class PrefixTree:
    """Name the full blocks of prompts.

    Args:
        block_size: tokens per block of the engines, whatever the trace's own is.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"a block has at least 1 token, not {block_size}")
        self.block_size = block_size
        self._units: list[Units] = []
        """What each run is made of; nothing where nothing shares it."""
        self._adapters: dict[str, int] = {}
        self._branches: dict[tuple[int, int, int], int] = {}
        """(run, units of it before the branch, the first unit behind it) -> run that goes on there"""

    def blocks(self, request: TrafficRequest) -> Chain:
        """Return the names of a prompt's full blocks, as far as it is known what they share.

        Raises:
            ValueError: the prompt is text, whose tokens only a tokenizer knows.
        Cost: a few microseconds per run on the way, not per block, unless blocks are larger than the trace's.
        """
        size, unit = self.block_size, request.block_size
        apart = 0  # the blocks of one adapter are no cache for another
        if request.adapter is not None:
            apart = self._adapters.setdefault(request.adapter, len(self._adapters) + 1) << 32
        if request.token_ids is not None:
            return self._follow(_unsigned_numbers(block_hashes(request.token_ids, size)), 1, -1 - apart, RUN_MAX)
        if not request.hash_ids:
            if request.messages is not None:
                raise ValueError("the prompt is text: only a tokenizer knows its tokens")
            return self._alone(request.isl // size)
        root = -1 - unit - apart  # traces of different block sizes share nothing
        if unit % size == 0 and unit // size <= RUN_MAX:
            return self._follow(_unsigned_numbers(request.hash_ids), unit // size, root, request.isl // size)
        ids = request.hash_ids
        known_to = min(request.isl, len(ids) * unit)  # a record has no id for the last, partial block of its prompt
        # 64 bits of each block's ids are compared only with those of the block at the same place of another prompt.
        hashes: Iterable[int]
        if size % unit == 0:
            hashes = map(hash, islice(zip(*[iter(ids)] * (size // unit)), known_to // size))
        else:
            starts = range(0, known_to - size + 1, size)
            hashes = [hash((at % unit, *ids[at // unit : (at + size - 1) // unit + 1])) for at in starts]
        made_of = array("Q", array("q", hashes).tobytes())
        return self._follow(made_of, 1, root, len(made_of))

    def _alone(self, count: int) -> Chain:
        """Name blocks that nothing else has."""
        parts: list[tuple[int, int]] = []
        while count > 0:
            parts.append((len(self._units), min(count, RUN_MAX)))
            self._units.append(_UNSHARED)
            count -= RUN_MAX
        return Chain(parts)

    def _follow(self, units: Units, per: int, root: int, most: int) -> Chain:
        """Find a prompt in the tree, and put what is new of it there.

        Args:
            units: what it consists of.
            per: blocks per unit.
            root: under which it stands, below 0.
            most: blocks of it that are full.
        """
        parts: list[tuple[int, int]] = []
        at, count = 0, len(units)
        run, depth = root, 0
        while at < count and most > 0:
            following = self._branches.get((run, depth, units[at]))
            if following is None:
                following = self._branches[run, depth, units[at]] = len(self._units)
                self._units.append(units[at : at + RUN_MAX // per])
            run = following
            mine = self._units[run]
            depth = _agree(mine, units, at)
            if depth == len(mine) and at + depth < count and (room := RUN_MAX // per - depth) > 0:
                fresh = units[at + depth : at + depth + room]
                mine.extend(fresh)
                depth += len(fresh)
            blocks = depth * per
            parts.append((run, blocks if blocks < most else most))
            at += depth
            most -= blocks
        return Chain(parts)


def _unsigned_numbers(ids: Sequence[int]) -> Units:
    try:
        return array("Q", ids)
    except OverflowError:
        return array("Q", [number & _MASK for number in ids])


def _agree(mine: Units, theirs: Units, start: int) -> int:
    """Count the leading units of ``mine`` that ``theirs`` has from ``start`` on. Cost: O(n) to compare, in C."""
    low, high = 0, min(len(mine), len(theirs) - start)
    if mine[:high] == theirs[start : start + high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if mine[low:middle] == theirs[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
