"""The exact index beside its naive twin, driven by random event streams."""

import hashlib
import json
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.kernel.hashing import block_hashes
from penstock.kernel.values import TIERS, KvCleared, KvRemoved, KvStored, Target, Tier, WorkerId
from penstock.router.index import ExactIndex
from tests.router.radix_oracle import Path, RadixOracle

BLOCK = 2
TARGETS = [Target(WorkerId("a")), Target(WorkerId("a"), 1), Target(WorkerId("b")), Target(WorkerId("c"))]

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


class IndexMachine(RuleBasedStateMachine):
    """Random engines that evict out of order, announce twice, clear, leave, rejoin and copy to lower tiers."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ExactIndex(BLOCK, audit_every=3)
        self.oracle = RadixOracle()
        self.dialects: dict[Target, Dialect] = {}
        self.names: dict[Target, dict[tuple[Tier, Path], set[int]]] = {target: {} for target in TARGETS}
        """What a target holds, and under which names it announced it."""

    @initialize(
        kinds=st.lists(st.sampled_from(["own", "shared", "signed", "private", "counted"]), min_size=4, max_size=4)
    )
    def speak(self, kinds: list[str]) -> None:
        self.dialects = {target: Dialect(kind, target) for target, kind in zip(TARGETS, kinds, strict=True)}

    @rule(
        on=targets,
        path=paths,
        shared=st.integers(0, 6),
        variant=st.sampled_from([0, 0, 0, 1]),
        tier=st.sampled_from(TIERS),
    )
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
        self.index.apply(
            on,
            KvStored(
                hashes=names,
                parent=parent_name,
                tokens=[] if own else tokens(path)[shared * BLOCK :],
                block_size=BLOCK,
                tier=tier,
            ),
        )
        assert self.index.counters.parents_unknown - before == (0 if known else 1)
        if known:
            for i, name in zip(range(shared, len(path)), names, strict=True):
                self.oracle.store(on, path[: i + 1], tier)
                self.names[on].setdefault((tier, path[: i + 1]), set()).add(name)

    @rule(on=targets, data=st.data(), tier=st.sampled_from(TIERS), backwards=st.booleans())
    def remove(self, on: Target, data: st.DataObject, tier: Tier, backwards: bool) -> None:
        """Remove some blocks, in any order; a block that was announced under two names goes by both."""
        held = sorted(path for (t, path) in self.names[on] if t == tier)
        if not held:
            return
        chosen = data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=6, unique=True))
        chosen.sort(key=len, reverse=backwards)
        names = [name for path in chosen for name in sorted(self.names[on].pop((tier, path)))]
        self.index.apply(on, KvRemoved(hashes=names, tier=tier))
        for path in chosen:
            self.oracle.remove(on, path, tier)

    @rule(on=targets, path=paths, tier=st.sampled_from(["host", "disk"]))
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

    @rule(on=targets)
    def clear(self, on: Target) -> None:
        self.index.apply(on, KvCleared())
        self.forget(on)

    @rule(on=targets)
    def leave(self, on: Target) -> None:
        self.index.remove(on)
        self.forget(on)

    @precondition(lambda self: len(self.index) > 0)
    @rule(step=st.integers(1, 5))
    def sweep(self, step: int) -> None:
        self.index.sweep(step)

    @rule()
    def reload(self) -> None:
        saved = self.index.snapshot()
        self.index = ExactIndex(BLOCK, audit_every=3)
        self.index.restore(saved)
        assert self.index.snapshot() == saved

    @rule(on=targets)
    def dump(self, on: Target) -> None:
        fresh = ExactIndex(BLOCK)
        for event in self.index.dump(on):
            fresh.apply(on, event, own=True)
        assert (
            held(fresh, on) == held(self.index, on) == {(tier, hashes(path)[-1]) for tier, path in self.oracle.held(on)}
        )

    @rule(path=paths, wanted=st.none() | st.sets(targets))
    def find(self, path: Path, wanted: set[Target] | None) -> None:
        expected = self.oracle.overlap(path, TARGETS if wanted is None else sorted(wanted))
        assert dict(self.index.overlap(hashes(path), targets=wanted)) == expected

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert len(self.index) == self.oracle.pairs()
        assert self.index.counters.audit_disagreements == 0

    def teardown(self) -> None:
        for path, _ in list(self.oracle.nodes()):
            if path:
                assert dict(self.index.overlap(hashes(path))) == self.oracle.overlap(path, TARGETS)
                assert self.index.audit(hashes(path))
        for _ in range(200):
            if self.index.sweep():
                break
        for target in TARGETS:
            self.index.remove(target)
        for _ in range(2000):
            if self.index.sweep(3):
                break
        self.index.check()
        assert self.index.blocks == 0, "what nobody holds is given back"

    def forget(self, target: Target) -> None:
        self.oracle.clear(target)
        self.names[target] = {}


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40)


def held(index: ExactIndex, target: Target) -> set[tuple[Tier, int]]:
    return {(event.tier, block) for event in index.dump(target) for block in event.hashes}
