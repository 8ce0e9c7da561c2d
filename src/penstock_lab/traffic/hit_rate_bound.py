"""Upper bound of the prefix cache hit rate: what one infinite cache, shared by all engines, would reach."""

from collections.abc import Iterable

from penstock.kernel.hashing import block_hashes
from penstock_lab.traffic.traffic_request import TrafficRequest


class InfiniteCache:
    """Remember every prompt, forget none: `hit` says how much of the next one was there already.

    As in vLLM only full blocks are shared, and at least one token of a prompt is computed, so a hit
    ends at a block boundary below the last token. Each prompt counts as cached from its arrival on, which no real
    engine reaches: it is a bound, not a forecast.

    Args:
        block_size: tokens per block of the engine, whatever the trace's own is.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"a block has at least 1 token, not {block_size}")
        self.block_size = block_size
        self.tokens = 0
        self.hits = 0
        self._nodes: dict[tuple[int, int], tuple[int, int]] = {}
        """(node of the block before, id) -> (its own node, longest cut of this block so far, in tokens)"""
        self._hashes: set[int] = set()

    def hit(self, request: TrafficRequest) -> int:
        """Return the tokens of this prompt that are cached by now, then remember it whole.

        Raises:
            ValueError: the prompt is text, whose tokens only a tokenizer knows.
        """
        shared = self._shared_tokens(request) if request.token_ids is None else self._shared_blocks(request.token_ids)
        most = min(shared, request.isl - 1)
        cached = most - most % self.block_size
        self.tokens += request.isl
        self.hits += cached
        return cached

    @property
    def share(self) -> float | None:
        """Hits over prompt tokens, token-weighted; None before the first prompt."""
        return self.hits / self.tokens if self.tokens else None

    def _shared_tokens(self, request: TrafficRequest) -> int:
        if request.messages is not None and not request.hash_ids:
            raise ValueError("the prompt is text: only a tokenizer knows its tokens")
        size = request.block_size
        node, shared, known = -size, 0, True  # the root's number tells traces of different block sizes apart
        for index, number in enumerate(request.hash_ids):
            length = min(size, request.isl - index * size)
            key = (node, number)
            entry = self._nodes.get(key)
            if entry is None:
                known = False
                node = len(self._nodes)
                self._nodes[key] = (node, length)
                continue
            node, longest = entry
            if known:
                shared += min(length, longest)
                known = longest >= length
            if length > longest:
                self._nodes[key] = (node, length)
        return shared

    def _shared_blocks(self, token_ids: list[int]) -> int:
        hashes = block_hashes(token_ids, self.block_size)
        depth = 0
        for value in hashes:
            if value not in self._hashes:
                break
            depth += 1
        self._hashes.update(hashes)
        return depth * self.block_size


def infinite_cache_bound(requests: Iterable[TrafficRequest], block_size: int) -> float | None:
    """Return the share of prompt tokens that one infinite shared cache would hit; None without a token.

    Args:
        requests: in the order of their arrival.
        block_size: tokens per block of the engine.
    """
    cache = InfiniteCache(block_size)
    for request in requests:
        cache.hit(request)
    return cache.share
