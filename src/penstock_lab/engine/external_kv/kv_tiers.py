"""KV tiers as the simulated engine uses them: what its scheduler asks of them, and the steps of a request that loads.

A request that is about to be admitted asks for the blocks behind those of the engine's own cache. Where loading them
is cheaper than computing them, its blocks are reserved and it waits as one whose KV another engine has does
(`penstock_lab.engine.external_kv.kv_handoff`): pulling, landed, running. Others go on meanwhile. What a pass has
computed is offered to the tiers at its end. `penstock_lab.simulate.tiers.simulated_tiers` is what answers.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.kernel.machine import Effect, Nanos, Snapshot
from penstock.kernel.tiers.load_worth import LoadCosts
from penstock.kernel.values import KvEvent
from penstock_lab.engine.block_allocation import BlockAllocation, KvCache
from penstock_lab.engine.engine_request import EngineRequest
from penstock_lab.engine.events import EngineCounters, SubmitRequest
from penstock_lab.engine.external_kv.kv_handoff import KvHandoffs
from penstock_lab.engine.settings import SimSettings


class LoadedBlocks(NamedTuple):
    """A load that is over: so many blocks are there, from the first one on; ``sources``: tier -> blocks from there."""

    id: str
    blocks: int
    sources: dict[str, int]


class KvTiers(Protocol):
    """Tiers below one engine's memory. Chains are names of blocks; times never fall from call to call."""

    @property
    def due(self) -> Nanos | None:
        """When something is over next: `advance` is then to be called. None: nothing is under way."""
        ...

    def lookup(self, submit: SubmitRequest, chain: Sequence[int], start: int, end: int, now: Nanos) -> int:
        """Return how many blocks of ``chain[start:end]`` can be loaded at less cost than computing them."""
        ...

    def load(self, submit: SubmitRequest, chain: Sequence[int], start: int, end: int, now: Nanos) -> None:
        """Bring these blocks; `advance` says when they are there."""
        ...

    def cancel(self, id: str, now: Nanos) -> None:
        """Nobody waits for what a request loads."""
        ...

    def store(self, submit: SubmitRequest, chain: Sequence[int], start: int, end: int, now: Nanos) -> None:
        """Offer blocks that the engine has computed."""
        ...

    def use(self, chain: Sequence[int], end: int, now: Nanos) -> None:
        """The engine found ``chain[:end]`` in its own cache."""
        ...

    def expect(self, chain: Sequence[int], end: int, at: Nanos) -> None:
        """Bring ``chain[:end]`` up at that time: a request for it is likely soon after."""
        ...

    def advance(self, now: Nanos) -> list[LoadedBlocks]:
        """Let happen what is due by now; return the loads that are over."""
        ...

    def take_changes(self) -> list[KvEvent]:
        """Return what tiers have gained and lost since the last call."""
        ...

    def blocks(self) -> dict[str, tuple[int, int]]:
        """Return tier -> (blocks that it has, blocks that it can have)."""
        ...

    def prefetched(self) -> dict[str, int]:
        """Return how many blocks were brought up before anybody asked for them, and how many of these were used."""
        ...

    def costs(self, now: Nanos) -> LoadCosts:
        """Return what loading blocks costs at a moment, and computing them."""
        ...

    def snapshot(self) -> Snapshot: ...
    def restore(self, state: Snapshot) -> None: ...
    def check(self) -> None: ...


class LoadingScheduler(Protocol):
    """The scheduler that these steps belong to: `penstock_lab.engine.scheduler.Scheduler`."""

    settings: SimSettings
    out: list[Effect]
    handoffs: KvHandoffs
    holdings: BlockAllocation
    cache: KvCache
    counters: EngineCounters

    def settle(self, now: Nanos) -> None: ...
    def put_back(self, request: EngineRequest) -> None: ...
    def cut(self) -> None: ...
    def stir(self, now: Nanos) -> None: ...


def missing(core: LoadingScheduler, tiers: KvTiers, request: EngineRequest, at: Nanos, hit: int) -> int:
    """Return how many blocks behind the ``hit`` ones of its prompt a request should load from the tiers."""
    chain, size = request.chain, core.settings.block_size
    if hit:
        tiers.use(chain, hit, at)
    most = min(len(chain), (request.tokens_so_far - 1) // size)
    if request.tried or hit >= most:
        return 0
    blocks = tiers.lookup(request.submit, chain, hit, most, at)
    if request.started is None:
        core.counters.tier_queries += request.tokens_so_far - hit * size
    return blocks


def reserve(core: LoadingScheduler, tiers: KvTiers, request: EngineRequest, at: Nanos, hit: int, blocks: int) -> None:
    """Reserve the blocks of a prompt, of which ``hit`` are here, and load the ``blocks`` after these."""
    need = -(-request.tokens_so_far // core.settings.block_size) - hit
    core.holdings.take(need)
    request.state = "pulling"
    request.named, request.private, request.loading = hit, need, blocks
    core.handoffs.pulling[request.submit.id] = request
    tiers.load(request.submit, request.chain, hit, hit + blocks, at)


def advance(core: LoadingScheduler, tiers: KvTiers, at: Nanos) -> None:
    """Let happen in the tiers what is due, and go on with the requests whose blocks are there."""
    for loaded in tiers.advance(at):
        request = core.handoffs.pulling.get(loaded.id)
        if request is not None and request.loading:
            _land(core, request, loaded, at)
    announce(core, tiers)
    if core.holdings.changes:
        core.out.append(core.holdings.take_changes(at))


def store(core: LoadingScheduler, tiers: KvTiers, at: Nanos) -> None:
    """Offer the blocks that the pass which is over has filled."""
    fresh, core.holdings.fresh = core.holdings.fresh, []
    for request, start, end in fresh or ():
        tiers.store(request.submit, request.chain, start, end, at)


def announce(core: LoadingScheduler, tiers: KvTiers) -> None:
    """Put what changed in the tiers behind what changed in the engine's cache."""
    changes = tiers.take_changes()
    if core.holdings.notify:
        core.holdings.changes += changes


def _land(core: LoadingScheduler, request: EngineRequest, loaded: LoadedBlocks, at: Nanos) -> None:
    """Go on with a request; where not one block came, it is computed as if the tiers had none."""
    size = core.settings.block_size
    del core.handoffs.pulling[loaded.id]
    core.settle(at)
    request.loading = 0
    if loaded.blocks:
        hit = request.named
        request.state = "landed"
        request.computed = request.cached = (hit + loaded.blocks) * size
        if request.started is None:
            request.sources = {tier: blocks * size for tier, blocks in loaded.sources.items()}
        fresh, core.holdings.fresh = core.holdings.fresh, None  # the tiers have these
        core.holdings.name(request, hit + loaded.blocks)
        core.holdings.fresh = fresh
        core.handoffs.landed.add(request)
    else:
        core.counters.loads_failed += 1
        core.cache.release(request.chain, request.named, request.private)
        request.state = "waiting"
        request.named = request.private = request.computed = request.cached = 0
        request.tried = True
        core.put_back(request)
    core.cut()
    core.stir(at)
