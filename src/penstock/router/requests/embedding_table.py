"""Embedding table: which media have been encoded, and are in the store that encode workers share with the others.

An entry is by content, so that the same image is encoded once, whoever asks. It is what this router believes: where the
store has dropped an embedding, the worker that needs it encodes by itself.
"""

from collections import OrderedDict
from collections.abc import Sequence

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Snapshot
from penstock.kernel.values import MediaItem

EMBEDDING_BYTES = 8192
"""Bytes of one embedding: 4,096 numbers of 16 bits, as models of 7 to 9 billion parameters have them."""
TOKENS_USUAL = 1024
"""Tokens that a medium counts as until an engine's own events have said how many it takes."""


class EmbeddingTable:
    """The embeddings of one model, the latest ones, within a number of bytes."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def missing(self, items: Sequence[MediaItem]) -> list[int]:
        """Return the places of the items to encode; what comes twice is encoded once."""
        found: list[int] = []
        seen: set[str] = set()
        for place, item in enumerate(items):
            if item.id is not None:
                if item.id in seen:
                    continue
                seen.add(item.id)
                if item.id in self._sizes:
                    self._sizes.move_to_end(item.id)
                    continue
            found.append(place)
        return found

    def add(self, items: Sequence[MediaItem]) -> None:
        """These have been encoded."""
        for item in items:
            if item.id is None:
                continue
            size = (item.tokens or TOKENS_USUAL) * EMBEDDING_BYTES
            self.bytes += size - self._sizes.pop(item.id, 0)
            self._sizes[item.id] = size
        while self.bytes > self.bytes_max:
            _, size = self._sizes.popitem(last=False)
            self.bytes -= size

    def snapshot(self) -> Snapshot:
        return {"held": list(self._sizes.items())}

    def restore(self, state: Snapshot) -> None:
        self._sizes = OrderedDict((id, size) for id, size in state["held"])
        self.bytes = sum(self._sizes.values())

    def check(self) -> None:
        """Raise `InvariantError` where the sizes do not add up."""
        if self.bytes != sum(self._sizes.values()) or self.bytes > max(0, self.bytes_max):
            raise InvariantError(f"embeddings of {self.bytes} bytes are counted, of at most {self.bytes_max}")
