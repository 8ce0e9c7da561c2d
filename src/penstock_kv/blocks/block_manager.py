"""The block manager of one tier: allocates, registers, matches and evicts KV blocks, and reports who holds them.

A block is in one of three pools: *free* (empty), *active* (some handle holds it) or *idle* (registered, and nobody
holds it: the cache). What a block contains is its state, of the life cycle in `penstock_kv.blocks.block_table`.

The manager has one writer: whoever drives it makes one call at a time. It moves no bytes. An allocation's handle says
which keys were evicted for it, so that their bytes can be saved before the slots are written.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from penstock.kernel.errors import ConfigError, InvariantError
from penstock.kernel.machine import Nanos, Snapshot, read_snapshot, write_snapshot
from penstock_kv.blocks.block_key import BlockKey
from penstock_kv.blocks.block_table import (
    COMPLETE,
    FORBIDDEN,
    REGISTERED,
    RESET,
    STEPS,
    TRANSITIONS,
    BlockHandle,
    BlockState,
    BlockTable,
    OpenHandle,
    WeakHandle,
)
from penstock_kv.blocks.eviction_order import LOWEST, EvictionOrder, LruOrder, PriorityOrder

VERSION = 1
OrderName = Literal["lru", "priority"]
ORDERS: dict[OrderName, Callable[[BlockTable], EvictionOrder]] = {
    "lru": LruOrder,
    "priority": PriorityOrder,
}


class BlockCounts(msgspec.Struct):
    """What happened since the start; blocks but for ``refused``, calls, and ``leaked``, handles."""

    allocated: int = 0
    refused: int = 0
    """Allocations for which there was no room."""
    evicted: int = 0
    registered: int = 0
    duplicates: int = 0
    requested: int = 0
    matched: int = 0
    invalidated: int = 0
    stale: int = 0
    """Blocks that were not what a weak handle or a carrier took them for: misses."""
    leaked: int = 0
    """Handles that nobody released."""


class Duplicate(NamedTuple):
    """A block that existed already: the handle holds that one now, and the own slot is free."""

    position: int
    own: int
    existing: int


class BlockColumns(msgspec.Struct):
    """Blocks by column, shape (n,) each, as they go from one tier to another."""

    keys: list[BlockKey] = []
    parents: list[BlockKey | None] = []
    priorities: list[int] = []
    pins: list[Nanos] = []
    """Pinned until then; 0 is not pinned."""


class BlockRow(msgspec.Struct, frozen=True):
    """A block that is not empty, as a snapshot has it."""

    slot: int
    state: int
    tokens: int
    key: BlockKey | None
    parent: BlockKey | None
    priority: int
    pinned_until: Nanos


class ManagerState(msgspec.Struct, frozen=True, kw_only=True):
    """A manager's whole state."""

    slots: int
    block_size: int
    order: OrderName
    rows: list[BlockRow]
    generations: list[int]
    free: list[int]
    handles: list[OpenHandle]
    next_id: int
    dropped: list[int]
    counts: BlockCounts
    idle: list[int]


