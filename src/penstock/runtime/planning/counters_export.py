"""Counters export of one frontend for planners: its requests, its router's load, the engines' passes."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.adapters.sources.frontend_counters import FrontendCounters, ModelCounters, RankCounters, WorkerCounters
from penstock.kernel.values import STEP_SUMS, RequestId, StepStats, Traffic, WorkerCard, WorkerId
from penstock.planner.sizing.request_counts import RequestCounts
from penstock.router.router import Router
from penstock.router.workers.roster import RosterWorker
from penstock.runtime.node.engine_stats import EngineStats

READER = "planners"
"""Reader name for the engines' passes: read once for all planners, which get sums that only grow."""


class FrontendCounts:
    """All models of one frontend process.

    Args:
        now: seconds, any origin.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._started = now()
        self._models: dict[str, RequestCounts] = {}
        self.copies: dict[str, str] = {}
        """Shadows' copies that have not ended, and their models: where one waits, no client does."""

    def of(self, model: str) -> RequestCounts:
        """Return a model's counters, created where it is new."""
        counts = self._models.get(model)
        if counts is None:
            counts = self._models[model] = RequestCounts()
        return counts

    def totals(self) -> dict[str, Traffic]:
        """Return every model's counters as they are."""
        seconds = self._now() - self._started
        return {model: counts.totals(seconds) for model, counts in self._models.items()}


class CountersExport:
    """One frontend's counters for planners.

    Args:
        stats: source of the engines' passes.
    """

    def __init__(self, name: str, router: Router, stats: EngineStats, counts: FrontendCounts) -> None:
        self.counts = counts
        self._name = name
        self._router = router
        self._stats = stats
        self._passes: dict[tuple[WorkerId, int], StepStats] = {}
        """Worker and epoch -> its passes since this frontend began to follow it."""

    def export(self, now: int) -> FrontendCounters:
        """Return all counters as they are; ``now``: the router's time. About 5 us per worker."""
        self._collect_passes()
        queued = {model: self._router.waiting(model) for model in self._router.pools}
        for copy, model in self.counts.copies.items():
            request = self._router.requests.get(RequestId(copy))
            if request is not None and request.phase in ("queued", "waiting_for_worker"):
                queued[model] -= 1
        counts = self.counts.totals()
        empty = self.counts
        models = {
            model: ModelCounters(counts=counts.get(model) or empty.of(model).totals(0.0), queued=queued.get(model, 0))
            for model in {*counts, *queued}
        }
        engines = tuple(self._engine(worker, now) for worker in self._router.roster)
        return FrontendCounters(name=self._name, models=models, engines=engines)

    def _collect_passes(self) -> None:
        there = {(worker.card.id, worker.card.epoch) for worker in self._router.roster}
        epochs = dict(there)
        for worker, steps in self._stats.take(READER).items():
            if worker in epochs:
                place = (worker, epochs[worker])
                known = self._passes.get(place)
                self._passes[place] = steps if known is None else _passes_with_window(known, steps)
        for ended in self._passes.keys() - there:
            del self._passes[ended]

    def _engine(self, worker: RosterWorker, now: int) -> WorkerCounters:
        card = worker.card
        active = self._router.pools[card.model].active
        loads = [active.load(target) for target in worker.targets]
        window = self._stats.last(card.id)
        return WorkerCounters(
            worker=card.id,
            epoch=card.epoch,
            model=card.model,
            role=card.role,
            ready=worker.why_not(now) is None,
            flips=flips(card),
            ranks=tuple(
                RankCounters(running=x.requests, prefill_tokens=x.prefill_tokens, blocks=x.blocks) for x in loads
            ),
            block_size=card.block_size,
            limits=card.limits,
            steps=self._passes.get((card.id, card.epoch)),
            window=None if window is None else window.steps,
        )


def flips(card: WorkerCard) -> bool:
    """Return whether a worker can take another role: simulated ones can, others where they can hand KV over."""
    return card.engine == "sim" or card.handoff is not None


def _passes_with_window(known: StepStats, steps: StepStats) -> StepStats:
    """Add a window. A sum that one of them lacks must not be lost for ever: it continues from the other's value."""
    changes: Mapping[str, Any] = {
        name: getattr(steps, name) if getattr(known, name) is None else getattr(known, name)
        for name in STEP_SUMS
        if getattr(known, name) is None or getattr(steps, name) is None
    }
    return msgspec.structs.replace(known + steps, **changes)
