"""A block manager without any structure, and the two managers side by side: every answer is compared."""

import random
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import pytest

from penstock.kernel.errors import InvariantError
from penstock_kv.blocks.block_key import OF_TOKENS, VERSION, BlockKey
from penstock_kv.blocks.block_manager import BlockManager, Duplicate, OrderName
from penstock_kv.blocks.block_table import TRANSITIONS, BlockHandle, BlockState, WeakHandle

BLOCKS, BLOCK_SIZE = 24, 4
ALLOWED = {(row.before, row.trigger): row.after for row in TRANSITIONS}


def key_of(*path: int) -> BlockKey:
    return BlockKey(bytes((OF_TOKENS, VERSION, 0, 0)) + blake2b(repr(path).encode(), digest_size=16).digest())


CHAINS = [
    [key_of(trunk, i) if i < fork else key_of(trunk, fork, branch, i) for i in range(9)]
    for trunk in range(2)
    for fork in (2, 4)
    for branch in range(3)
]


@dataclass(eq=False)
class Block:
    """One block that is not free."""

    slot: int
    state: BlockState = BlockState.RESET
    tokens: int = 0
    holders: int = 1
    key: BlockKey | None = None
    parent: BlockKey | None = None
    priority: int = 0
    pinned_until: int = 0
    tick: int | None = None  # when it became idle


@dataclass
class Naive:
    """All blocks as one list, searched from end to end by everything."""

    order: OrderName
    blocks: list[Block] = field(default_factory=list)
    clock: int = 0
    front: int = 0

    def named(self, key: BlockKey) -> Block | None:
        return next((block for block in self.blocks if block.key == key), None)

    def idle(self) -> list[Block]:
        return [block for block in self.blocks if block.tick is not None]

    def hold(self, block: Block) -> None:
        block.holders += 1
        block.tick = None

    def rest(self, block: Block) -> None:
        assert block.key is not None
        self.clock += 1
        block.tick = self.clock

    def release(self, block: Block) -> None:
        block.holders -= 1
        if block.holders == 0:
            if block.state == BlockState.REGISTERED:
                self.rest(block)
            else:
                self.blocks.remove(block)

    def demote(self, now: int) -> None:
        if self.order == "priority":
            due = [block for block in self.idle() if 0 < block.pinned_until <= now]
            for block in sorted(due, key=lambda block: (block.pinned_until, block.slot), reverse=True):
                block.pinned_until = block.priority = 0
                self.front -= 1
                block.tick = self.front

    def evictable(self) -> list[Block]:
        return [block for block in self.idle() if not block.pinned_until]

    def next_victim(self) -> Block:
        idle = self.evictable()
        ranked = self.order == "priority"
        return min(idle, key=lambda block: (block.priority if ranked else 0, block.tick))