class BlockManager:
    """All blocks of one tier.

    Args:
        blocks: how many there are.
        block_size: tokens of each.
        order: which idle block is evicted first.
    """

    def __init__(self, blocks: int, block_size: int, order: OrderName = "lru") -> None:
        if blocks < 1 or block_size < 1:
            raise ConfigError(
                f"blocks={blocks}, block_size={block_size}: a tier needs at least one block of one token",
                hint="give the tier more memory, or use none",
            )
        if order not in ORDERS:
            raise ConfigError(f"eviction order {order!r} is unknown", hint=f"use one of {', '.join(ORDERS)}")
        self.order_name: OrderName = order
        self.table = BlockTable(blocks, block_size)
        self.counts = BlockCounts()
        self._order = ORDERS[order](self.table)
        self._free = list(range(blocks - 1, -1, -1))
        self._handles: dict[int, OpenHandle] = {}
        self._next_id = 1
        self._dropped: list[tuple[int, list[int]]] = []

    # --- pools

    @property
    def free(self) -> int:
        """Empty blocks."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Registered blocks that nobody holds."""
        return len(self._order)

    @property
    def active(self) -> int:
        """Blocks that handles hold."""
        return self.table.slots - self.free - self.idle

    def available(self, now: Nanos) -> int:
        """Return how many blocks `allocate` could give."""
        self._take_back_dropped()
        return len(self._free) + self._order.evictable(now)

    # --- find

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Count the leading keys that are registered. Reads only."""
        index = self.table.index
        for depth, key in enumerate(keys):
            if key not in index:
                return depth
        return len(keys)

    def scan(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the positions of all keys that are registered, holes or not. Reads only."""
        index = self.table.index
        return [position for position, key in enumerate(keys) if key in index]

    def match(self, keys: Sequence[BlockKey], owner: str, now: Nanos) -> BlockHandle:
        """Hold the longest registered prefix of ``keys``; the handle has no block where the first is a miss."""
        slots: list[int] = []
        get = self.table.index.get
        for key in keys:
            slot = get(key)
            if slot is None:
                break
            slots.append(slot)
        counts = self.counts
        counts.requested += len(keys)
        counts.matched += len(slots)
        self._hold_slots(slots)
        return self._new_handle(slots, [], owner, now)

    def weak(self, key: BlockKey) -> WeakHandle | None:
        """Return a weak handle of a registered block; None where there is none."""
        slot = self.table.index.get(key)
        return None if slot is None else WeakHandle(slot, self.table.generation[slot], key)

    def upgrade(self, weak: WeakHandle, owner: str, now: Nanos) -> BlockHandle | None:
        """Hold the block of a weak handle; None where the block was evicted or invalidated since, which is counted."""
        if not self.valid(weak):
            return None
        self._hold_slots((weak.slot,))
        return self._new_handle([weak.slot], [], owner, now)

    def valid(self, weak: WeakHandle) -> bool:
        """Return whether a slot still has the block that it had; a False is a miss, and counted.

        A carrier asks once it has read a block: what it read is that block's only where this is true.
        """
        table = self.table
        same = table.index.get(weak.key) == weak.slot and table.generation[weak.slot] == weak.generation
        self.counts.stale += not same
        return same

    # --- take, fill, register, release

    def allocate(self, count: int, owner: str, now: Nanos) -> BlockHandle | None:
        """Take ``count`` empty blocks, evicting idle ones where too few are free.

        Returns: None where there is no room, which is counted; nothing is evicted then.
        Cost: O(count), with the eviction order's cost per evicted block.
        """
        self._take_back_dropped()
        free = self._free
        evicted: list[tuple[int, BlockKey]] = []
        short = count - len(free)
        if short > 0:
            if self._order.evictable(now) < short:
                self.counts.refused += 1
                return None
            evicted = self._forget_slots(self._order.evict(short, now))
            self.counts.evicted += len(evicted)
        slots = [free.pop() for _ in range(count)]
        holders = self.table.holders
        for slot in slots:
            holders[slot] = 1
        self.counts.allocated += count
        return self._new_handle(slots, evicted, owner, now)

    def vacate(
        self, count: int, dirty: Callable[[BlockKey], bool], owner: str, now: Nanos
    ) -> tuple[BlockHandle, BlockColumns]:
        """Evict up to ``count`` idle blocks before anybody needs their slots.

        Args:
            dirty: whether a block's bytes must be saved first.
        Returns: a handle of the dirty ones, whose slots are free after its release, and what they were. The handle's
            ``evicted`` are all.
        """
        slots = self._order.evict(count, now)
        saved = [slot for slot in slots if dirty(self._key_of(slot))]
        columns = self.columns(saved)
        evicted = self._forget_slots(slots)
        self.counts.evicted += len(evicted)
        del self._free[len(self._free) - len(slots) :]
        waiting = set(saved)
        self._free += [slot for slot in slots if slot not in waiting]
        for slot in saved:
            self.table.holders[slot] = 1
        return self._new_handle(saved, evicted, owner, now), columns

    def columns(self, slots: Sequence[int]) -> BlockColumns:
        """Return what registered blocks are. Reads only."""
        table = self.table
        return BlockColumns(
            keys=[self._key_of(slot) for slot in slots],
            parents=[table.parent[slot] for slot in slots],
            priorities=[table.priority[slot] for slot in slots],
            pins=[table.pinned_until[slot] for slot in slots],
        )

    def empty_slots(self, count: int) -> list[int]:
        """Return up to so many slots that are free, those that `allocate` takes last."""
        return self._free[:count]

    def adopt(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        generations: Sequence[int],
        parents: Sequence[BlockKey | None],
    ) -> list[int]:
        """Make free slots the idle blocks that they were before a restart, in that order.

        Returns: positions that can't be: no such free slot, or the key is registered.
        """
        table = self.table
        free, refused, adopted = set(self._free), [], []
        for position, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            if slot not in free or key in table.index:
                refused.append(position)
                continue
            free.discard(slot)
            adopted.append(slot)
            table.state[slot], table.tokens[slot] = REGISTERED, table.block_size
            table.key[slot], table.parent[slot] = key, parents[position]
            table.generation[slot] = generations[position]
            table.index[key] = slot
        self._free = [slot for slot in self._free if slot in free]
        self._order.enter(adopted)
        self.counts.registered += len(adopted)
        return refused

    def add_tokens(self, handle: BlockHandle, position: int, count: int) -> None:
        """Note ``count`` more tokens in a block, one that is not shared."""
        slot = self._own_slot(handle, position)
        table = self.table
        if count < 1 or table.tokens[slot] + count > table.block_size:
            raise InvariantError(f"{count} more tokens in a block with {table.tokens[slot]} of {table.block_size}")
        self._step_slot(slot, "add")
        table.tokens[slot] += count

    def pop_tokens(self, handle: BlockHandle, position: int, count: int) -> None:
        """Note that a block's last ``count`` tokens are gone, such as rejected drafts."""
        slot = self._own_slot(handle, position)
        if not 1 <= count <= self.table.tokens[slot]:
            raise InvariantError(f"{count} tokens fewer in a block with {self.table.tokens[slot]}")
        self._step_slot(slot, "pop")
        self.table.tokens[slot] -= count

    def commit(self, handle: BlockHandle, position: int) -> None:
        """Make a block complete that was filled token by token."""
        slot = self._own_slot(handle, position)
        if self.table.tokens[slot] != self.table.block_size:
            raise InvariantError(
                f"a block with {self.table.tokens[slot]} of {self.table.block_size} tokens is not complete"
            )
        self._step_slot(slot, "commit")

    def apply(self, handle: BlockHandle, first: int = 0, count: int | None = None) -> None:
        """Make empty blocks complete at once: a prefill wrote them, or a transfer that was checked."""
        self._open_handle(handle)
        table = self.table
        state, tokens, step, size = table.state, table.tokens, STEPS["apply"], table.block_size
        for slot in handle.slots[first : None if count is None else first + count]:
            after = step[state[slot]]
            if after == FORBIDDEN:
                raise InvariantError(f"apply: block {slot} is {BlockState(state[slot]).name.lower()}")
            state[slot] = after
            tokens[slot] = size

    def register(
        self,
        handle: BlockHandle,
        keys: Sequence[BlockKey],
        *,
        first: int = 0,
        parent: BlockKey | None = None,
        priority: int = LOWEST,
    ) -> list[Duplicate]:
        """Give complete blocks ``first, first + 1, ...`` of a handle their keys, so that others match them.

        Args:
            keys: shape (n,), chained.
            parent: key of the block before; None at the start of a prompt.
            priority: of the order ``priority``, 0 the lowest.
        Returns: blocks whose key was registered already: the handle holds the existing ones now (``handle.slots``).
        """
        opened = self._open_handle(handle)
        table = self.table
        index, state, slots, step = table.index, table.state, opened.slots, STEPS["register"]
        if first < 0 or first + len(keys) > len(slots):
            raise InvariantError(f"{len(keys)} keys from block {first} on, of a handle with {len(slots)} blocks")
        fresh: list[int] = []
        duplicates: list[Duplicate] = []
        end = first + len(keys)
        for slot in slots[first:end]:
            if step[state[slot]] == FORBIDDEN:
                raise InvariantError(f"register: block {slot} is {BlockState(state[slot]).name.lower()}, not complete")
        for position, key in enumerate(keys, first):
            slot = slots[position]
            existing = index.get(key)
            if existing is None:
                state[slot] = REGISTERED
                table.key[slot] = key
                table.parent[slot] = parent
                table.priority[slot] = priority
                index[key] = slot
                fresh.append(slot)
            else:
                self._hold_slots((existing,))
                table.priority[existing] = max(table.priority[existing], priority)
                self._release_one(slot)
                slots[position] = existing
                duplicates.append(Duplicate(position, slot, existing))
            parent = key
        self.counts.registered += len(fresh)
        self.counts.duplicates += len(duplicates)
        return duplicates

    def release(self, handle: BlockHandle) -> None:
        """Give a handle's blocks back, the last one first, so that a prefix is evicted from its end."""
        self._open_handle(handle)
        handle.released = True
        self._close_handle(handle.id)

    # --- keep and drop

    def pin(self, keys: Sequence[BlockKey], until: Nanos) -> int:
        """Keep registered blocks until then; afterwards they have the lowest priority. 0 takes a pin away.

        Returns: how many of the keys are registered.
        Raises:
            ConfigError: the eviction order has no pins.
        """
        pinned = 0
        for key in keys:
            slot = self.table.index.get(key)
            if slot is not None:
                if not self._order.pin(slot, until):
                    raise ConfigError(f"eviction order {self.order_name!r} has no pins", hint="use order 'priority'")
                pinned += 1
        return pinned

    def prefer(self, keys: Sequence[BlockKey], priority: int) -> None:
        """Give registered blocks at least a priority."""
        table = self.table
        slots = [slot for slot in map(table.index.get, keys) if slot is not None and table.priority[slot] < priority]
        idle = [slot for slot in slots if not table.holders[slot]]
        self._order.leave(idle)
        for slot in slots:
            table.priority[slot] = priority
        self._order.enter(idle)

    def invalidate(self, key: BlockKey) -> bool:
        """Make a block unmatchable at once, because its bytes are wrong; True where it was registered.

        Holders keep the slot, and it is empty when the last one releases it.
        """
        table = self.table
        slot = table.index.get(key)
        if slot is None:
            return False
        self.counts.invalidated += 1
        if not table.holders[slot]:
            self._order.leave((slot,))
        self._drop_key(slot)
        self._step_slot(slot, "invalidate")
        if not table.holders[slot]:
            self._empty_slot(slot)
        return True

    def clear_idle(self) -> list[tuple[int, BlockKey]]:
        """Evict all idle blocks, pinned ones included: the engine has reset its cache."""
        evicted = self._forget_slots(self._order.clear())
        self.counts.evicted += len(evicted)
        return evicted

    # --- handles

    def dropped(self, id: int, slots: list[int]) -> None:
        """Take note of a handle whose last reference went. Called at any moment, so nothing else happens here."""
        self._dropped.append((id, slots))

    def open_handles(self, before: Nanos | None = None) -> list[OpenHandle]:
        """Return handles that are not released, those opened before a time where one is given: what may be leaks."""
        self._take_back_dropped()
        return [opened for opened in self._handles.values() if before is None or opened.since < before]

    def reopen(self, id: int) -> BlockHandle:
        """Return the handle of an `OpenHandle` that a snapshot brought: a restart has lost the object.

        Raises:
            InvariantError: there is none.
        """
        if id not in self._handles:
            raise InvariantError(f"handle {id} is not open")
        return BlockHandle(self, id, self._handles[id].slots, [])

    # --- state

    def snapshot(self) -> Snapshot:
        """Return the whole state as plain data."""
        table = self.table
        rows = [
            BlockRow(
                slot,
                table.state[slot],
                table.tokens[slot],
                table.key[slot],
                table.parent[slot],
                table.priority[slot],
                table.pinned_until[slot],
            )
            for slot in range(table.slots)
            if table.state[slot] != RESET
        ]
        state = ManagerState(
            slots=table.slots,
            block_size=table.block_size,
            order=self.order_name,
            rows=rows,
            generations=table.generation,
            free=self._free,
            handles=list(self._handles.values()),
            next_id=self._next_id,
            dropped=[id for id, slots in self._dropped if self._is_open(id, slots)],
            counts=self.counts,
            idle=self._order.state(),
        )
        return write_snapshot(state, VERSION)

    def restore(self, snapshot: Snapshot) -> None:
        """Become the manager that wrote ``snapshot``; its open handles are at `reopen`.

        Raises:
            ValueError: it is of another version.
        """
        state = read_snapshot(snapshot, ManagerState, VERSION, "the block manager")
        self.order_name = state.order
        self.table = table = BlockTable(state.slots, state.block_size)
        for row in state.rows:
            slot = row.slot
            table.state[slot], table.tokens[slot] = row.state, row.tokens
            table.key[slot], table.parent[slot] = row.key, row.parent
            table.priority[slot], table.pinned_until[slot] = row.priority, row.pinned_until
            if row.key is not None:
                table.index[row.key] = slot
        table.generation = state.generations
        for opened in state.handles:
            for slot in opened.slots:
                table.holders[slot] += 1
        self.counts = state.counts
        self._free = state.free
        self._handles = {opened.id: opened for opened in state.handles}
        self._next_id = state.next_id
        self._dropped = [(id, self._handles[id].slots) for id in state.dropped]
        self._order = ORDERS[state.order](table)
        self._order.restore(state.idle)

    def check(self) -> None:
        """Compare with a recount. Cost: walks all blocks and handles.

        Raises:
            InvariantError: a block is lost, in two pools, or in a state that its pool can't have.
        """
        table = self.table
        recount = Counter(slot for opened in self._handles.values() for slot in opened.slots)
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a block is free twice")
        if len(self._order) != sum(slot in self._order for slot in range(table.slots)):
            raise InvariantError(f"the eviction order says {len(self._order)} idle blocks and has others")
        for slot in range(table.slots):
            state, key, tokens = table.state[slot], table.key[slot], table.tokens[slot]
            pools = (slot in free) + (table.holders[slot] > 0) + (slot in self._order)
            if pools != 1 or table.holders[slot] != recount[slot]:
                raise InvariantError(
                    f"block {slot}: {pools} pools, {table.holders[slot]} holders, {recount[slot]} counted"
                )
            if (state == REGISTERED) != (key is not None) or (key is not None and table.index.get(key) != slot):
                raise InvariantError(f"block {slot} is {BlockState(state).name} with key {key!r}")
            if (slot in free and state != RESET) or (slot in self._order and state != REGISTERED):
                raise InvariantError(f"block {slot} is {BlockState(state).name} in the wrong pool")
            if tokens > table.block_size or (tokens == table.block_size) < (state >= COMPLETE):
                raise InvariantError(f"block {slot} is {BlockState(state).name} with {tokens} tokens")
            if state == RESET and (tokens or table.priority[slot] or table.pinned_until[slot] or table.parent[slot]):
                raise InvariantError(f"block {slot} is empty, and something is left of its last use")
        if len(table.index) != sum(key is not None for key in table.key):
            raise InvariantError("the index has keys that no block has")

    # --- helpers

    def _new_handle(self, slots: list[int], evicted: list[tuple[int, BlockKey]], owner: str, now: Nanos) -> BlockHandle:
        id = self._next_id
        self._next_id = id + 1
        self._handles[id] = OpenHandle(id, owner, slots, now)
        return BlockHandle(self, id, slots, evicted)

    def _open_handle(self, handle: BlockHandle) -> OpenHandle:
        if not self._is_open(handle.id, handle.slots):
            raise InvariantError(f"handle {handle.id} is stale: it was released, or is of another manager")
        return self._handles[handle.id]

    def _is_open(self, id: int, slots: list[int]) -> bool:
        """Return whether a handle is one of this manager's: ids repeat in another one, or after `restore`."""
        opened = self._handles.get(id)
        return opened is not None and opened.slots is slots

    def _own_slot(self, handle: BlockHandle, position: int) -> int:
        """Return the slot of a block that only this handle holds."""
        slot = self._open_handle(handle).slots[position]
        if self.table.holders[slot] != 1:
            raise InvariantError(f"block {slot} has {self.table.holders[slot]} holders: it can't be written")
        return slot

    def _step_slot(self, slot: int, trigger: str) -> None:
        state = self.table.state
        after = STEPS[trigger][state[slot]]
        if after == FORBIDDEN:
            allowed = ", ".join(row.before.name.lower() for row in TRANSITIONS if row.trigger == trigger)
            raise InvariantError(f"{trigger}: block {slot} is {BlockState(state[slot]).name.lower()}, not {allowed}")
        state[slot] = after

    def _hold_slots(self, slots: Sequence[int]) -> None:
        """Add a holder to registered blocks."""
        holders = self.table.holders
        woken: list[int] = []
        for slot in slots:
            if not holders[slot]:
                woken.append(slot)
            holders[slot] += 1
        if woken:
            self._order.leave(woken)

    def _close_handle(self, id: int) -> None:
        holders, state = self.table.holders, self.table.state
        idle: list[int] = []
        for slot in reversed(self._handles.pop(id).slots):
            if holders[slot] == 1 and state[slot] == REGISTERED:
                holders[slot] = 0
                idle.append(slot)
            else:
                self._release_one(slot)
        if idle:
            self._order.enter(idle)

    def _release_one(self, slot: int) -> None:
        """Take a holder from a block that becomes empty without one."""
        self.table.holders[slot] -= 1
        if not self.table.holders[slot]:
            self._step_slot(slot, "free")
            self._empty_slot(slot)

    def _forget_slots(self, slots: Sequence[int]) -> list[tuple[int, BlockKey]]:
        """Empty blocks that the eviction order gave up."""
        table = self.table
        keys, parents, index, state, step = table.key, table.parent, table.index, table.state, STEPS["evict"]
        tokens, priorities, pins, generations = table.tokens, table.priority, table.pinned_until, table.generation
        evicted: list[tuple[int, BlockKey]] = []
        for slot in slots:  # `_drop_key` and `_empty_slot` in place: their calls are half of an eviction's time
            key = keys[slot]
            assert key is not None and step[state[slot]] == RESET, "idle blocks are registered"
            evicted.append((slot, key))
            del index[key]
            keys[slot] = parents[slot] = None
            state[slot] = RESET
            tokens[slot] = priorities[slot] = pins[slot] = 0
            generations[slot] += 1
        self._free += slots
        return evicted

    def _key_of(self, slot: int) -> BlockKey:
        key = self.table.key[slot]
        assert key is not None, "only registered blocks have a name"
        return key

    def _drop_key(self, slot: int) -> None:
        table = self.table
        del table.index[self._key_of(slot)]
        table.key[slot] = table.parent[slot] = None

    def _empty_slot(self, slot: int) -> None:
        table = self.table
        table.state[slot] = RESET
        table.tokens[slot] = table.priority[slot] = table.pinned_until[slot] = 0
        table.generation[slot] += 1
        self._free.append(slot)

    def _take_back_dropped(self) -> None:
        while self._dropped:
            id, slots = self._dropped.pop()
            if self._is_open(id, slots):
                self.counts.leaked += 1
                self._close_handle(id)
