"""Handlers of workers' KV events: apply them to the KV index in order, and request a replay of missing ones."""

from penstock.kernel.machine import Nanos
from penstock.kernel.values import KvCleared, KvRemoved, Target
from penstock.router.events import KvObserved, KvSourceJoining, KvSourceLost, ReplayEnded, ReplayWanted
from penstock.router.kv_index.kv_event_stream import ALL, KvEventStream, StreamOutcome
from penstock.router.model_pool import ModelPool
from penstock.router.requests.routed_request import Believed
from penstock.router.router_state import RouterState


def observed(core: RouterState, now: Nanos, event: KvObserved) -> None:
    target = Target(event.worker, event.rank)
    stream, pool = _stream(core, target, event.epoch)
    if stream is not None and pool is not None:
        _apply(core, pool, target, stream.observe(event))


def replay_ended(core: RouterState, now: Nanos, event: ReplayEnded) -> None:
    target = core.replays.get(event.id) if event.more else core.replays.pop(event.id, None)
    stream, pool = (None, None) if target is None else _stream(core, target, None)
    if target is None or stream is None or pool is None:
        core.dropped += 1
        return
    _apply(core, pool, target, stream.replayed(event))


def source_joining(core: RouterState, now: Nanos, event: KvSourceJoining) -> None:
    stream, _ = _stream(core, Target(event.worker, event.rank), None)
    if stream is not None:
        stream.joining = event.on


def source_lost(core: RouterState, now: Nanos, event: KvSourceLost) -> None:
    target = Target(event.worker, event.rank)
    stream, pool = _stream(core, target, None)
    if stream is not None and pool is not None:
        _apply(core, pool, target, stream.lost(event.reason))


def compared(core: RouterState, pool: ModelPool, target: Target, believed: Believed, had: int, isl: int) -> None:
    """Compare what an answer took from a target's cache with what was believed to be there when it was chosen.

    What took the place of its own new blocks went after the engine had looked for the prompt; the rest may have gone
    before.
    """
    stream = pool.index.streams.get(target)
    if stream is not None:
        evicted = max(0, stream.removed - believed.removed - (isl - had) // pool.index.block_size)
        _apply(core, pool, target, stream.compared(believed.tokens, had, evicted, pool.index.block_size))


def _stream(core: RouterState, target: Target, epoch: int | None) -> tuple[KvEventStream | None, ModelPool | None]:
    """Return a target's event stream and its pool; count what comes from a worker or epoch that is not there."""
    worker = core.roster.get(target.worker)
    if worker is None or (epoch is not None and worker.card.incarnation != epoch):
        core.dropped += 1
        return None, None
    pool = core.pools[worker.card.model]
    return pool.index.streams.get(target), pool


def _apply(core: RouterState, pool: ModelPool, target: Target, outcome: StreamOutcome) -> None:
    """Carry a stream's verdict into the index, in order, and ask for what is missing."""
    assert pool.index.exact is not None
    stream = pool.index.streams[target]
    if outcome.clear:
        pool.index.exact.clear(target)
        stream.removed += ALL
    for event in outcome.events:
        pool.index.exact.apply(target, event)
        if isinstance(event, KvRemoved):
            stream.removed += ALL if event.window else len(event.hashes)  # one of a window may cost a whole prefix
        elif isinstance(event, KvCleared):
            stream.removed += ALL
    if outcome.replay_from is not None:
        core.replay_id += 1
        core.replays[core.replay_id] = target
        core.out.append(
            ReplayWanted(id=core.replay_id, worker=target.worker, rank=target.rank, first=outcome.replay_from)
        )
    if outcome.note is not None:
        core.note("kv_stream", f"worker {target}: {outcome.note}", worker=target.worker)