class Twins:
    """A manager beside the naive one. Every method is one operation on both."""

    def __init__(self, order: OrderName) -> None:
        self.manager = BlockManager(BLOCKS, BLOCK_SIZE, order)
        self.naive = Naive(order)
        self.now = 0
        self.handles: list[tuple[BlockHandle, list[Block]]] = []
        self.weak: list[tuple[WeakHandle, Block, BlockKey]] = []
        self.leaked = 0

    def compare(self) -> None:
        """Compare what is cheap to compare."""
        manager, naive = self.manager, self.naive
        assert manager.idle == len(naive.idle())
        assert manager.free == BLOCKS - len(naive.blocks)
        assert manager.active == len(naive.blocks) - len(naive.idle())

    def compare_all(self) -> None:
        table = self.manager.table
        self.manager.check()
        for block in self.naive.blocks:
            slot = block.slot
            assert (table.state[slot], table.tokens[slot], table.holders[slot], table.key[slot]) == (
                block.state,
                block.tokens,
                block.holders,
                block.key,
            )
        for handle, blocks in self.handles:
            assert handle.slots == [block.slot for block in blocks]
        assert [opened.id for opened in self.manager.open_handles()] == [handle.id for handle, _ in self.handles]

    def match(self, chain: int, length: int) -> None:
        keys = CHAINS[chain % len(CHAINS)][:length]
        blocks: list[Block] = []
        for key in keys:
            block = self.naive.named(key)
            if block is None:
                break
            blocks.append(block)
        assert self.manager.lookup(keys) == len(blocks)
        assert self.manager.scan(keys) == [at for at, key in enumerate(keys) if self.naive.named(key)]
        handle = self.manager.match(keys, f"match {length}", self.now)
        for block in blocks:
            self.naive.hold(block)
        self.handles.append((handle, blocks))

    def allocate(self, count: int) -> None:
        handle = self.manager.allocate(count, f"allocate {count}", self.now)
        short = count - (BLOCKS - len(self.naive.blocks))
        if short > 0:
            self.naive.demote(self.now)
        if short > len(self.naive.evictable()):
            assert handle is None
            return
        assert handle is not None
        victims: list[Block] = []
        for _ in range(short):
            victims.append(self.naive.next_victim())
            self.naive.blocks.remove(victims[-1])
        assert handle.evicted == [(block.slot, block.key) for block in victims]
        blocks = [Block(slot) for slot in handle.slots]
        assert not {block.slot for block in blocks} & {block.slot for block in self.naive.blocks}
        self.naive.blocks += blocks
        self.handles.append((handle, blocks))

    def write(self, which: int, position: int, trigger: str, tokens: int) -> None:
        """Add, pop or commit: whatever the table does not allow is refused and changes nothing."""
        handle, blocks = self.handles[which % len(self.handles)]
        if not blocks:
            return
        position %= len(blocks)
        block = blocks[position]
        change = {"add": tokens, "pop": -tokens, "commit": 0}[trigger]
        fits = 0 <= block.tokens + change <= BLOCK_SIZE and (trigger != "commit" or block.tokens == BLOCK_SIZE)
        call = {
            "add": lambda: self.manager.add_tokens(handle, position, tokens),
            "pop": lambda: self.manager.pop_tokens(handle, position, tokens),
            "commit": lambda: self.manager.commit(handle, position),
        }[trigger]
        if block.holders == 1 and fits and (block.state, trigger) in ALLOWED:
            call()
            block.state = ALLOWED[block.state, trigger]
            block.tokens += change
        else:
            with pytest.raises(InvariantError):
                call()

    def apply(self, which: int) -> None:
        handle, blocks = self.handles[which % len(self.handles)]
        empty = [block.state == BlockState.RESET for block in blocks]
        first = empty.index(True) if True in empty else 0
        count = next((at for at, each in enumerate(empty[first:]) if not each), len(blocks) - first)
        self.manager.apply(handle, first, count)
        for block in blocks[first : first + count]:
            block.state, block.tokens = BlockState.COMPLETE, BLOCK_SIZE

    def register(self, which: int, chain: int, depth: int, count: int, priority: int) -> None:
        handle, blocks = self.handles[which % len(self.handles)]
        complete = [block.state == BlockState.COMPLETE for block in blocks]
        first = complete.index(True) if True in complete else 0
        keys = CHAINS[chain % len(CHAINS)]
        parent = keys[depth - 1] if depth else None
        keys = keys[depth : depth + count]
        own = blocks[first : first + len(keys)]
        if len(own) < len(keys) or any(block.state != BlockState.COMPLETE for block in own):
            with pytest.raises(InvariantError):
                self.manager.register(handle, keys, first=first, parent=parent, priority=priority)
            return
        duplicates = []
        for position, (block, key) in enumerate(zip(own, keys, strict=True), first):
            existing = self.naive.named(key)
            if existing is None:
                block.state, block.key, block.parent = BlockState.REGISTERED, key, parent
                block.priority = priority
            else:
                self.naive.hold(existing)
                existing.priority = max(existing.priority, priority)
                self.naive.release(block)
                blocks[position] = existing
                duplicates.append(Duplicate(position, block.slot, existing.slot))
            parent = key
        parent = CHAINS[chain % len(CHAINS)][depth - 1] if depth else None
        assert self.manager.register(handle, keys, first=first, parent=parent, priority=priority) == duplicates

    def release(self, which: int, dropped: bool) -> None:
        handle, blocks = self.handles.pop(which % len(self.handles))
        if dropped:
            self.leaked += 1
            del handle  # as if its owner had forgotten it
        else:
            handle.release()
            with pytest.raises(InvariantError, match="stale"):
                handle.release()
        self.manager.available(self.now)
        for block in reversed(blocks):
            self.naive.release(block)
        self.naive.demote(self.now)
        assert self.manager.counts.leaked == self.leaked

    def available(self, passed: int) -> None:
        self.now += passed
        self.naive.demote(self.now)
        assert self.manager.available(self.now) == BLOCKS - len(self.naive.blocks) + len(self.naive.evictable())

    def pin(self, chain: int, depth: int, length: int) -> None:
        if self.naive.order != "priority":
            return
        keys = CHAINS[chain % len(CHAINS)][depth : depth + 2]
        until = self.now + length if length else 0
        named = [block for key in keys if (block := self.naive.named(key))]
        for block in named:
            block.pinned_until = until
            if block.tick is not None:
                self.naive.rest(block)
        assert self.manager.pin(keys, until) == len(named)

    def invalidate(self, chain: int, depth: int) -> None:
        key = CHAINS[chain % len(CHAINS)][depth]
        block = self.naive.named(key)
        assert self.manager.invalidate(key) == (block is not None)
        if block is not None:
            block.key = block.parent = None
            block.state = BlockState.INVALID
            if block.tick is not None:
                self.naive.blocks.remove(block)

    def remember(self, chain: int, depth: int) -> None:
        key = CHAINS[chain % len(CHAINS)][depth]
        block, weak = self.naive.named(key), self.manager.weak(key)
        assert (block is None) == (weak is None)
        if block is not None and weak is not None and len(self.weak) < 8:
            self.weak.append((weak, block, key))

    def upgrade(self, which: int) -> None:
        if not self.weak:
            return
        weak, block, key = self.weak.pop(which % len(self.weak))
        handle = self.manager.upgrade(weak, "upgrade", self.now)
        if block in self.naive.blocks and block.key == key:
            assert handle is not None
            assert handle.slots == [block.slot]
            self.naive.hold(block)
            self.handles.append((handle, [block]))
        else:
            assert handle is None

    def clear_idle(self) -> None:
        idle = self.naive.idle()
        assert {key for _, key in self.manager.clear_idle()} == {block.key for block in idle}
        for block in idle:
            self.naive.blocks.remove(block)

    def restart(self) -> None:
        """Go on with a new manager that read the state of the old one."""
        written = msgspec.json.encode(self.manager.snapshot())
        twin = BlockManager(1, 1)
        twin.restore(msgspec.json.decode(written))
        assert msgspec.json.encode(twin.snapshot()) == written
        self.manager = twin
        self.handles = [(twin.reopen(handle.id), blocks) for handle, blocks in self.handles]


