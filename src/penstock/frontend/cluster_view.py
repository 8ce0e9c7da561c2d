"""Cluster view: what a frontend needs of the live node behind it, beside the tickets of its requests."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.adapters.seams import Store
from penstock.adapters.sources.frontend_counters import FrontendCounters
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.machine import Nanos
from penstock.kernel.values import TIERS, Target, WorkerCard, WorkerId
from penstock.router.events import WorkerCordoned
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.router.kv_index.image_placeholders import ImagePlaceholders
from penstock.runtime.cluster_state.refused_messages import refusals
from penstock.runtime.kv_events.peer_blocks import PeerBlocks, blocks_of
from penstock.runtime.node.adapter_loads import AdapterLoads
from penstock.runtime.node.node_status import NodeStatus
from penstock.runtime.node.router_node import RouterNode
from penstock.runtime.planning.counters_export import CountersExport, FrontendCounts

_KV_RESULTS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("stored", "ok"): ("events_stored",),
    ("stored", "parent_block_not_found"): ("parents_unknown",),
    ("stored", "invalid_block"): ("refused_block_size", "malformed", "collisions"),
    ("removed", "ok"): ("events_removed",),
    ("removed", "block_not_found"): ("removed_unknown",),
    ("cleared", "ok"): ("events_cleared",),
}
"""The index's counters behind each (event type, result) that Dynamo's metric distinguishes."""


class BelievedBlocks(NamedTuple):
    """What the router believes that a worker has. ``hashes``: the worker's own, of host memory and of what is below."""

    state: str
    hashes: tuple[Sequence[int], Sequence[int]]


