"""Decode batch: the sequences that get a token from every pass, and the blocks that they need, in closed form.

They advance together, so one step counter stands for all of them: a sequence that joined at step ``join`` has
``generated + step - join`` tokens out. With speculation a step gives each sequence its own number of tokens; those
numbers are drawn beforehand (`EngineRequest.ladder`), so the future of a group is an array instead of a line.

A step whose sequence has ``known`` tokens needs ``ceil((known + drafts) / block_size)`` blocks for it.
"""

import heapq

import numpy as np
import numpy.typing as npt

from penstock_lab.engine.engine_request import EngineRequest
from penstock_lab.engine.simulated_output import accepted
from penstock_lab.engine.timing.decode_steps import DecodeSteps
from penstock_lab.engine.timing.timing_model import TimingModel

_AHEAD = 256
"""Steps that speculation looks ahead at once: B x 256 numbers, 0.1 ms for 64 sequences."""


class DecodeBatch:
    """The sequences that decode, in running order, without speculation.

    Args:
        fill_watched: whether full blocks of generated tokens are named, so that the step which fills one matters.
    """

    drafts = 0

    def __init__(self, block_size: int, fill_watched: bool) -> None:
        self.members: dict[str, EngineRequest] = {}
        self.step = 0
        self._block_size = block_size
        self._watched = fill_watched
        self._kv = 0
        self._crossing = [0] * block_size  # sequences that need a block at steps of this residue
        self._filling: list[dict[str, EngineRequest]] = [{} for _ in range(block_size)] if fill_watched else []
        self._fillers = 0
        """Members whose full blocks are to be named."""
        self._ends: list[tuple[int, int, EngineRequest]] = []

    def __len__(self) -> int:
        return len(self.members)

    @property
    def kv(self) -> int:
        """Tokens that the next step reads, the ones it computes included."""
        return self._kv

    def generated(self, request: EngineRequest, step: int | None = None) -> int:
        """Return the tokens that a member has out before ``step`` (by default, the next one) is run."""
        return request.generated + (self.step if step is None else step) - request.join

    def step_of(self, request: EngineRequest, token: int) -> int:
        """Return the step after which a member's token number ``token`` (from 1) is out."""
        return request.join + token - request.generated

    def join(self, request: EngineRequest) -> None:
        """Take a sequence in; its next token comes out of the next step."""
        request.state = "decoding"
        request.join = self.step
        request.ends = ends = self.step_of(request, request.target)
        self._add(request)
        heapq.heappush(self._ends, (ends, request.order, request))

    def leave(self, request: EngineRequest, stepping: bool) -> None:
        """Take a sequence out, ``stepping`` as in `private`. It keeps what it has generated."""
        del self.members[request.submit.id]
        private, generated = self.private(request, stepping), self.generated(request)
        self._drop(request)
        request.drafted += self.step - request.join
        request.generated, request.private = generated, private

    def private(self, request: EngineRequest, stepping: bool) -> int:
        """Return the private blocks of a member; ``stepping``: its blocks for the next step are taken already."""
        last = self.step if stepping else self.step - 1
        if last < request.join:
            return request.private
        known = request.prompt + self.generated(request, last)
        return -(-(known + self.drafts) // self._block_size) - request.named

    def demand(self, request: EngineRequest) -> int:
        """Return the blocks that a member needs for the next step beyond those it has."""
        return self.private(request, True) - self.private(request, False)

    def ended(self) -> list[EngineRequest]:
        """Return the members whose last token is out, in running order."""
        heap, out = self._ends, []
        while heap:
            ends, order, request = heap[0]
            alive = request.state == "decoding" and request.ends == ends and request.order == order
            if alive and ends > self.step:
                break
            heapq.heappop(heap)
            if alive:
                out.append(request)
        return out

    def takes(self, start: int, end: int) -> int:
        """Count the blocks that steps ``start`` to ``end - 1`` need beyond those held before."""
        size = self._block_size
        first = start % size
        counts = self._crossing
        last = first + end - start
        if last <= size:
            return sum(counts[first:last]) if last - first > 1 else counts[first]
        whole, rest = divmod(end - start, size)
        last = first + rest
        total = whole * len(self.members) + sum(counts[first:last])
        return total + sum(counts[: last - size]) if last > size else total

    def horizon(self, blocks: int) -> int:
        """Return how many steps run alike, the next one included.

        Until a sequence ends, or until the steps after the next need more than ``blocks`` blocks, or, where that is
        watched, until a block is filled.
        """
        while self._ends and not self._alive(self._ends[0]):
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self.step
        size = self._block_size
        if self._fillers:
            fills = self._filling
            ahead = next((i for i in range(1, min(steps, size + 1)) if fills[(self.step + i) % size]), steps)
            steps = min(steps, ahead)
        if steps > 1 and (steps // size + 1) * len(self.members) > blocks:
            steps = self._fitting(blocks, steps)
        return steps

    def fills(self) -> list[EngineRequest]:
        """Return the members with a full block of known tokens that has no name yet, in running order."""
        return list(self._filling[self.step % self._block_size].values()) if self._fillers else []

    def run(self, timing: TimingModel, steps: int) -> DecodeSteps:
        """Return how long the next steps take."""
        return timing.run(self._kv, len(self.members), steps, self.longest(timing))

    def longest(self, timing: TimingModel) -> int:
        """Return the tokens that the longest sequence reads in the next step; 0 where that makes no difference."""
        if not timing.uneven or not self.members:
            return 0
        return max(request.prompt + self.generated(request) for request in self.members.values())

    def advance(self, steps: int) -> None:
        """Let so many steps be over."""
        self.step += steps
        self._kv += steps * len(self.members)

    def kv_sums(self, start: int, end: int) -> tuple[int, int]:
        """Return the sum and the sum of squares of the tokens read by steps ``start`` to ``end - 1``."""
        n, b = end - start, len(self.members)
        first = self._kv + (start - self.step) * b
        if n == 1:
            return first, first * first
        total = n * first + b * (n * (n - 1) // 2)
        squares = n * first * first + first * b * n * (n - 1) + b * b * ((n - 1) * n * (2 * n - 1) // 6)
        return total, squares

    def rebuild(self, members: list[EngineRequest], step: int) -> None:
        """Become the group of these members, which joined before."""
        self.__init__(self._block_size, self._watched)  # type: ignore[misc]
        self.step = step
        for request in members:
            self._add(request)
            heapq.heappush(self._ends, (request.ends, request.order, request))

    def _alive(self, entry: tuple[int, int, EngineRequest]) -> bool:
        ends, order, request = entry
        return request.state == "decoding" and request.ends == ends and request.order == order

    def _add(self, request: EngineRequest) -> None:
        self.members[request.submit.id] = request
        known = request.prompt + request.generated
        self._kv += known + self.step - request.join
        phase = (request.join + 1 - known) % self._block_size
        self._crossing[phase] += 1
        if self._watched and request.submit.tokens is not None:
            self._filling[phase - 1][request.submit.id] = request
            self._fillers += 1

    def _drop(self, request: EngineRequest) -> None:
        known = request.prompt + request.generated
        self._kv -= known + self.step - request.join
        phase = (request.join + 1 - known) % self._block_size
        self._crossing[phase] -= 1
        if self._fillers and self._filling[phase - 1].pop(request.submit.id, None) is not None:
            self._fillers -= 1

    def _fitting(self, blocks: int, most: int) -> int:
        """Return how many steps, up to ``most``, need at most ``blocks`` blocks after the first."""
        size, members, crossing = self._block_size, len(self.members), self._crossing
        whole = blocks // members
        left = blocks - whole * members
        steps = 1 + whole * size
        at = (self.step + steps) % size
        while steps < most:
            left -= crossing[at]
            if left < 0:
                return steps
            steps += 1
            at = at + 1 if at + 1 < size else 0
        return most


class SpeculativeDecodeBatch(DecodeBatch):
    """The same with speculation: each step gives a sequence one token and the drafts accepted before a refusal."""

    def __init__(self, block_size: int, fill_watched: bool, drafts: int, rate: float) -> None:
        super().__init__(block_size, fill_watched)
        self.drafts = drafts
        self._rate = rate
        self._base = 0
        self._kv_ahead: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._blocks_ahead: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._full_ahead: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    @property
    def kv(self) -> int:
        return sum(request.prompt + self.generated(request) for request in self.members.values())

    def generated(self, request: EngineRequest, step: int | None = None) -> int:
        ladder = self._ladder(request)
        done = min((self.step if step is None else step) - request.join + request.drafted, len(ladder) - 1)
        return min(request.target, request.generated + int(ladder[done] - ladder[request.drafted]))

    def step_of(self, request: EngineRequest, token: int) -> int:
        ladder = self._ladder(request)
        reached = np.searchsorted(ladder, ladder[request.drafted] + token - request.generated)
        return request.join + int(reached) - request.drafted

    def takes(self, start: int, end: int) -> int:
        self._look(end - self.step)
        before = int(self._blocks_ahead[start - self._base])
        return int(self._blocks_ahead[end - self._base]) - before

    def horizon(self, blocks: int) -> int:
        first = min(request.ends for request in self.members.values()) - self.step
        steps = min(first, _AHEAD)
        self._look(steps)
        at = self.step - self._base
        if self._watched:
            full = self._full_ahead[at : at + steps]
            changed = np.flatnonzero(full != full[0])
            steps = int(changed[0]) if len(changed) else steps
        need = self._blocks_ahead[at + 1 : at + 1 + steps] - self._blocks_ahead[at + 1]
        return int(np.searchsorted(need, blocks, side="right"))

    def fills(self) -> list[EngineRequest]:
        if not self._watched:
            return []
        size = self._block_size
        return [
            request
            for request in self.members.values()
            if request.submit.tokens is not None and (request.prompt + self.generated(request)) // size > request.named
        ]

    def run(self, timing: TimingModel, steps: int) -> DecodeSteps:
        self._look(steps)
        at = self.step - self._base
        return timing.over(self._kv_ahead[at : at + steps], len(self.members))

    def advance(self, steps: int) -> None:
        self.step += steps

    def kv_sums(self, start: int, end: int) -> tuple[int, int]:
        self._look(end - self.step)
        reads: list[int] = self._kv_ahead[start - self._base : end - self._base].tolist()
        return sum(reads), sum(read * read for read in reads)

    def rebuild(self, members: list[EngineRequest], step: int) -> None:
        drafts, rate = self.drafts, self._rate
        self.__init__(self._block_size, self._watched, drafts, rate)  # type: ignore[misc]
        self.step = step
        for request in members:
            self.members[request.submit.id] = request
            heapq.heappush(self._ends, (request.ends, request.order, request))

    def _add(self, request: EngineRequest) -> None:
        self.members[request.submit.id] = request
        self._base, self._kv_ahead = 0, self._kv_ahead[:0]

    def _drop(self, request: EngineRequest) -> None:
        self._base, self._kv_ahead = 0, self._kv_ahead[:0]

    def _ladder(self, request: EngineRequest) -> npt.NDArray[np.int64]:
        if request.ladder is None:
            request.ladder = accepted(request.answer.key, self._rate, self.drafts, request.target)
        return request.ladder

    def _look(self, steps: int) -> None:
        """Work out what the next ``steps`` steps read and hold, unless that is known."""
        offset = self.step - self._base
        if len(self._kv_ahead) and offset >= 0 and offset + steps <= len(self._kv_ahead):
            return
        size = self._block_size
        blocks = np.zeros(steps + 1, dtype=np.int64)
        kv = np.zeros(steps, dtype=np.int64)
        full = np.zeros(steps, dtype=np.int64)
        for request in self.members.values():
            ladder = self._ladder(request)
            at = request.drafted + self.step - request.join
            indices = np.minimum(np.arange(at, at + steps), len(ladder) - 1)
            out = np.minimum(request.generated + ladder[indices] - ladder[request.drafted], request.target)
            known = request.prompt + out
            kv += known
            blocks[1:] += -(-(known + self.drafts) // size)
            blocks[0] += request.named + self.private(request, False)
            if request.submit.tokens is not None:
                full += known // size
        self._base, self._kv_ahead, self._blocks_ahead, self._full_ahead = self.step, kv, blocks, full
