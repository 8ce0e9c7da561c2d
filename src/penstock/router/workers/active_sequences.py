"""Active sequences: each worker's load by the requests that routers placed, not by what engines report later.

A request's prefill tokens count until its first output token, its blocks until it ends; a block that several
requests of one worker share counts once. Requests that other routers placed count alike and expire when silent.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Nanos
from penstock.kernel.values import RequestId, Target
from penstock.router.kv_index.indexer import Column, column_of
from penstock.router.workers.active import Active, ActiveState


class TargetLoad:
    """One target's load: tokens still to prefill, requests, distinct blocks in use.

    Hashes are chained, so a user of a block uses all before it. What is in use is closed under prefixes, and along a
    chain the number of users never rises: both ends of what is shared are found by bisection.
    """

    __slots__ = ("_more", "_used", "prefill_tokens", "requests", "unhashed_blocks")

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.requests = 0
        self._used: set[int] = set()
        """Chained hashes of the blocks that running requests use."""
        self._more: dict[int, int] = {}
        """Users beyond the first, of blocks that have several."""
        self.unhashed_blocks = 0
        """Blocks without a hash: partial prompt tails and generated ones."""

    @staticmethod
    def chain(names: Sequence[int]) -> Sequence[int]:
        """Return the blocks of a prompt in the form that this takes."""
        return names

    @staticmethod
    def users_of_blocks() -> "PrefixUsers":
        """Return an empty record of which targets use which blocks, in the form that this takes."""
        return BlockUsers()

    @property
    def blocks(self) -> int:
        return len(self._used) + self.unhashed_blocks

    def blocks_with(self, blocks: Sequence[int], unhashed_blocks: int) -> int:
        """Count the blocks in use after adding a request, shared ones once. Cost: O(log n)."""
        return len(self._used) + self.unhashed_blocks + len(blocks) + unhashed_blocks - depth_of(blocks, self._used)

    def shared(self, blocks: Sequence[int]) -> int:
        """Count the leading blocks of a chain that are in use already."""
        return depth_of(blocks, self._used)

    def use(self, blocks: Sequence[int]) -> None:
        """Count one more user of a chain of blocks."""
        shared, more = depth_of(blocks, self._used) if self._used else 0, self._more
        for block in blocks[:shared]:
            more[block] = more.get(block, 0) + 1
        self._used.update(blocks[shared:] if shared else blocks)

    def leave(self, blocks: Sequence[int]) -> None:
        """Remove one user of a chain of blocks."""
        more = self._more
        shared = depth_of(blocks, more) if more else 0
        for block in blocks[:shared]:
            count = more[block] - 1
            if count:
                more[block] = count
            else:
                del more[block]
        self._used.difference_update(blocks[shared:] if shared else blocks)

    def users(self) -> dict[int, int]:
        """Return the number of users of each block. Cost: walks all."""
        return {block: 1 + self._more.get(block, 0) for block in self._used}


class PrefixUsers(Protocol):
    """Which targets have which blocks in use, for the columns of many targets."""

    def used(self, target: Target, blocks: Any, load: Any) -> None:
        """A target's load has one user more of a chain of blocks..."""
        ...

    def left(self, target: Target, blocks: Any, load: Any) -> None:
        """... or one less."""
        ...

    def shared(self, blocks: Any, place: Mapping[Target, int], loads: Mapping[Target, Any]) -> Column | int:
        """Return how many leading blocks of a chain each target has in use, shape (targets,); 0 where none has any."""
        ...


_Users = dict[int | None, dict[Target, int]]


