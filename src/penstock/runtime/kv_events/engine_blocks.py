"""Blocks that one engine rank holds, under Penstock's hashes: kept beside the engine for routers that missed events."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from penstock.kernel.hashing import SCHEME, chain
from penstock.kernel.values import TIERS, KvCleared, KvEvent, KvRemoved, KvStored, Tier, WorkerCard
from penstock.router.kv_index.engine_hash_map import AWAITED_MAX, unsigned, wordless

Place = tuple[Tier, int]
"""A tier, and the window of the layers whose blocks are there: 0 for full attention."""
RUN_MAX = 4096
"""Blocks of one event of a dump."""


class EngineBlocks:
    """The blocks of one rank of one engine; `apply` its events in order.

    Events leave with our hashes only: a router that receives a dump, or joins in the middle, needs no knowledge
    of the engine's own hashes.

    Args:
        card: of the engine; its hashes are translated unless they are ours.
    """

    def __init__(self, card: WorkerCard) -> None:
        self.unplaced = 0
        """Blocks left out because their place in a chain is not known."""
        self._native = card.hash_scheme == SCHEME
        self._block_size = card.block_size
        # As the router's index does: an engine of this kind publishes the end of each copy that it published.
        self._copies = card.engine == "vllm"
        self._places: dict[Place, dict[int, _Block]] = {(tier, 0): {} for tier in TIERS}
        self._names: dict[int, int] = {}
        """The engine's hash -> ours."""
        self._awaited: dict[int, set[Place]] = {}
        """Names that were announced without tokens before any event told which blocks they are -> those places."""

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def apply(self, event: KvEvent) -> list[KvEvent]:
        """Apply an event, and return the resulting events under our hashes."""
        if isinstance(event, KvCleared):
            if event.tier is None:
                self.clear()
            else:
                for place in [place for place in self._places if place[0] == event.tier]:
                    self._places[place].clear()
                    for places in self._awaited.values():
                        places.discard(place)
                left = [stored for stored in self._places.values() if stored]
                self._names = {n: block for n, block in self._names.items() if any(block in stored for stored in left)}
            return [event]
        if isinstance(event, KvRemoved):
            names, place = unsigned(event.hashes), (event.tier, event.window)
            blocks = self._known(names)
            self._remove(place, blocks)
            for name in () if self._native else names:
                self._awaited.get(name, set()).discard(place)
                if not any(self._names.get(name) in stored for stored in self._places.values()):
                    self._names.pop(name, None)
            return [KvRemoved(hashes=blocks, tier=event.tier, window=event.window)] if blocks else []
        plain = wordless(event, native=self._native, block_size=self._block_size)
        assert isinstance(plain, KvStored)
        return self._stored(plain)

    def clear(self) -> None:
        """The engine holds nothing, or its blocks are unknown."""
        for stored in self._places.values():
            stored.clear()
        self._names.clear()
        self._awaited.clear()

    def dump(self) -> Iterator[KvStored]:
        """Yield events that give an empty index the same blocks."""
        for place, stored in self._places.items():
            if place[1]:
                yield self._event([], None, place)  # so much is read by some layers, if nothing of it is there
            run: list[int] = []
            parent: int | None = None
            for block, entry in stored.items():
                if run and (entry.parent != run[-1] or len(run) == RUN_MAX):
                    yield self._event(run, parent, place)
                    run = []
                if not run:
                    parent = entry.parent
                run.append(block)
            if run:
                yield self._event(run, parent, place)
            for block, entry in stored.items():
                for _ in range(entry.copies - 1):
                    yield self._event([block], entry.parent, place)

    def _event(self, blocks: Sequence[int], parent: int | None, place: Place) -> KvStored:
        tier, window = place
        size = self._block_size or 0
        return KvStored(hashes=list(blocks), parent=parent, block_size=size, tier=tier, window=window)

    def _stored(self, event: KvStored) -> list[KvEvent]:
        names, place = unsigned(event.hashes), (event.tier, event.window)
        if event.window and event.block_size not in (0, self._block_size):
            self.unplaced += len(names)
            return []
        if self._native:
            self._store(place, names, event.parent)
            return [event]
        if event.local is None:  # a copy into a lower tier comes without tokens, and so do blocks of a window
            first: list[KvEvent] = [] if place in self._places else [self._event([], None, place)]
            self._places.setdefault(place, {})
            for name in names:
                if name not in self._names:
                    self._await(name, place)
            return first + [self._copied(block, place) for block in self._known(names)]
        if event.tier != "device" and names[0] in self._names:
            # As in the router's index: names say more than tokens, which may come without the salt of their prompt.
            known = next((i for i, name in enumerate(names) if name not in self._names), len(names))
            copied = [self._copied(block, place) for block in self._known(names[:known])]
            if known == len(names):
                return copied
            local, last = event.local[known:], event.hashes[known - 1]
            rest = msgspec.structs.replace(event, hashes=event.hashes[known:], parent=last, local=local)
            return [*copied, *self._stored(rest)]
        parent = None if event.parent is None else self._names.get(unsigned([event.parent])[0])
        if (event.parent is not None and parent is None) or len(event.local) != len(names):
            self.unplaced += len(names)
            return []
        blocks = chain(event.local, parent)
        replaced = [
            before
            for name, block in zip(names, blocks, strict=True)
            if (before := self._names.get(name)) is not None and before != block
        ]
        changed: list[KvEvent] = []
        for held in list(self._places) if replaced else ():
            # An old engine hash for a new block: the engine can't hold the old block any more.
            removed = [block for block in replaced if block in self._places[held]]
            if removed:
                changed.append(KvRemoved(hashes=removed, tier=held[0], window=held[1]))
                self._remove(held, removed)
        self._names.update(zip(names, blocks, strict=True))
        self._store(place, blocks, parent)
        changed.append(KvStored(hashes=blocks, parent=parent, block_size=event.block_size, tier=event.tier))
        for name, block in zip(names, blocks, strict=True) if self._awaited else ():
            changed += [self._copied(block, waits) for waits in sorted(self._awaited.pop(name, ()))]
        return changed

    def _copied(self, block: int, place: Place) -> KvEvent:
        """Store a block that another place holds; return the event that says so."""
        parent = self._parent_of(block)
        self._store(place, [block], parent)
        return self._event([block], parent, place)

    def _await(self, name: int, place: Place) -> None:
        self._awaited.setdefault(name, set()).add(place)
        if len(self._awaited) > AWAITED_MAX:
            del self._awaited[next(iter(self._awaited))]

    def _known(self, names: Iterable[int]) -> list[int]:
        if self._native:
            return list(names)
        translated = [self._names.get(name) for name in names]
        self.unplaced += translated.count(None)
        return [block for block in translated if block is not None]

    def _parent_of(self, block: int) -> int | None:
        entries = (stored.get(block) for stored in self._places.values())
        return next((entry.parent for entry in entries if entry is not None), None)

    def _store(self, place: Place, blocks: Iterable[int], parent: int | None) -> None:
        stored = self._places.setdefault(place, {})
        for block in blocks:
            entry = stored.get(block)
            if entry is None:
                stored[block] = _Block(parent)
            elif self._copies and place[0] == "device":
                entry.copies += 1
            parent = block

    def _remove(self, place: Place, blocks: Iterable[int]) -> None:
        stored = self._places.get(place, {})
        for block in blocks:
            entry = stored.get(block)
            if entry is None:
                continue
            entry.copies -= 1
            if entry.copies == 0:
                del stored[block]


class _Block:
    """One block: the block before it in its chain, and how many copies are held."""

    __slots__ = ("copies", "parent")

    def __init__(self, parent: int | None) -> None:
        self.parent = parent
        self.copies = 1
