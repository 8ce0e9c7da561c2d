"""Remote prefill: the scheduler's further steps for a request whose KV another engine made.

Its blocks are reserved, then it lands or is given up, then it resumes; `penstock_lab.engine.external_kv.kv_handoff` has
the states.
"""

from typing import Protocol

from penstock.kernel.machine import Effect, Nanos
from penstock_lab.engine.block_allocation import BlockAllocation, KvCache
from penstock_lab.engine.decode_batch import DecodeBatch
from penstock_lab.engine.engine_request import EngineRequest
from penstock_lab.engine.events import EngineCounters, PullKv
from penstock_lab.engine.external_kv.kv_handoff import KvHandoffs
from penstock_lab.engine.settings import SimSettings
from penstock_lab.engine.timing.timing_model import TimingModel


class PassScheduler(Protocol):
    """The scheduler that these steps belong to: `penstock_lab.engine.scheduler.Scheduler`."""

    settings: SimSettings
    timing: TimingModel
    out: list[Effect]
    handoffs: KvHandoffs
    holdings: BlockAllocation
    cache: KvCache
    partial: EngineRequest | None
    counters: EngineCounters

    @property
    def group(self) -> DecodeBatch: ...

    def settle(self, now: Nanos) -> None: ...
    def put_back(self, request: EngineRequest) -> None: ...
    def cut(self) -> None: ...
    def stir(self, now: Nanos) -> None: ...
    def begin(self, request: EngineRequest, at: Nanos, cached: int) -> None: ...


def reserve(core: PassScheduler, request: EngineRequest, at: Nanos, hit: int) -> None:
    """Reserve the blocks of a prompt that another engine computed, of which ``hit`` are here, and ask for it."""
    size = core.settings.block_size
    need = -(-request.prompt // size) - hit
    core.holdings.take(need)
    request.state = "pulling"
    request.named, request.private, request.computed = hit, need, hit * size
    missing = core.settings.transfer.pull == "missing"
    request.cached = request.computed if missing else 0
    request.brought = max(0, request.remote - request.cached)
    core.counters.remote_queries += request.prompt - request.cached
    core.counters.remote_hits += request.brought
    core.handoffs.pulling[request.submit.id] = request
    core.out.append(PullKv(id=request.submit.id, at=at, tokens=request.brought))


def land(core: PassScheduler, id: str, now: Nanos, ok: bool) -> None:
    """Go on with a request whose KV is here; where not ``ok``, it is computed as if it had never been elsewhere."""
    request = core.handoffs.pulling.pop(id, None)
    if request is None:
        return
    core.settle(now)
    if ok:
        request.state = "landed"
        # At least the last token is computed: its logits are the answer's beginning.
        reach = max(request.computed, request.remote)
        request.computed = min(request.prompt - 1, reach)
        core.holdings.name(request, reach // core.settings.block_size)
        core.handoffs.landed.add(request)
        if core.holdings.changes:
            core.out.append(core.holdings.take_changes(now))
    else:
        core.counters.pulls_failed += 1
        core.cache.release(request.chain, request.named, request.private)
        request.state = "waiting"
        request.named = request.private = request.computed = request.brought = request.cached = 0
        core.put_back(request)
    request.remote = 0
    core.cut()
    core.stir(now)


def resume(core: PassScheduler, at: Nanos, budget: int, prefills: list[tuple[EngineRequest, int]]) -> int:
    """Let requests run whose KV has come, as far as they may; returns what is left of the budget."""
    settings, landed = core.settings, core.handoffs.landed
    running = len(core.group.members) + (core.partial is not None)
    while landed and running < settings.max_num_seqs and budget > 0:
        request = landed.head()
        chunk = request.tokens_so_far - request.computed
        if chunk > budget:
            if settings.enable_chunked_prefill:
                chunk = budget
            elif chunk <= settings.max_num_batched_tokens or prefills:
                break
        landed.remove(request)
        core.begin(request, at, request.cached)
        request.pulled = request.brought
        core.counters.pulled += request.brought
        core.holdings.name(request, (request.computed + chunk) // settings.block_size)
        prefills.append((request, chunk))
        budget -= chunk
        running += 1
    return budget


def length(core: PassScheduler, prefills: list[tuple[EngineRequest, int]], kv: int, seqs: int) -> float:
    """Return the nanoseconds of a pass; the last token of a prompt that was brought is a step of decoding."""
    chunks: list[tuple[int, int]] = []
    for request, chunk in prefills:
        if request.brought and chunk == 1:
            kv += request.tokens_so_far
            seqs += 1
        else:
            chunks.append((request.computed, chunk))
    if not chunks:
        return core.timing.decode(kv, seqs)
    return core.timing.mixed(sum(n for _, n in chunks), chunks, kv, seqs)


def unfinished(core: PassScheduler) -> int:
    """Return the blocks that a prompt which is part done does not have yet."""
    partial = core.partial
    if partial is None:
        return 0
    return max(0, -(-partial.tokens_so_far // core.settings.block_size) - partial.named - partial.private)