class BlockUsers:
    """The targets by the first two blocks of the prompts that they run, and how many requests each has of those.

    Who has not the first of a prompt in use has nothing of it, and who has not the second has one block.
    """

    def __init__(self) -> None:
        self._heads: _Users = {}
        self._seconds: _Users = {}
        self._ones: dict[int | None, tuple[Mapping[Target, int], Column]] = {}
        """First block -> a column with a 1 for each of its targets, by the places that were asked for last: thousands
        of prompts may begin alike."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockUsers) and (self._heads, self._seconds) == (other._heads, other._seconds)

    def used(self, target: Target, blocks: Sequence[int], load: TargetLoad) -> None:
        head = blocks[0] if blocks else None
        self._entered(head, target, _count(self._heads, head, target, 1))
        if len(blocks) > 1:
            _count(self._seconds, blocks[1], target, 1)

    def left(self, target: Target, blocks: Sequence[int], load: TargetLoad) -> None:
        head = blocks[0] if blocks else None
        self._entered(head, target, _count(self._heads, head, target, -1))
        if len(blocks) > 1:
            _count(self._seconds, blocks[1], target, -1)

    def _entered(self, head: int | None, target: Target, count: int) -> None:
        if (known := self._ones.get(head)) is None:
            return
        if head not in self._heads:
            del self._ones[head]
        elif count < 2 and (at := known[0].get(target)) is not None:
            known[1][at] = count

    def shared(
        self, blocks: Sequence[int], place: Mapping[Target, int], loads: Mapping[Target, TargetLoad]
    ) -> Column | int:
        users = self._heads.get(blocks[0]) if blocks else None  # without blocks nothing is shared
        if users is None:
            return 0
        known = self._ones.get(blocks[0])
        if known is None or known[0] is not place:
            known = self._ones[blocks[0]] = place, column_of(dict.fromkeys(users, 1), place)
        column = known[1].copy()
        for target in self._seconds.get(blocks[1], ()) if len(blocks) > 1 else ():
            if (at := place.get(target)) is not None:
                column[at] = loads[target].shared(blocks)
        return column


def _count(users: _Users, block: int | None, target: Target, change: int) -> int:
    """Count one request of a target more or less; return how many it has."""
    of_block = users.setdefault(block, {})
    count = of_block[target] = of_block.get(target, 0) + change
    if not count:
        del of_block[target]
        if not of_block:
            del users[block]
    return count


class LoadColumns:
    """The loads of many targets as columns of numbers, in the order of the targets.

    Args:
        targets: each with anything behind it.
    """

    __slots__ = ("numbers", "place", "stale", "targets")

    def __init__(self, targets: Sequence[tuple[Target, Any]]) -> None:
        self.targets = targets
        self.place = {target: place for place, (target, _) in enumerate(targets)}
        self.numbers: npt.NDArray[np.int64] = np.zeros((3, len(targets)), dtype=np.int64)
        """Rows: tokens still to prefill, requests, blocks in use."""
        self.stale = set(self.place)
        """Targets whose load has changed since it was written here."""


class ActiveSequences:
    """The requests in flight of one model and the load that they make.

    Args:
        kind: how a target's blocks in use are counted.
    """

    def __init__(self, kind: type[TargetLoad] = TargetLoad) -> None:
        self._kind = kind
        self.expired = 0
        self.sweeping = False
        """Whether a sweep for silent requests of other routers is scheduled."""
        self._requests: dict[tuple[str, RequestId], Active] = {}
        self._loads: dict[Target, TargetLoad] = {}
        self._columns: dict[str, LoadColumns] = {}
        self._users: PrefixUsers | None = None
        """Which targets use which blocks, from the first question about many targets on."""

    def __len__(self) -> int:
        return len(self._requests)

    def own(self, owner: str = "") -> set[RequestId]:
        """Return the requests that this router placed, or what stands under another name of its own."""
        return {request for router, request in self._requests if router == owner}

    def runs(self, request: RequestId, owner: str = "") -> bool:
        """Return whether a request that a router placed has not ended."""
        return (owner, request) in self._requests

    def load(self, target: Target) -> TargetLoad:
        """Return a target's load; an unused target has an empty one."""
        found = self._loads.get(target)
        return _IDLE if found is None else found

    def columns(self, name: str, targets: Sequence[tuple[Target, Any]]) -> LoadColumns:
        """Return the present loads of targets in columns, which are kept under a name for the next call.

        Cost: constant for each load that changed in between, where the targets are the same.
        """
        found = self._columns.get(name)
        if found is None or (found.targets is not targets and found.targets != targets):
            found = self._columns[name] = LoadColumns(targets)
        for target in found.stale:
            place = found.place.get(target)
            if place is not None:
                load = self.load(target)
                found.numbers[:, place] = load.prefill_tokens, load.requests, load.blocks
        found.stale.clear()
        return found

    def shared(self, columns: LoadColumns, blocks: Sequence[int]) -> Column | int:
        """Return how many leading blocks of a prompt each target has in use; 0 where none has any.

        Cost: O(targets that use the first block); of runs, see `penstock_lab.runs.run_reach`.
        """
        if self._users is None:
            self._users = self._count_users()
        return self._users.shared(blocks, columns.place, self._loads)

    def _count_users(self) -> PrefixUsers:
        users = self._kind.users_of_blocks()
        for active in self._requests.values():
            users.used(active.target, active.blocks, self._loads[active.target])
        return users

    def _changed(self, target: Target) -> None:
        for columns in self._columns.values():
            columns.stale.add(target)

    def __iter__(self) -> Iterator[Active]:
        """Yield all requests in the order in which they were placed."""
        return iter(self._requests.values())

    def loads(self) -> Mapping[Target, TargetLoad]:
        return self._loads

    def place(
        self,
        request: RequestId,
        target: Target,
        *,
        prefill_tokens: int,
        blocks: Sequence[int],
        unhashed_blocks: int,
        now: Nanos,
        router: str = "",
        osl_blocks: int = 0,
    ) -> None:
        """Count a request on a target; one that was placed already moves."""
        if (router, request) in self._requests:
            self.end(request, router)
        self._requests[router, request] = Active(
            target, prefill_tokens, blocks, unhashed_blocks, now, router, osl_blocks=osl_blocks
        )
        load = self._loads.get(target)
        if load is None:
            load = self._loads[target] = self._kind()
        load.prefill_tokens += prefill_tokens
        load.requests += 1
        load.unhashed_blocks += unhashed_blocks
        load.use(blocks)
        if self._users is not None:
            self._users.used(target, blocks, load)
        if self._columns:
            self._changed(target)

    def first_token(self, request: RequestId, now: Nanos, router: str = "") -> None:
        """Its prefill is done."""
        active = self._requests.get((router, request))
        if active is not None:
            self._loads[active.target].prefill_tokens -= active.prefill_tokens
            active.prefill_tokens = 0
            active.touched = now
            if self._columns:
                self._changed(active.target)

    def grown(self, request: RequestId, output_blocks: int, now: Nanos, router: str = "") -> None:
        """Its output fills so many blocks by now."""
        active = self._requests.get((router, request))
        if active is not None:
            before, active.output_blocks = unhashed_blocks_of(active), output_blocks
            self._loads[active.target].unhashed_blocks += unhashed_blocks_of(active) - before
            active.touched = now
            if self._columns:
                self._changed(active.target)

    def end(self, request: RequestId, router: str = "") -> None:
        """It is over, however; unknown requests are no error (a peer's may have expired)."""
        active = self._requests.pop((router, request), None)
        if active is None:
            return
        load = self._loads[active.target]
        load.prefill_tokens -= active.prefill_tokens
        load.requests -= 1
        load.unhashed_blocks -= unhashed_blocks_of(active)
        load.leave(active.blocks)
        if self._users is not None:
            self._users.left(active.target, active.blocks, load)
        if load.requests == 0:
            del self._loads[active.target]
        if self._columns:
            self._changed(active.target)

    def expire(self, before: Nanos) -> int:
        """Drop the requests of other routers that have been silent since ``before``; return how many."""
        stale = [key for key, active in self._requests.items() if _foreign(key[0]) and active.touched < before]
        for router, request in stale:
            self.end(request, router)
        self.expired += len(stale)
        return len(stale)

    def longest_silent(self) -> Nanos | None:
        """Return when the other routers' most silent request was last updated. Cost: O(all in flight)."""
        return min((active.touched for key, active in self._requests.items() if _foreign(key[0])), default=None)

    def drop_router(self, router: str) -> None:
        """Another router is gone, and with it what it had placed."""
        for owner, request in [key for key in self._requests if key[0] == router]:
            self.end(request, owner)

    def snapshot(self) -> ActiveState:
        return ActiveState(self.expired, self.sweeping, self._requests)

    def restore(self, state: ActiveState) -> None:
        self._requests = {}
        self._loads.clear()
        self._columns.clear()
        self._users = None
        for (router, request), active in state.requests.items():
            self.place(
                request,
                active.target,
                prefill_tokens=active.prefill_tokens,
                blocks=self._kind.chain(active.blocks),
                unhashed_blocks=active.unhashed_blocks,
                now=active.touched,
                router=router,
                osl_blocks=active.osl_blocks,
            )
            self.grown(request, active.output_blocks, active.touched, router)
        self.expired, self.sweeping = state.expired, state.sweeping

    def check(self) -> None:
        """Recount every load from the requests."""
        for target, load in self._loads.items():
            mine = [a for a in self._requests.values() if a.target == target]
            wanted = (
                sum(a.prefill_tokens for a in mine),
                len(mine),
                sum(unhashed_blocks_of(a) for a in mine),
                Counter(block for a in mine for block in a.blocks),
            )
            kept = (load.prefill_tokens, load.requests, load.unhashed_blocks, Counter(load.users()))
            if wanted != kept:
                raise InvariantError(f"load of {target} is off: {wanted[:3]} by requests, kept {kept[:3]}")
        for name, columns in self._columns.items():
            loads = [self.load(target) for target in columns.place]
            rows = [(load.prefill_tokens, load.requests, load.blocks) for load in loads]
            if self.columns(name, columns.targets).numbers.T.tolist() != [list(row) for row in rows]:
                raise InvariantError(f"the columns of {name} are not the loads")
        if self._users is not None and self._users != self._count_users():
            raise InvariantError("the users of blocks are miscounted")


def depth_of(blocks: Sequence[int], among: Collection[int]) -> int:
    """Count the leading blocks that are among some.

    Hashes are chained, so a holder of a block has all before it: what is counted is found by bisection.

    Args:
        among: closed under prefixes: with a block it has all before it.
    Cost: O(log n).
    """
    low, high = 0, len(blocks) if among else 0
    while low < high:
        middle = (low + high) // 2
        if blocks[middle] in among:
            low = middle + 1
        else:
            high = middle
    return low


def unhashed_blocks_of(active: Active) -> int:
    """Return a request's own blocks that count as load: the nearer its expected end, the sooner they are free."""
    own = active.unhashed_blocks + active.output_blocks
    if not active.osl_blocks:
        return own
    return -(-own * max(0, active.osl_blocks - active.output_blocks) // active.osl_blocks)


def _foreign(owner: str) -> bool:
    """Tell whether another router placed it: names that begin with ~ are of this one's own."""
    return bool(owner) and not owner.startswith("~")


_IDLE = TargetLoad()
