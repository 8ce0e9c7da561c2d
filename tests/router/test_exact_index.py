"""The exact index beside its naive twin, driven by random event streams."""

import hashlib
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.kernel.hashing import block_hashes
from penstock.kernel.values import TIERS, KvCleared, KvEvent, KvRemoved, KvStored, Target, Tier, WorkerId
from penstock.router.kv_index import engine_hash_map as names_module
from penstock.router.kv_index.engine_hash_map import wordless
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.router.kv_index.indexer import HeldBlocks
from penstock.router.kv_index.span_table import KEY, SPAN_MAX
from tests.depth import deep
from tests.router.radix_oracle import Path, RadixOracle
from tests.router.written_states import written

BLOCK = 2
TARGETS = [Target(WorkerId("a")), Target(WorkerId("a"), 1), Target(WorkerId("b")), Target(WorkerId("c"))]

KINDS = ["own", "shared", "signed", "private", "counted"]

contents = st.integers(0, 2)
paths = st.lists(contents, min_size=1, max_size=7).map(tuple)
targets = st.sampled_from(TARGETS)


def tokens(path: Path) -> list[int]:
    return [content + 10 for content in path for _ in range(BLOCK)]


def hashes(path: Path) -> list[int]:
    """Our hashes of every block on a path."""
    return list(block_hashes(tokens(path), BLOCK))


class Dialect:
    """How a target names its blocks: with our hashes, or with opaque ones of some kind."""

    def __init__(self, kind: str, target: Target) -> None:
        self.kind = kind
        self.target = target
        self.counted: dict[tuple[Path, int], int] = {}

    def name(self, path: Path, variant: int) -> int:
        if self.kind == "own":
            return hashes(path)[-1]
        if self.kind == "counted":  # small numbers: other targets use the same ones for other blocks
            return self.counted.setdefault((path, variant), len(self.counted) + 1)
        salt = str(self.target) if self.kind == "private" else "all"
        value = int.from_bytes(hashlib.sha256(f"{salt}{path}{variant}".encode()).digest()[:8], "big")
        return value - (1 << 64) if self.kind == "signed" and value >> 63 else value


