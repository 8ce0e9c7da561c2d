"""Which KV blocks does a trace's prompt consist of? Names for an engine's blocks, equal as far as prompts are equal.

A live router hashes tokens. A trace has none: it says which prompts share how much, by ids of blocks of its own size.
So the blocks are numbered in the order in which they first come up; each name stands for a whole prefix, as a chained
hash does.
"""

from penstock.kernel.hashing import block_hashes
from penstock.traffic.request import TrafficRequest


class PrefixNames:
    """Name the full blocks of prompts.

    Args:
        block_size: tokens per block of the engines, whatever the trace's own is.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"a block has at least 1 token, not {block_size}")
        self.block_size = block_size
        self._next = 1
        self._first: dict[tuple[object, ...], int] = {}
        """(name before it, what it is made of) -> the first name that was given to it"""

    def blocks(self, request: TrafficRequest) -> list[int]:
        """Return the names of a prompt's full blocks, as far as it is known what they share.

        Raises:
            ValueError: the prompt is text, whose tokens only a tokenizer knows.
        Cost: a look-up per id of the trace, or per block where those are larger.
        """
        if request.token_ids is not None:
            return list(block_hashes(request.token_ids, self.block_size))
        if not request.hash_ids:
            if request.messages is not None:
                raise ValueError("the prompt is text: only a tokenizer knows its tokens")
            return self._alone(request.isl // self.block_size)
        if request.block_size % self.block_size == 0:
            return self._within(request)
        return self._across(request)

    def _alone(self, count: int) -> list[int]:
        """Name blocks that nothing else has."""
        first = self._next
        self._next += count
        return list(range(first, first + count))

    def _within(self, request: TrafficRequest) -> list[int]:
        """Every id of the trace stands for some whole blocks."""
        per = request.block_size // self.block_size
        known = self._first
        out: list[int] = []
        before = -request.block_size  # traces of different block sizes share nothing
        for number in request.hash_ids:
            key = (before, number)
            first = known.get(key)
            if first is None:
                first = known[key] = self._next
                self._next += per
            out += range(first, first + per)
            before = first
        del out[request.isl // self.block_size :]
        return out

    def _across(self, request: TrafficRequest) -> list[int]:
        """A block is made of several ids, or of parts of them."""
        size, unit, ids = self.block_size, request.block_size, request.hash_ids
        known = self._first
        out: list[int] = []
        before = -unit
        known_to = min(request.isl, len(ids) * unit)  # a record has no id for the last, partial block of its prompt
        for start in range(0, known_to - size + 1, size):
            made_of = tuple(ids[start // unit : (start + size - 1) // unit + 1])
            key = (before, start % unit, made_of)
            name = known.get(key)
            if name is None:
                name = known[key] = self._next
                self._next += 1
            out.append(name)
            before = name
        return out
