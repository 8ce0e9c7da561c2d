"""What does one frontend process tell planners? Its counters, its router's load, and the passes of the engines."""

from collections.abc import Mapping
from typing import Any

from penstock.adapters.sources.told import EngineTold, FrontendTold, ModelTold, RankTold
from penstock.kernel.values import StepStats, WorkerCard, WorkerId
from penstock.router.roster import Worker
from penstock.router.router import Router
from penstock.runtime.planning.counts import Counts
from penstock.runtime.stats import Stats

READER = "planners"
"""Under this name the passes of engines are taken: once for all planners, who get sums that only grow."""


class Telling:
    """One frontend's word to planners.

    Args:
        stats: of the engines' passes.
    """

    def __init__(self, name: str, router: Router, stats: Stats, counts: Counts) -> None:
        self.counts = counts
        self._name = name
        self._router = router
        self._stats = stats
        self._passes: dict[tuple[WorkerId, int], StepStats] = {}
        """Worker and epoch -> its passes since this frontend began to follow it."""

    def told(self, now: int) -> FrontendTold:
        """Return everything as it is; ``now``: the router's time. About 5 us per worker."""
        self._take()
        queued = {model: self._router.waiting(model) for model in self._router.pools}
        counts = self.counts.told()
        empty = self.counts
        models = {
            model: ModelTold(counts=counts.get(model) or empty.of(model).told(0.0), queued=queued.get(model, 0))
            for model in {*counts, *queued}
        }
        engines = tuple(self._engine(worker, now) for worker in self._router.roster)
        return FrontendTold(name=self._name, models=models, engines=engines)

    def _take(self) -> None:
        there = {(worker.card.id, worker.card.epoch) for worker in self._router.roster}
        epochs = dict(there)
        for worker, steps in self._stats.take(READER).items():
            if worker in epochs:
                place = (worker, epochs[worker])
                known = self._passes.get(place)
                self._passes[place] = steps if known is None else _added(known, steps)
        for gone in self._passes.keys() - there:
            del self._passes[gone]

    def _engine(self, worker: Worker, now: int) -> EngineTold:
        card = worker.card
        active = self._router.pools[card.model].active
        loads = [active.load(target) for target in worker.targets]
        window = self._stats.last(card.id)
        return EngineTold(
            worker=card.id,
            epoch=card.epoch,
            model=card.model,
            role=card.role,
            ready=worker.why_not(now) is None,
            flips=flips(card),
            ranks=tuple(RankTold(running=x.requests, prefill_tokens=x.prefill_tokens, blocks=x.blocks) for x in loads),
            block_size=card.block_size,
            kv_tokens=None if card.kv_blocks is None or card.block_size is None else card.kv_blocks * card.block_size,
            max_seqs=card.max_seqs,
            max_batched_tokens=card.max_batched_tokens,
            max_len=card.max_len,
            steps=self._passes.get((card.id, card.epoch)),
            window=None if window is None else window.steps,
        )


def flips(card: WorkerCard) -> bool:
    """Say whether a worker can take another role: simulated ones can, others where they can hand KV over."""
    return card.engine == "sim" or card.handoff is not None


def _added(known: StepStats, steps: StepStats) -> StepStats:
    """Add a window. A sum that one of them lacks must not be lost for ever: it goes on from what the other one has."""
    changes: Mapping[str, Any] = {
        name: getattr(steps, name) if getattr(known, name) is None else getattr(known, name)
        for name in known.__struct_fields__
        if name != "estimated" and (getattr(known, name) is None or getattr(steps, name) is None)
    }
    return StepStats(**{**_sums(known + steps), **changes})


def _sums(steps: StepStats) -> dict[str, Any]:
    return {name: getattr(steps, name) for name in steps.__struct_fields__}
