"""`TierResidency`: which tiers of one medium have a block, so that it is announced as removed once none has it.

vLLM's own host tier and the tier process both have blocks in host memory, and routers know one host tier per engine: a
block that leaves vLLM's is still there.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any


class TierResidency:
    """Merges the removals of several tiers; takes vLLM's ``OffloadingEvent``."""

    def __init__(self) -> None:
        self._bits: dict[str | None, int] = {}
        """Owner -> its bit. None is vLLM's own tier."""
        self._owners: dict[tuple[Any, bytes], int] = {}
        """Medium and key -> bits of those who have the block."""

    def merge(self, events: Iterable[Any]) -> Iterator[Any]:
        """Yield all stored blocks, and of removed ones those that no other owner has in this medium."""
        for event in events:
            bit = self._bits.setdefault(event.ownership, 1 << len(self._bits))
            places = [(event.medium, key) for key in event.keys]
            if not event.removed:
                for place in places:
                    self._owners[place] = self._owners.get(place, 0) | bit
                yield event
                continue
            gone = []
            for place in places:
                left = self._owners.pop(place, 0) & ~bit
                if left:
                    self._owners[place] = left
                else:
                    gone.append(place[1])
            if gone:  # under the name that vLLM has for its records of the block, which it drops with this
                yield dataclasses.replace(event, keys=gone, ownership=None)

    def cleared(self) -> None:
        """vLLM's own tier is empty, and has announced that in its own way."""
        bit = self._bits.get(None, 0)
        for place, owners in list(self._owners.items()):
            if owners == bit:
                del self._owners[place]
            else:
                self._owners[place] = owners & ~bit