def random_step(twins: Twins, rng: random.Random) -> None:
    """Do one operation, chosen so that the tier is nearly full most of the time."""
    pick, chain, which = rng.random(), rng.randrange(12), rng.randrange(64)
    depth, count = rng.choice((0, 0, rng.randrange(9))), rng.randint(1, 6)
    if not twins.handles or pick < 0.2:
        before = len(twins.handles)
        twins.allocate(count)
        if len(twins.handles) > before and which < 48:
            twins.apply(-1)
            twins.register(-1, chain, depth, count, rng.randrange(3))
    elif pick < 0.35:
        twins.match(chain, rng.randint(1, 9))
    elif pick < 0.4:
        twins.apply(-1 if which < 48 else which)
    elif pick < 0.45:
        twins.register(-1 if which < 48 else which, chain, depth, count, rng.randrange(3))
    elif pick < 0.82 or len(twins.handles) > 6:
        twins.release(which, dropped=rng.random() < 0.05)
    elif pick < 0.87:
        twins.write(which, count, rng.choice(("add", "add", "add", "pop", "commit")), rng.choice((4, 3, 1)))
    elif pick < 0.89:
        twins.remember(chain, depth)
    elif pick < 0.92:
        twins.upgrade(which)
    elif pick < 0.95:
        twins.pin(chain, depth, rng.choice((0, 5, 50)))
    elif pick < 0.97:
        twins.available(rng.randrange(4))
    elif pick < 0.99:
        twins.invalidate(chain, depth)
    elif pick < 0.9905:
        twins.clear_idle()
    elif pick < 0.993:
        twins.restart()
