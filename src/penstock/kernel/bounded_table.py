"""`BoundedTable`: entries by key within a bound, of which the least recently used goes first."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from penstock.kernel.errors import InvariantError

K = TypeVar("K")
V = TypeVar("V")


class BoundedTable(Generic[K, V]):
    """The entries that were put or used last. Iterating gives the keys, the least recently used first.

    Args:
        entries_max: most entries; None for as many as there are bytes for.
        bytes_max: most bytes, by ``bytes_of`` each key and value.
    """

    def __init__(
        self,
        entries_max: int | None = None,
        *,
        bytes_max: int | None = None,
        bytes_of: Callable[[K, V], int] | None = None,
    ) -> None:
        self.entries_max = entries_max
        self.bytes_max = bytes_max
        self.bytes = 0
        self._bytes_of = bytes_of
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    @property
    def newest(self) -> V | None:
        """The entry that was put or used last; None where there is none."""
        return next(reversed(self._entries.values()), None)

    def get(self, key: K) -> V | None:
        """Return an entry, or None; it keeps its place."""
        return self._entries.get(key)

    def use(self, key: K) -> V | None:
        """Return an entry, or None; it is the most recently used now."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Set an entry, the most recently used now; what is too much goes."""
        if self._bytes_of is not None:
            self.pop(key)
            self.bytes += self._bytes_of(key, value)
        self._entries[key] = value
        self._entries.move_to_end(key)
        if self.entries_max is None or len(self._entries) > self.entries_max or self.bytes_max is not None:
            self.shrink()

    def pop(self, key: K) -> V | None:
        """Take an entry out and return it, or None."""
        value = self._entries.pop(key, None)
        if value is not None and self._bytes_of is not None:
            self.bytes -= self._bytes_of(key, value)
        return value

    def shrink(self) -> None:
        """Let go what is above the bounds; `put` does it by itself."""
        while (self.entries_max is not None and len(self._entries) > self.entries_max) or (
            self.bytes_max is not None and self.bytes > self.bytes_max
        ):
            self.pop(next(iter(self._entries)))

    def drop(self, unwanted: Callable[[K, V], bool]) -> None:
        """Take out the entries of which that is true. Cost: looks at each."""
        for key in [key for key, value in self._entries.items() if unwanted(key, value)]:
            self.pop(key)

    def snapshot(self) -> list[tuple[K, V]]:
        """Return the entries in order."""
        return list(self._entries.items())

    def restore(self, entries: Iterable[tuple[K, V]]) -> None:
        """Have these entries, in this order, and no others."""
        self._entries.clear()
        self.bytes = 0
        for key, value in entries:
            self.put(key, value)

    def check(self) -> None:
        """Raise `InvariantError` where bytes are miscounted or a bound is passed."""
        counted = 0 if self._bytes_of is None else sum(self._bytes_of(key, value) for key, value in self.snapshot())
        if self.bytes != counted or (self.bytes_max is not None and counted > max(0, self.bytes_max)):
            raise InvariantError(f"{self.bytes} bytes are counted, the entries have {counted} of {self.bytes_max}")
        if self.entries_max is not None and len(self) > self.entries_max:
            raise InvariantError(f"{len(self)} entries are more than {self.entries_max}")