class World:
    """Engines that store, evict out of order, announce twice, clear, leave and rejoin; the index hears of it."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.index = ExactIndex(BLOCK, audit_every=3)
        self.oracle = RadixOracle()
        self.dialects = {target: Dialect(kind, target) for target, kind in zip(TARGETS, kinds, strict=True)}
        self.names: dict[Target, dict[tuple[Tier, Path], set[int]]] = {target: {} for target in TARGETS}
        """What a target holds, and under which names it announced it."""
        for target in TARGETS:
            self.join(target)

    def join(self, target: Target) -> None:
        kind = self.dialects[target].kind
        if kind in ("shared", "signed"):
            self.index.join(target, native=False, alike="sha256")
        elif kind == "own":
            self.index.join(target, native=True)

    def store(self, on: Target, path: Path, shared: int, variant: int, tier: Tier) -> None:
        """Store the blocks of a path behind its first ``shared`` ones."""
        shared = min(shared, len(path) - 1)
        dialect = self.dialects[on]
        parent = path[:shared]
        own = dialect.kind == "own"
        names = [dialect.name(path[: i + 1], variant) for i in range(shared, len(path))]
        parent_names = [name for tier in TIERS for name in sorted(self.names[on].get((tier, parent), ()))]
        known = own or not parent or bool(parent_names)
        parent_name = None if not parent else parent_names[0] if parent_names else dialect.name(parent, 5)
        before = self.index.counters.parents_unknown
        event = KvStored(
            hashes=names,
            parent=parent_name,
            tokens=[] if own else tokens(path)[shared * BLOCK :],
            block_size=BLOCK,
            tier=tier,
        )
        # Without its words, as a live router hears it, an event says the same.
        self.index.apply(on, event if len(path) % 2 else wordless(event, native=own, block_size=BLOCK))
        missed = self.index.counters.parents_unknown - before
        if tier != "device" and not known:  # a lower tier's blocks are also known by their names
            known = not missed
        assert missed == (0 if known else 1)
        if known:
            for i, name in zip(range(shared, len(path)), names, strict=True):
                self.oracle.store(on, path[: i + 1], tier)
                self.names[on].setdefault((tier, path[: i + 1]), set()).add(name)

    def held(self, on: Target, tier: Tier) -> list[Path]:
        return sorted(path for (t, path) in self.names[on] if t == tier)

    def remove(self, on: Target, paths: Sequence[Path], tier: Tier) -> None:
        """Remove blocks; one that was announced under two names goes by both."""
        names = [name for path in paths for name in sorted(self.names[on].pop((tier, path)))]
        self.index.apply(on, KvRemoved(hashes=names, tier=tier))
        for path in paths:
            self.oracle.remove(on, path, tier)

    def copy_down(self, on: Target, path: Path, tier: Tier) -> None:
        """Copy what a target holds of a path to a lower tier, without saying the tokens."""
        if self.dialects[on].kind == "own":
            return
        held = {block: min(names) for (_, block), names in self.names[on].items()}
        blocks = [path[: i + 1] for i in range(len(path)) if path[: i + 1] in held]
        if not blocks:
            return
        self.index.apply(on, KvStored(hashes=[held[b] for b in blocks], block_size=BLOCK, tier=tier))
        for block in blocks:
            self.oracle.store(on, block, tier)
            self.names[on].setdefault((tier, block), set()).add(held[block])

    def forget(self, on: Target, leaves: bool) -> None:
        if leaves:
            self.index.remove(on)
            self.join(on)
        else:
            self.index.apply(on, KvCleared())
        self.oracle.clear(on)
        self.names[on] = {}

    def clear_tier(self, on: Target, tier: Tier) -> None:
        self.index.apply(on, KvCleared(tier=tier))
        for path in self.held(on, tier):
            del self.names[on][tier, path]
            self.oracle.remove(on, path, tier)

    def reload(self) -> None:
        saved = written(self.index)
        self.index = ExactIndex(BLOCK, audit_every=3)
        self.index.restore(saved)
        assert written(self.index) == saved

    def dump(self, on: Target) -> None:
        """Go on with an index that was told at one time what all targets hold: it must be as good."""
        before, self.index = self.index, ExactIndex(BLOCK, audit_every=3)
        for target in TARGETS:
            self.join(target)
            sent = msgspec.msgpack.encode(list(before.dump(target)))
            for event in msgspec.msgpack.decode(sent, type=list[KvEvent]):
                self.index.apply(target, event)
        self.index.check()
        expected = {(tier, hashes(path)[-1]) for tier, path in self.oracle.held(on)}
        assert held(self.index, on) == held(before, on) == expected

    def find(self, path: Path, wanted: set[Target] | None = None) -> None:
        expected = self.oracle.overlap(path, TARGETS if wanted is None else sorted(wanted))
        found = self.index.overlap(hashes(path), targets=wanted)
        assert dict(found) == expected
        place = {target: at for at, target in enumerate(reversed(TARGETS))}
        if wanted is not None:
            return
        device, lower = self.index.columns(hashes(path), place)
        rows = zip(device, *(lower or [[0] * len(place)] * 2), strict=True)
        assert list(rows) == [expected.get(target, HeldBlocks())[:3] for target in place]

    def agrees(self) -> None:
        self.index.check()
        assert len(self.index) == self.oracle.pairs()
        for target in TARGETS:
            assert self.index.resident(target) == len(
                [tier for tier, _ in self.oracle.held(target) if tier == "device"]
            )
        assert self.index.counters.audit_disagreements == 0

    def end(self) -> None:
        """Every path is answered as the oracle does, and nothing is left once all are gone."""
        for path, _ in list(self.oracle.nodes()):
            if path:
                self.find(path)
                assert self.index.audit(hashes(path))
        for target in TARGETS:
            self.dump(target)
        for target in TARGETS:
            self.index.remove(target)
        for _ in range(2000):
            if self.index.sweep(3):
                break
        self.index.check()
        assert self.index.blocks == 0, "what nobody holds is given back"


class IndexMachine(RuleBasedStateMachine):
    """Any sequence of what engines do, beside the radix tree."""

    @initialize(kinds=st.lists(st.sampled_from(KINDS), min_size=len(TARGETS), max_size=len(TARGETS)))
    def begin(self, kinds: list[str]) -> None:
        self.world = World(kinds)

    @rule(
        on=targets,
        path=paths,
        shared=st.integers(0, 6),
        variant=st.sampled_from([0, 0, 0, 1]),
        tier=st.sampled_from(["device", "device", *TIERS]),
    )
    def store(self, on: Target, path: Path, shared: int, variant: int, tier: Tier) -> None:
        self.world.store(on, path, shared, variant, tier)

    @rule(on=targets, data=st.data(), tier=st.sampled_from(TIERS), backwards=st.booleans())
    def remove(self, on: Target, data: st.DataObject, tier: Tier, backwards: bool) -> None:
        held_now = self.world.held(on, tier)
        if held_now:
            chosen = data.draw(st.lists(st.sampled_from(held_now), min_size=1, max_size=6, unique=True))
            self.world.remove(on, sorted(chosen, key=len, reverse=backwards), tier)

    @rule(on=targets, path=paths, tier=st.sampled_from(["host", "disk"]))
    def copy_down(self, on: Target, path: Path, tier: Tier) -> None:
        self.world.copy_down(on, path, tier)

    @rule(on=targets, what=st.sampled_from(["clear", "leave", "reload", "dump", "sweep"]))
    def rarely(self, on: Target, what: str) -> None:
        if what in ("clear", "leave"):
            self.world.forget(on, leaves=what == "leave")
        elif what == "reload":
            self.world.reload()
        elif what == "dump":
            self.world.dump(on)
        else:
            self.world.index.sweep(3)

    @rule(on=targets, tier=st.sampled_from(TIERS))
    def clear_tier(self, on: Target, tier: Tier) -> None:
        self.world.clear_tier(on, tier)

    @rule(path=paths, wanted=st.none() | st.sets(targets))
    def find(self, path: Path, wanted: set[Target] | None) -> None:
        self.world.find(path, wanted)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "world"):
            self.world.agrees()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=deep(60), stateful_step_count=40)


@pytest.mark.parametrize("seed", range(deep(60)))
def test_a_long_random_history_agrees_with_the_radix_tree(seed: int) -> None:
    """Histories that hypothesis is too patient for: some hundred events each, mostly on known prefixes."""
    rng = random.Random(seed)
    world = World([rng.choice(KINDS) for _ in TARGETS])
    for _ in range(150):
        on, kind = rng.choice(TARGETS), rng.random()
        path = tuple(rng.choice((0, 0, 0, 1, 2)) for _ in range(rng.randint(1, 9)))
        tier: Tier = rng.choice(("device", "device", "device", "host", "disk"))
        held_now = world.held(on, tier)
        if kind < 0.25:
            world.store(on, path, 0, rng.choice((0, 0, 0, 1)), tier)
        elif kind < 0.5 and held_now:
            start = rng.choice(held_now)
            world.store(on, (start + path)[:12], len(start), rng.choice((0, 0, 0, 1)), tier)
        elif kind < 0.55:
            world.store(on, path, rng.randint(0, 8), 0, tier)
        elif kind < 0.8 and held_now:
            chosen = sorted(rng.sample(held_now, min(len(held_now), rng.randint(1, 5))), key=len)
            if rng.random() < 0.6:  # a whole path from its end, as engines mostly do
                leaf = rng.choice(held_now)
                chosen = [leaf[:i] for i in range(1, len(leaf) + 1) if leaf[:i] in held_now][-rng.randint(1, 9) :]
            world.remove(on, chosen[:: rng.choice((1, -1, -1))], tier)
        elif kind < 0.85:
            world.copy_down(on, path, rng.choice(("host", "disk")))
        elif kind < 0.87:
            world.forget(on, leaves=rng.random() < 0.5)
        elif kind < 0.875:
            world.reload()
        elif kind < 0.88:
            world.dump(on)
        elif kind < 0.9:
            world.index.sweep(rng.randint(1, 5))
        else:
            world.find(path)
        world.agrees()
    world.end()


def held(index: ExactIndex, target: Target) -> set[tuple[Tier, int]]:
    return {(event.tier, block) for event in index.dump(target) for block in event.blocks or event.hashes}


# --- situations -----------------------------------------------------------------------------------------------------

A, RANK, B, C = TARGETS


def own(path: Path, first: int = 0, tier: Tier = "device") -> KvStored:
    """A stored event with our hashes for the blocks of a path from ``first`` on."""
    every = hashes(path)
    return KvStored(hashes=every[first:], parent=every[first - 1] if first else None, block_size=BLOCK, tier=tier)


def depths(index: ExactIndex, path: Path) -> dict[Target, int]:
    return {target: held.device for target, held in index.overlap(hashes(path)).items()}


def chained(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(64) for _ in range(count)]


def test_a_hole_ends_the_match_until_it_is_filled_again() -> None:
    index = ExactIndex(BLOCK)
    path = (0, 1, 2, 0, 1)
    index.apply(A, own(path))
    index.apply(B, own(path))
    index.apply(A, KvRemoved(hashes=[hashes(path)[1]]))
    assert depths(index, path) == {A: 1, B: 5}
    assert index.counters.holes == 1
    index.apply(A, own(path[:2], 1))
    assert depths(index, path) == {A: 5, B: 5}


def test_ranks_of_a_worker_are_told_apart() -> None:
    index = ExactIndex(BLOCK)
    index.apply(A, own((0, 1)))
    index.apply(RANK, own((0,)))
    assert depths(index, (0, 1)) == {A: 2, RANK: 1}


def test_events_of_another_block_size_are_refused_and_counted() -> None:
    index = ExactIndex(BLOCK)
    index.apply(A, KvStored(hashes=[1], tokens=[1, 2, 3, 4], block_size=4))
    assert len(index) == 0 and index.counters.refused_block_size == 1
    # The child of a refused block can't be placed either.
    index.apply(A, KvStored(hashes=[2], parent=1, tokens=[1, 2], block_size=BLOCK))
    assert len(index) == 0 and index.counters.parents_unknown == 1


@pytest.mark.parametrize(
    "event",
    [
        KvStored(hashes=[1, 2], tokens=[1, 2], block_size=BLOCK),
        KvStored(hashes=[1], tokens=[1, -2], block_size=BLOCK),
        KvStored(hashes=[1], tokens=[1, 1 << 32], block_size=BLOCK),
        KvStored(hashes=[1], tokens=[1, 2], extras=[b"", b""], block_size=BLOCK),
    ],
)
@pytest.mark.parametrize("spoken", [True, False])
def test_malformed_events_change_nothing(event: KvStored, spoken: bool) -> None:
    index = ExactIndex(BLOCK)
    index.apply(A, event if spoken else wordless(event, native=False, block_size=BLOCK))
    index.check()
    assert len(index) == 0 and index.counters.malformed == 1


@pytest.mark.parametrize("spoken", [True, False])
def test_extras_are_part_of_a_block(spoken: bool) -> None:
    index = ExactIndex(BLOCK)
    salted = block_hashes([1, 2, 3, 4], BLOCK, lora="l", salt="s")
    extras = [b"\x01\x01\0\0\0l\x02\x01\0\0\0s", b"\x01\x01\0\0\0l"]
    event: KvEvent = KvStored(hashes=[7, 8], tokens=[1, 2, 3, 4], extras=extras, block_size=BLOCK)
    if not spoken:
        event = wordless(event, native=False, block_size=BLOCK)
        assert isinstance(event, KvStored) and not event.tokens and event.extras is None
    index.apply(A, event)
    assert dict(index.overlap(salted)) == {A: HeldBlocks(2)}
    assert not index.overlap(block_hashes([1, 2, 3, 4], BLOCK))


def test_the_oldest_go_when_the_bound_is_reached_and_are_counted() -> None:
    index = ExactIndex(BLOCK, blocks_max=100)
    old, new = chained(60, 1), chained(60, 2)
    index.apply(A, KvStored(hashes=old, block_size=BLOCK), own=True)
    index.apply(B, KvStored(hashes=new, block_size=BLOCK), own=True)
    assert len(index) == 60 and index.counters.evicted == 60
    assert dict(index.overlap(new)) == {B: HeldBlocks(60)} and not index.overlap(old)
    index.apply(A, KvRemoved(hashes=old))
    assert index.counters.removed_unknown == 60
    index.check()


def test_a_prefix_in_use_outlives_what_hangs_below_it() -> None:
    index = ExactIndex(BLOCK, blocks_max=200)
    system = chained(50)
    index.apply(A, KvStored(hashes=system, block_size=BLOCK), own=True)
    for turn in range(1, 30):
        event = KvStored(hashes=chained(40, turn), parent=system[-1], block_size=BLOCK)
        index.apply([A, B][turn % 2], event, own=True)
        index.check()
    assert index.overlap(system)[A] == HeldBlocks(50)


@given(st.lists(st.tuples(targets, paths, st.booleans()), max_size=60), st.integers(1, 30))
def test_a_bounded_index_never_claims_too_much(events: list[tuple[Target, Path, bool]], most: int) -> None:
    index, oracle = ExactIndex(BLOCK, blocks_max=most), RadixOracle()
    for on, path, stored in events:
        if stored:
            index.apply(on, own(path))
            for i in range(len(path)):
                oracle.store(on, path[: i + 1])
        else:
            index.apply(on, KvRemoved(hashes=hashes(path)[-1:]))
            oracle.remove(on, path)
        index.check()
        assert len(index) <= most
        for target in TARGETS:
            assert held(index, target) <= {(tier, hashes(p)[-1]) for tier, p in oracle.held(target)}


def test_a_target_that_left_is_forgotten_at_once_and_its_bit_used_again_only_when_clean() -> None:
    index = ExactIndex(BLOCK)
    blocks = chained(5 * SPAN_MAX)
    for first in range(0, len(blocks), 100):
        parent = blocks[first - 1] if first else None
        index.apply(A, KvStored(hashes=blocks[first : first + 100], parent=parent, block_size=BLOCK), own=True)
    assert index.overlap(blocks)[A] == HeldBlocks(len(blocks))
    index.remove(A)
    assert len(index) == 0 and not index.overlap(blocks)
    index.apply(B, own((0,)))
    assert not index.overlap(blocks), "B must not inherit what A's bit still marks"
    steps = 0
    while not index.sweep(64):
        steps += 1
        index.check()
    assert len(blocks) / 64 <= steps <= 3 * len(blocks) / 64
    assert index.blocks == 1


def test_clearing_often_needs_no_more_bits() -> None:
    index = ExactIndex(BLOCK)
    for turn in range(500):
        index.apply(A, own((turn % 3, 1, 2)))
        index.apply(B, own((turn % 3, 1)))
        index.apply(A, KvCleared())
    assert len(index.overlap([])) == 0
    assert len(index.snapshot().slots.pairs) < 40


def test_hashes_that_agree_in_the_maps_key_are_not_mixed_up() -> None:
    index = ExactIndex(BLOCK)
    block, twin = 5, 5 | (KEY + 1)
    index.apply(A, KvStored(hashes=[block], block_size=BLOCK), own=True)
    index.apply(B, KvStored(hashes=[twin, 9], block_size=BLOCK), own=True)
    assert index.counters.collisions == 1
    assert dict(index.overlap([block])) == {A: HeldBlocks(1)} and not index.overlap([twin])
    index.apply(B, KvRemoved(hashes=[twin]))
    assert dict(index.overlap([block])) == {A: HeldBlocks(1)}


def test_an_event_that_names_a_block_twice_is_harmless() -> None:
    index = ExactIndex(BLOCK)
    index.apply(A, KvStored(hashes=[1, 2, 1, 3], block_size=BLOCK), own=True)
    index.check()
    index.apply(A, KvStored(hashes=[4, 2, 4], parent=3, block_size=BLOCK), own=True)
    index.check()
    index.apply(A, KvRemoved(hashes=[1, 2, 3, 4]))
    index.check()
    assert len(index) == 0


def test_an_old_name_for_a_new_block_gives_the_old_block_up() -> None:
    index = ExactIndex(BLOCK)
    for on in (A, B):  # on B the name stands for another block from the start
        index.apply(on, KvStored(hashes=[7], tokens=tokens((0,)), block_size=BLOCK))
        index.apply(on, KvStored(hashes=[7], tokens=tokens((1,)), block_size=BLOCK))
        assert on not in index.overlap(hashes((0,))) and on in index.overlap(hashes((1,)))
        index.apply(on, KvRemoved(hashes=[7]))
        assert on not in index.overlap(hashes((1,)))
    index.check()


def test_the_same_name_means_another_block_on_another_target() -> None:
    index = ExactIndex(BLOCK)
    index.apply(A, KvStored(hashes=[1, 2], tokens=tokens((0, 1)), block_size=BLOCK))
    index.apply(B, KvStored(hashes=[1, 2], tokens=tokens((1, 1)), block_size=BLOCK))
    index.apply(B, KvStored(hashes=[3], parent=2, tokens=tokens((0,)), block_size=BLOCK))
    index.apply(A, KvRemoved(hashes=[2]))
    assert depths(index, (0, 1)) == {A: 1} and depths(index, (1, 1, 0)) == {B: 3}
    assert index.counters.aliases == 0


def test_targets_that_hash_alike_share_names() -> None:
    index = ExactIndex(BLOCK)
    for target, alike in ((A, "x"), (B, "x"), (C, None)):
        index.join(target, native=False, alike=alike)
        index.apply(target, KvStored(hashes=[-1, 2], tokens=tokens((0, 1)), block_size=BLOCK))
    assert index.counters.aliases == 2, "C's"
    for target in (A, B, C):
        index.apply(target, KvRemoved(hashes=[2, (1 << 64) - 1]))
        assert target not in index.overlap(hashes((0, 1)))
    index.check()


def test_aliases_are_bounded_and_give_up_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "ALIASES_MAX", 3)
    index = ExactIndex(BLOCK)
    for content in range(5):
        index.apply(A, KvStored(hashes=[content], tokens=tokens((content,)), block_size=BLOCK))
        index.apply(B, KvStored(hashes=[content], tokens=tokens((content,)), block_size=BLOCK))
    assert index.resident(A) == 5 and index.resident(B) == 3
    index.check()


def test_a_quick_answer_that_is_wrong_is_counted_and_replaced() -> None:
    index = ExactIndex(BLOCK, audit_every=1)
    index.apply(A, own((0, 1, 2)))
    path = hashes((0, 1, 2))
    span = index._device.spans[0]
    assert span is not None
    span.hashes[1] = 99  # break the shape: the ends still match
    assert dict(index.overlap(path)) == {A: HeldBlocks(1)}
    assert (index.counters.audits, index.counters.audit_disagreements) == (1, 1)
    assert not index.audit(path)


def test_a_block_inside_a_stretch_of_another_is_found_whatever_is_known_of_its_parent() -> None:
    path = (0, 1, 2, 0, 1, 2)
    for first in range(1, 5):
        index = ExactIndex(BLOCK)
        index.apply(A, own(path))
        index.apply(
            B, KvStored(hashes=hashes(path)[first : first + 1], parent=hashes(path)[first - 1], block_size=BLOCK)
        )
        index.check()
        index.apply(B, own(path[:first]))
        assert depths(index, path) == {A: 6, B: first + 1}


def test_unknown_removals_file_what_they_search_and_change_nothing() -> None:
    index = ExactIndex(BLOCK)
    for turn in range(100):
        index.apply(A, KvStored(hashes=chained(20, turn), block_size=BLOCK))
    index.apply(A, KvRemoved(hashes=chained(50, 1000)))
    index.check()
    assert index.resident(A) == 2000 and index.counters.removed_unknown == 50
    index.apply(A, KvRemoved(hashes=[chained(20, turn)[10] for turn in range(100)]))
    index.check()
    assert index.resident(A) == 1900
    assert all(dict(index.overlap(chained(20, turn))) == {A: HeldBlocks(10)} for turn in range(100))


def test_long_chains_grown_block_by_block_are_found_at_every_depth() -> None:
    index = ExactIndex(BLOCK)
    blocks = chained(3 * SPAN_MAX)
    for i, block in enumerate(blocks):
        index.apply(A, KvStored(hashes=[block], parent=blocks[i - 1] if i else None, block_size=BLOCK), own=True)
    index.apply(B, KvStored(hashes=blocks[:1000], block_size=BLOCK), own=True)
    other = chained(1, 9)
    for depth in (1, 7, 999, 1000, 1001, SPAN_MAX, SPAN_MAX + 1, len(blocks)):
        found = {target: held.device for target, held in index.overlap(blocks[:depth] + other).items()}
        assert found == {A: depth, B: min(depth, 1000)}
    assert sum(1 for _ in index.dump(A)) <= 5
    for i in range(len(blocks) - 1, -1, -1):
        index.apply(A, KvRemoved(hashes=[blocks[i]]))
    assert index.resident(A) == 0 and index.resident(B) == 1000
    assert sum(1 for _ in index.dump(B)) <= 3, "one removal after the other leaves no crumbs"
    index.check()