class ClusterView:
    """What a frontend needs of its `penstock.runtime.node.router_node.RouterNode`."""

    def __init__(self, node: RouterNode) -> None:
        self._node = node
        self.name = node.name
        """Name of this process's router."""
        self._telling: CountersExport | None = None

    def now(self) -> Nanos:
        """Return the router's time."""
        return self._node.live.now()

    def status(self) -> NodeStatus:
        """Return the status for operators: models, workers, queues, counts, findings."""
        return self._node.status()

    def cards(self) -> Sequence[WorkerCard]:
        """Return the cards of all present workers."""
        return [worker.card for worker in self._node.router.roster]

    def changes(self) -> int:
        """Return how often workers have changed: `cards` and `block_size` stay the same while this does."""
        adapters: AdapterLoads | None = getattr(self._node, "adapters", None)  # no call: each request comes by here
        return self._node.router.roster.changes + (0 if adapters is None else adapters.registry.changes)

    def is_current(self, card: WorkerCard) -> bool:
        """Return whether the worker of this card, in the same epoch, is still present."""
        worker = self._node.router.roster.get(card.id)
        return worker is not None and worker.card.epoch == card.epoch

    def alone(self, card: WorkerCard) -> bool:
        """Return whether no other worker can take requests for the model of this card."""
        router = self._node.router
        now = self._node.live.now()
        others = (worker for worker in router.roster if worker.card.model == card.model)
        return not any(worker.why_not(now, doubts=False) is None for worker in others if worker.card != card)

    @property
    def silent(self) -> Collection[WorkerId]:
        """Workers that do not answer the health checks of their supervisors."""
        return self._node.membership.silent

    def doubt(self, worker: WorkerId, on: bool, reason: str) -> None:
        """Send a worker requests only where no other is left, or as before."""
        self._node.live.post("router", WorkerCordoned(worker=worker, on=on, reason=reason, doubt=True))

    def prefill_tokens(self, model: str, target: Target) -> int:
        """Return how many prompt tokens wait at a target for their first output, of all frontends' requests."""
        pool = self._node.router.pools.get(model)
        return 0 if pool is None else pool.active.load(target).prefill_tokens

    def images(self, model: str) -> ImagePlaceholders | None:
        """Return what is known of the images that a model's engines hold."""
        return self._node.feeds.images.get(model)

    def block_size(self, model: str) -> int:
        """Return a model's tokens per block, by which the router compares prefixes."""
        pool = self._node.router.pools.get(model)
        return 64 if pool is None else pool.index.block_size

    def ready(self, model: str) -> int:
        """Return how many workers can take a request of a model now."""
        now = self.now()
        roster = self._node.router.roster
        return sum(1 for worker in roster if worker.card.model == model and worker.why_not(now) is None)

    def believed(self, worker: WorkerId) -> BelievedBlocks | None:
        """Return which blocks the router believes in a worker's lower tiers; None where there is no such worker."""
        entry = self._node.router.roster.get(worker)
        if entry is None:
            return None
        pool, target = self._node.router.pools[entry.card.model], Target(worker)
        index = pool.index.exact
        if not isinstance(index, ExactIndex):
            return BelievedBlocks(pool.index.kv_state(target), ((), ()))
        ranks = [Target(worker, rank) for rank in range(entry.card.ranks)]
        host, disk = ([name for rank in ranks for name in index.engine_hashes(rank, tier)] for tier in TIERS[1:])
        return BelievedBlocks(pool.index.kv_state(target), (host, disk))

    def kv_events(self) -> Mapping[tuple[str, str], int]:
        """Return how many KV events were applied, by (event type, result)."""
        counts: dict[tuple[str, str], int] = {}
        for pool in self._node.router.pools.values():
            counters = None if pool.index.exact is None else pool.index.exact.counters
            for (kind, result), names in _KV_RESULTS.items():
                count = sum(int(getattr(counters, name, 0)) for name in names)
                counts[kind, result] = counts.get((kind, result), 0) + count
        return counts

    def kv_blocks(self, target: Target) -> PeerBlocks | None:
        """Return all that is known of a worker's rank, for another frontend; None where it is not all."""
        return blocks_of(self._node.router, target, self._node.feeds.digest)

    def counters(self) -> Mapping[str, float]:
        """Return health of loop, router and KV events.

        Seconds: loop_longest, loop_recent, kv_lag (of what waits now), kv_lag_longest (of the last minute); counts:
        loop_stalls, router_faults, kv_waiting (ranks), kv_skipped (batches), kv_joining and kv_from_peers
        (ranks).
        """
        monitor, feeds = self._node.loop_monitor, self._node.feeds
        return {
            "loop_longest": monitor.longest,
            "loop_recent": monitor.longest_recent,
            "loop_stalls": monitor.over_budget,
            "router_faults": self._node.live.faults,
            "kv_lag": feeds.poller.lag,
            "kv_lag_longest": feeds.poller.lag_longest,
            "kv_waiting": feeds.poller.waiting,
            "kv_skipped": feeds.poller.skipped,
            "kv_joining": feeds.joining,
            "kv_from_peers": feeds.peer_answers,
        }

    def notes(self) -> Mapping[str, int]:
        """Return how often each kind of note was taken."""
        return {**self._node.noted, **refusals(self._node.message_sources)}

    @property
    def adapters(self) -> AdapterLoads | None:
        """LoRA adapters: which there are, and their loads; None where nothing is loaded."""
        return getattr(self._node, "adapters", None)

    @property
    def store(self) -> Store | None:
        """Store for the operators' desired state; None where there is none."""
        return getattr(self._node, "store", None)

    @property
    def started(self) -> ClusterSettings:
        """The settings of the start, before operators changed some."""
        return self._node.tuning.started

    def export_counters(self, counts: FrontendCounts) -> FrontendCounters:
        """Return the counters for planners: this frontend's counts, and the workers as they are."""
        if self._telling is None:
            self._telling = CountersExport(self.name, self._node.router, self._node.observers.stats, counts)
        return self._telling.export(self.now())

    def peers(self) -> Sequence[str]:
        """Return the admin URLs of the cluster's other frontend processes."""
        peers = self._node.peers
        return [] if peers is None else [card.admin_url for card in peers.cards.values()]
