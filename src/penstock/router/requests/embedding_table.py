"""Embedding table: which media have been encoded, and are in the store that encode workers share with the others.

An entry is by content, so that the same image is encoded once, whoever asks. It is what this router believes: where the
store has dropped an embedding, the worker that needs it encodes by itself.
"""

from collections.abc import Sequence

from penstock.kernel.bounded_table import BoundedTable
from penstock.kernel.values import MediaItem

EMBEDDING_BYTES = 8192
"""Bytes of one embedding: 4,096 numbers of 16 bits, as models of 7 to 9 billion parameters have them."""
TOKENS_USUAL = 1024
"""Tokens that a medium counts as until an engine's own events have said how many it takes."""


class EmbeddingTable(BoundedTable[str, int]):
    """The embeddings of one model, the latest ones, within a number of bytes: what each takes by its content's id."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(bytes_max=bytes_max, bytes_of=_bytes_of)

    def missing(self, items: Sequence[MediaItem]) -> list[int]:
        """Return the places of the items to encode; what comes twice is encoded once."""
        found: list[int] = []
        seen: set[str] = set()
        for place, item in enumerate(items):
            if item.id is not None:
                if item.id in seen:
                    continue
                seen.add(item.id)
                if self.use(item.id) is not None:
                    continue
            found.append(place)
        return found

    def add(self, items: Sequence[MediaItem]) -> None:
        """These have been encoded."""
        for item in items:
            if item.id is not None:
                self.put(item.id, (item.tokens or TOKENS_USUAL) * EMBEDDING_BYTES)


def _bytes_of(id: str, size: int) -> int:
    return size
