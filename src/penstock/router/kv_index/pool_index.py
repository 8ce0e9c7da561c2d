"""`PoolIndex`: what the caches of one model's workers hold, by the best source that is known for each.

Three indexes may answer: an exact one, which hears KV events; routing history, for engines without them; and the
prediction of placements whose events are not back yet.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from penstock import extension
from penstock.kernel.machine import Nanos, nanos
from penstock.kernel.tiers.load_worth import LoadCosts
from penstock.kernel.values import Prompt, Target, WorkerId
from penstock.router.kv_index.approximate_index import ApproximateIndex
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.router.kv_index.index_states import PoolIndexState
from penstock.router.kv_index.indexer import NOTHING, SOURCES, Column, EventIndexer, HeldBlocks, HistoryIndexer
from penstock.router.kv_index.kv_event_stream import KvEventStream
from penstock.router.settings import RouterSettings
from penstock.router.workers.active_sequences import TargetLoad

APPROXIMATE_BLOCKS_MAX = 1 << 20
"""Most blocks that the routing history keeps; it is pruned to 80 %."""


class PromptForm(NamedTuple):
    """One form of prompts.

    Args:
        exact: makes the index of KV events, from the block size in tokens.
        history: makes an index of placements, from the time after which one is forgotten.
        load: class of a target's load; its ``chain`` gives a prompt's blocks this form.
    """

    name: str
    exact: Callable[[int], EventIndexer]
    history: Callable[[Nanos], HistoryIndexer]
    load: type[TargetLoad]

    def prompt(self, prompt: Prompt) -> Prompt:
        """Return a prompt in this form, as after it was written and read."""
        return Prompt(prompt.isl, self.load.chain(prompt.blocks), prompt.estimated)


BLOCKS = PromptForm(
    name="blocks",
    exact=ExactIndex,
    history=lambda ttl: ApproximateIndex(ttl=ttl, blocks_max=APPROXIMATE_BLOCKS_MAX),
    load=TargetLoad,
)
"""Every block by its chained hash, as live requests and engines name it."""


def form_of(name: str) -> PromptForm:
    """Return a form by its name, as a journal has it.

    Raises:
        ConfigError: no extension has one of that name.
    """
    if name == BLOCKS.name:
        return BLOCKS
    form: PromptForm = extension.entry("prompt form", name)
    return form


UNKNOWN = LoadCosts(compute=0.0, host_start=0.0, host_token=0.0)
"""Of a worker that reports nothing: all that it holds counts."""


class TierCosts:
    """What workers last reported of their tiers. Blocks count where the worker's own gate would load them.

    An engine computes at least the last token of a prompt, and so asks for ``most`` blocks, of ``size`` tokens each.
    """

    def __init__(self) -> None:
        self.costs: dict[WorkerId, LoadCosts] = {}
        self._columns: tuple[Mapping[Target, int], Column] | None = None

    def report(self, worker: WorkerId, costs: LoadCosts) -> None:
        """Take in what a worker reports."""
        self.costs[worker] = costs
        self._columns = None

    def drop(self, worker: WorkerId) -> None:
        """A worker is gone."""
        self.costs.pop(worker, None)
        self._columns = None

    def counted(self, target: Target, overlap: HeldBlocks, most: int, size: int) -> HeldBlocks:
        """Return what counts of what a target holds."""
        costs = self.costs.get(target.worker)
        if costs is None:
            return overlap
        host = min(overlap.host, max(0, most - overlap.device))
        disk = min(overlap.disk, max(0, most - overlap.device - host))
        worth = costs.worth(host * size, disk * size) // size
        if worth == host + disk:
            return overlap
        return overlap._replace(host=worth, disk=0, costly=overlap.host + overlap.disk - worth)

    def counted_columns(
        self, place: Mapping[Target, int], device: Column, lower: Sequence[Column], most: int, size: int
    ) -> Sequence[Column]:
        """Return the same for many targets: blocks in host memory, on disk, and costly ones.

        Args:
            place: target -> its place; the same object for the same targets.
            device, lower: shape (targets,) each.
        """
        compute, host_start, host_token, disk_start, disk_token, own_host = self._columns_of(place)
        host = np.minimum(lower[0], np.maximum(0, most - device))
        disk = np.minimum(lower[1], np.maximum(0, most - device - host))
        fetched, both = disk * size, (host + disk) * size
        copied, unknown = np.where(own_host, fetched, both), compute == 0
        # As `penstock.kernel.tiers.load_worth.worth_loading` does, to the last bit.
        gain = host * size * compute - np.where(own_host, 0.0, host_start + host * size * host_token)
        takes_host = (host > 0) & ((gain > 0) | unknown)
        more = both * compute - ((host_start + copied * host_token) + (disk_start + fetched * disk_token))
        takes_disk = (disk > 0) & ((more > np.where(takes_host, gain, 0.0)) | unknown)
        worth = np.where(takes_disk, host + disk, np.where(takes_host, host, 0))
        whole = worth == host + disk
        return [
            np.where(whole, lower[0], worth),
            np.where(whole, lower[1], 0),
            np.where(whole, 0, lower[0] + lower[1] - worth),
        ]

    def _columns_of(self, place: Mapping[Target, int]) -> Column:
        if self._columns is None or self._columns[0] is not place:
            found = [msgspec.structs.astuple(self.costs.get(target.worker, UNKNOWN)) for target in place]
            self._columns = place, np.array(found, dtype=float).T
        return self._columns[1]

    def snapshot(self) -> dict[WorkerId, LoadCosts]:
        """Return the state."""
        return self.costs

    def restore(self, state: dict[WorkerId, LoadCosts]) -> None:
        """Become what has this state."""
        self.costs, self._columns = state, None


DEFAULT_BLOCK_SIZE = 64
"""Tokens per block where no worker of the model reports its own: only routing history is kept by it."""
HEARD = ("exact", "late")
"""States of a target whose events, since its router listens, are all known: there, history has nothing to add."""
APPROXIMATE, PREDICTED = np.int8(SOURCES.index("approximate")), np.int8(SOURCES.index("predicted"))


class PoolIndex:
    """The KV indexes of one model, and the event streams that feed the exact one.

    Args:
        settings: as of the router's start: they decide which indexes are kept, whatever is changed later.
        form: in which prompts come.
    """

    def __init__(self, settings: RouterSettings, form: PromptForm = BLOCKS) -> None:
        self.block_size = DEFAULT_BLOCK_SIZE
        self.block_size_known = False
        self.indexed = settings.indexed
        """Without a weight on overlap no index is kept, and none is paid for."""
        self.exact: EventIndexer | None = None
        self.history: HistoryIndexer | None = None
        self.predicted: HistoryIndexer | None = None
        if settings.hears_engines:
            self.exact = form.exact(self.block_size)
            if settings.index.predicted_ttl > 0:
                self.predicted = form.history(nanos(settings.index.predicted_ttl))
        if self.indexed and settings.index.kind != "exact":
            self.history = form.history(nanos(settings.index.approximate_ttl))
        self.streams: dict[Target, KvEventStream] = {}
        """KV event streams of the targets that announce one; the others are known by routing history alone."""
        self.tier_costs = TierCosts()
        """What loading blocks from lower tiers costs the workers that report it."""

    def take_block_size(self, size: int | None) -> None:
        """Count in blocks of a worker's size from now on, where none was known."""
        if size is not None and not self.block_size_known:
            self.block_size, self.block_size_known = size, True
            if self.exact is not None:
                self.exact.block_size = size

    def drop(self, worker: WorkerId, targets: Sequence[Target]) -> None:
        """A worker is gone: nothing of its cache counts any more."""
        for target in targets:
            self.streams.pop(target, None)
            for index in (self.exact, self.history, self.predicted):
                if index is not None:
                    index.remove(target)
        self.tier_costs.drop(worker)

    def overlaps(self, prompt: Prompt, now: Nanos) -> dict[Target, HeldBlocks]:
        """Return how many leading blocks each target holds, by the best source that is known for it.

        Those in lower tiers count where the target would load them.
        """
        blocks, text = prompt.blocks, prompt.estimated
        if not self.indexed or not blocks:
            return {}
        found: dict[Target, HeldBlocks] = {}
        if self.history is not None:
            for target, depth in self.history.overlap(blocks, now).items():
                if text or self.kv_state(target) not in HEARD:
                    found[target] = HeldBlocks(depth, source="approximate")
        if text or self.exact is None:
            return found
        exact = self.exact.overlap(self._reachable(prompt)).items()
        found.update(
            [(target, held) for target, held in exact if target not in found or held.device >= found[target].device]
            if found
            else exact
        )
        if self.predicted is not None:
            for target, depth in self.predicted.overlap(blocks, now).items():
                known = found.get(target, NOTHING)
                if depth > known.device and not self.exact.windowed(target):  # of its windows, not all will stay
                    beyond = max(0, known.device + known.host - depth)
                    disk = min(known.disk, max(0, known.total - depth))
                    found[target] = HeldBlocks(depth, beyond, disk, "predicted")
        if self.tier_costs.costs:
            most, size, counted = self._cacheable(prompt), self.block_size, self.tier_costs.counted
            found.update([(to, counted(to, held, most, size)) for to, held in found.items() if held.lower])
        return found

    def _cacheable(self, prompt: Prompt) -> int:
        """Return how many blocks of a prompt an engine looks for: it computes the last token anyway."""
        return max(0, prompt.isl - 1) // self.block_size

    def _reachable(self, prompt: Prompt) -> Sequence[int]:
        """Return a prompt's blocks for the exact index. The last token is computed: a window has to end before it."""
        if self.exact is None or not self.exact.windowed():
            return prompt.blocks
        return prompt.blocks[: self._cacheable(prompt)]

    def overlap_columns(
        self, prompt: Prompt, place: Mapping[Target, int], now: Nanos
    ) -> tuple[Column | int, Sequence[Column], Column | int]:
        """Return what `overlaps` does for many targets: device blocks, those of lower tiers, and who says so.

        The tiers are host, disk and, where a worker reports its costs, costly blocks. Where nobody holds any it is 0.
        """
        blocks, text = prompt.blocks, prompt.estimated
        if not self.indexed or not blocks:
            return 0, [], 0
        guessed = None if self.history is None else self.history.column(blocks, place, now)
        if guessed is not None and not text and self.streams:
            targets = list(place)
            for held in guessed.nonzero()[0].tolist():
                if self.kv_state(targets[held]) in HEARD:
                    guessed[held] = 0
        if guessed is not None and not np.count_nonzero(guessed):
            guessed = None
        if self.exact is None or text:  # the guess is all there is
            return (0, [], 0) if guessed is None else (guessed, [], (guessed > 0) * APPROXIMATE)
        device, tiers = self.exact.columns(self._reachable(prompt), place)
        lower: list[Column] = list(tiers)
        source = (sum(lower, device) > 0).view(np.int8)  # the exact index is number 1 of `SOURCES`
        if guessed is not None:
            more = guessed > device
            device, lower = np.maximum(guessed, device), [np.where(more, 0, tier) for tier in lower]
            source = np.where(more, APPROXIMATE, source)
        if self.predicted is not None and (depth := self.predicted.column(blocks, place, now)) is not None:
            more = depth > device
            if self.exact.windowed():
                more &= np.array([not self.exact.windowed(target) for target in place], dtype=bool)
            if np.count_nonzero(more):
                if lower:
                    left = np.maximum(0, device + lower[0] + lower[1] - depth)
                    lower[0] = np.where(more, np.maximum(0, device + lower[0] - depth), lower[0])
                    lower[1] = np.where(more, np.minimum(lower[1], left), lower[1])
                device = np.where(more, depth, device)
                source = np.where(more, PREDICTED, source)
        if lower and self.tier_costs.costs:
            most, size = self._cacheable(prompt), self.block_size
            lower = list(self.tier_costs.counted_columns(place, device, lower, most, size))
        return (device, lower, source) if lower or np.count_nonzero(device) else (0, [], 0)

    def kv_state(self, target: Target) -> str:
        """Return how well a target's cache is known: a stream's state, or none where it has no event source."""
        stream = self.streams.get(target)
        return "none" if stream is None else stream.state

    def routed(self, target: Target, prompt: Prompt, now: Nanos) -> None:
        """Remember that a target is about to hold these blocks."""
        blocks, text = prompt.blocks, prompt.estimated
        if not blocks:
            return
        if self.history is not None and (text or self.kv_state(target) not in HEARD):
            self.history.routed(target, blocks, now)
        elif self.predicted is not None and not text:
            self.predicted.routed(target, blocks, now)

    # --- machine duties ---------------------------------------------------------------------------------------------

    def snapshot(self) -> PoolIndexState:
        return PoolIndexState(
            block_size=self.block_size,
            block_size_known=self.block_size_known,
            exact=None if self.exact is None else self.exact.snapshot(),
            history=None if self.history is None else self.history.snapshot(),
            predicted=None if self.predicted is None else self.predicted.snapshot(),
            streams={target: stream.snapshot() for target, stream in self.streams.items()},
            tier_costs=self.tier_costs.snapshot(),
        )

    def restore(self, state: PoolIndexState) -> None:
        self.block_size, self.block_size_known = state.block_size, state.block_size_known
        if self.exact is not None:
            self.exact.block_size = self.block_size
            if state.exact is not None:
                self.exact.restore(state.exact)
        if self.history is not None and state.history is not None:
            self.history.restore(state.history)
        if self.predicted is not None and state.predicted is not None:
            self.predicted.restore(state.predicted)
        self.streams = {}
        for target, stream in state.streams.items():
            self.streams[target] = KvEventStream()
            self.streams[target].restore(stream)
        self.tier_costs.restore(state.tier_costs)

    def check(self) -> None:
        for index in (self.exact, self.history, self.predicted):
            if index is not None:
                index.check()
