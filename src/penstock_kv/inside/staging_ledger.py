"""`StagingLedger`: which rows of a staging region have which blocks, for an engine whose connector this is.

Blocks are loaded into rows before the engine is told that they are there. So a miss, a late answer and a tier process
that is gone cost a look-up, and the engine never waits for, or has to take back, blocks that did not come.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock_kv.inside.request_hints import TierParams
from penstock_kv.inside.tier_client import TierClient
from penstock_kv.inside.tier_protocol import AnswerBlocks, JobDone

STORE_SHARE = 2
"""One part in so many of the rows may be taken by stores: loads, which requests wait for, always find some."""


class RowCopy(NamedTuple):
    """A copy between a row and a block of the engine. ``hash``: of the block."""

    row: int
    block: int
    hash: bytes


class _Staged:
    """A request's blocks, from ``start`` on, as far as ``phase`` says: asked, loading, or there."""

    def __init__(self, start: int, hashes: list[bytes], params: TierParams) -> None:
        self.start = start
        self.hashes = hashes
        self.params = params
        self.phase = "asked"
        self.rows: list[int] = []
        self.ended = False


class _Offer(NamedTuple):
    """Blocks that the engine copies into rows in a step, in order and chained."""

    hashes: list[bytes]
    rows: list[int]
    parent: bytes | None
    params: TierParams


class StagingLedger:
    """Rows by use. One thread calls it, the engine's scheduler.

    Args:
        rows: of the region.
        stride: tokens of a block.
    """

    def __init__(self, client: TierClient, rows: int, stride: int) -> None:
        self._client = client
        self._stride = stride
        self._free = deque(range(rows))
        self._storing = 0
        self._store_rows = rows // STORE_SHARE
        self._requests: dict[str, _Staged] = {}
        self._asks: dict[int, _Staged] = {}
        self._loads: dict[int, _Staged] = {}
        self._stores: dict[int, list[int]] = {}
        self._numbers = itertools.count(1)
        self._step = 0
        self._loading_rows: dict[int, list[int]] = {}
        """Rows that the engine reads in a step."""
        self._offers: dict[int, list[_Offer]] = {}
        self._read: list[int] = []
        self._offered: list[_Offer] = []

    @property
    def free(self) -> int:
        """Rows that nobody uses."""
        return len(self._free)

    def matched(
        self, request: str, hashes: Sequence[bytes], computed: int, limit: int, params: TierParams
    ) -> int | None:
        """Return how many blocks after the ``computed`` ones are in rows now; None: ask again with the next step.

        Args:
            hashes: of all full blocks of the prompt.
            limit: blocks that may come from a cache at all.
        """
        self.poll()
        staged = self._requests.get(request)
        if staged is None:
            wanted = list(hashes[computed:limit])
            number = self._client.ask(wanted, 0, computed * self._stride, params.hints) if wanted else None
            if number is None:
                return 0
            self._requests[request] = self._asks[number] = _Staged(computed, wanted, params)
            return None
        if staged.phase != "there":
            return None
        return max(0, staged.start + len(staged.rows) - computed) if computed >= staged.start else 0

    def take(self, request: str, computed: int, blocks: Sequence[int]) -> list[RowCopy]:
        """The engine has allocated ``blocks`` for what `matched` said, beginning at block ``computed`` of the prompt.

        Returns:
            the copies that it has to make in the coming step.
        """
        staged = self._requests.pop(request, None)
        if staged is None:
            return []
        if staged.phase != "there":  # it goes on without them
            staged.ended = True
            return []
        first = computed - staged.start
        taken = range(first, first + len(blocks)) if blocks else range(0)
        used = {staged.rows[place] for place in taken}
        self._free.extend(row for row in staged.rows if row not in used)
        self._read += used
        return [
            RowCopy(staged.rows[place], block, staged.hashes[place]) for place, block in zip(taken, blocks, strict=True)
        ]

    def offer(
        self, hashes: Sequence[bytes], blocks: Sequence[int], parent: bytes | None, params: TierParams
    ) -> list[RowCopy]:
        """Blocks that are full after the coming step; return the copies to make, as many as there are rows for."""
        room = min(len(self._free), self._store_rows - self._storing, len(hashes)) if self._client.connected else 0
        if room <= 0:
            return []
        rows = [self._free.popleft() for _ in range(room)]
        self._storing += room
        self._offered.append(_Offer(list(hashes[:room]), rows, parent, params))
        return [RowCopy(row, block, value) for row, block, value in zip(rows, blocks, hashes)]

    def begin_step(self) -> int:
        """What was taken and offered since the last call is copied in this step; return its number."""
        self._step += 1
        self._loading_rows[self._step], self._read = self._read, []
        self._offers[self._step], self._offered = self._offered, []
        return self._step

    def end_step(self, step: int) -> None:
        """The engine has made a step's copies."""
        self._free.extend(self._loading_rows.pop(step, ()))
        for offer in self._offers.pop(step, ()):
            number = next(self._numbers)
            if self._client.store(number, offer.hashes, offer.rows, 0, offer.parent, offer.params.hints):
                self._stores[number] = offer.rows
            else:
                self._give_back_stored(offer.rows)
        self.poll()

    def finished(self, request: str) -> None:
        """A request has ended, perhaps before its blocks were used."""
        staged = self._requests.pop(request, None)
        if staged is None:
            return
        if staged.phase == "there":
            self._free.extend(staged.rows)
        staged.ended = True

    def poll(self) -> None:
        """Take what the tier process said."""
        for message in self._client.poll():
            if isinstance(message, AnswerBlocks):
                staged = self._asks.pop(message.id, None)
                if staged is not None:
                    self._load(staged, message.blocks)
            elif isinstance(message, JobDone):
                rows = self._stores.pop(message.job, None)
                if rows is not None:
                    self._give_back_stored(rows)
                else:
                    self._loaded(self._loads.pop(message.job), message.done)

    def _load(self, staged: _Staged, blocks: int) -> None:
        blocks = min(blocks, len(staged.hashes), len(self._free))
        staged.phase = "there"
        if not blocks or staged.ended:
            return
        rows, number = [self._free.popleft() for _ in range(blocks)], next(self._numbers)
        if self._client.load(number, staged.hashes[:blocks], rows, 0, staged.params.hints):
            staged.phase, staged.rows = "loading", rows
            self._loads[number] = staged
        else:
            self._free.extend(rows)

    def _loaded(self, staged: _Staged, done: Sequence[bool]) -> None:
        right = 0 if staged.ended else [*done, False].index(False)
        self._free.extend(staged.rows[right:])
        staged.rows = staged.rows[:right]
        staged.phase = "there"

    def _give_back_stored(self, rows: Sequence[int]) -> None:
        self._free.extend(rows)
        self._storing -= len(rows)
