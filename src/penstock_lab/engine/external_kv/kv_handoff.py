"""KV hand-offs of one engine: requests whose KV is on its way here, and blocks held for other engines.

A request with `SubmitRequest.remote` goes waiting -> pulling (its blocks are reserved, another engine's KV is on its
way) -> landed (it is here) -> running. As in vLLM it is no running sequence until its first pass: ``max_num_seqs``
gates its admission and its first pass, and does not count it in between; nothing preempts it there. One with
`SubmitRequest.hold` ends at its first token, and its blocks stay until they are released or their time is over.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Nanos, Snapshot
from penstock_lab.engine.engine_request import EngineRequest, WaitingQueue


@dataclass(slots=True, eq=False)
class KvHold:
    """Blocks that a request left behind: ``chain[:named]`` and so many private ones, ``until`` then at most."""

    chain: Sequence[int]
    named: int
    private: int
    until: Nanos


class KvHandoffs:
    """What one engine pulls and what it holds.

    Args:
        landed: an empty line for requests whose KV is here.
    """

    __slots__ = ("blocks", "due", "landed", "pulling", "retained")

    def __init__(self, landed: WaitingQueue) -> None:
        self.pulling: dict[str, EngineRequest] = {}
        self.landed = landed
        self.retained: OrderedDict[str, KvHold] = OrderedDict()
        """By when their time is over, the earliest first: all are held equally long."""
        self.blocks = 0
        """Blocks held for others, one that two requests hold counted twice."""
        self.due: Nanos | None = None
        """When the time of the next held request is over."""

    def hold(self, request: EngineRequest, until: Nanos) -> int:
        """Keep the blocks of a request that has ended; returns how many."""
        hold = KvHold(request.chain, request.named, request.private, until)
        self.retained[request.submit.id] = hold
        self.blocks += hold.named + hold.private
        if self.due is None:
            self.due = until
        return hold.named + hold.private

    def let_go(self, id: str) -> KvHold | None:
        """Return what is to be released of a held request; None where there is none."""
        hold = self.retained.pop(id, None)
        if hold is not None:
            self.blocks -= hold.named + hold.private
            self.due = next(iter(self.retained.values())).until if self.retained else None
        return hold

    def snapshot(self) -> Snapshot:
        """Return the state as plain data."""
        return {
            "pulling": list(self.pulling),
            "landed": [request.id for request in self.landed],
            "retained": [
                [id, list(hold.chain), hold.named, hold.private, hold.until] for id, hold in self.retained.items()
            ],
        }

    def restore(
        self, state: Snapshot, requests: dict[str, EngineRequest], chain: Callable[[Sequence[int]], Sequence[int]]
    ) -> None:
        """Become what `snapshot` wrote, with these requests; ``chain`` makes a chain of names."""
        self.pulling = {id: requests[id] for id in state["pulling"]}
        for id in state["landed"]:
            self.landed.add(requests[id])
        for id, names, named, private, until in state["retained"]:
            self.retained[id] = KvHold(chain(names), named, private, until)
            self.blocks += named + private
        self.due = state["retained"][0][-1] if state["retained"] else None

    def check(self) -> None:
        """Raise `InvariantError` where a request is in the wrong place or blocks are miscounted."""
        if any(request.state != "pulling" for request in self.pulling.values()):
            raise InvariantError("a request whose KV is on its way is in another state, too")
        if any(request.state != "landed" for request in self.landed):
            raise InvariantError("a request whose KV is here stands in line, but is in another state")
        if self.blocks != sum(hold.named + hold.private for hold in self.retained.values()):
            raise InvariantError(f"{self.blocks} blocks are said to be held for others, requests say otherwise")
        times = [hold.until for hold in self.retained.values()]
        if times != sorted(times) or self.due != (times[0] if times else None):
            raise InvariantError("held requests are not in the order in which their time is over")
