"""Status of the router for operators: its state and findings as plain data, from the same objects that decide."""

from collections.abc import Sequence

from penstock.kernel.machine import Nanos, seconds
from penstock.kernel.plurals import counted
from penstock.router.kv_index.pool_index import HEARD
from penstock.router.model_pool import ModelPool
from penstock.router.router_state import RouterState
from penstock.router.stage_graph import FINAL, needs_pair
from penstock.router.status_rows import (
    OUTCOMES,
    IndexKind,
    KvEventsStatus,
    Level,
    ModelStatus,
    QueueStatus,
    RouterStatus,
    StatusCounts,
    StatusFinding,
    WorkerStatus,
)
from penstock.router.workers.roster import RosterWorker

StatusRow = dict[str, float | None]
"""Name of a figure -> its value; None is unknown."""
REFUSAL_SHOWN = 600.0
"""Seconds that a refusal for load, or a failure, stays a finding: later, only the counts show it."""


def router_status(router: RouterState, now: Nanos) -> RouterStatus:
    """Return models, workers, queues and counts; unknown numbers are None."""
    pools = router.pools
    return RouterStatus(
        name=router.name,
        mode=router.settings.mode,
        models=[_model_status(router, pool, now) for pool in pools.values()],
        workers=[_worker_status(pools[worker.card.model], worker, now) for worker in router.roster],
        queue={model: QueueStatus(len(pool.queue)) for model, pool in pools.items()},
        requests=_status_counts(router),
        hit_rate=_hit_rate(router),
        dropped_events=router.dropped,
        findings=findings(router, now),
    )


def findings(router: RouterState, now: Nanos) -> list[StatusFinding]:
    """Return what an operator should know and do: each with a level, a sentence and a next step."""
    found: list[StatusFinding] = []

    def add(level: Level, text: str, hint: str) -> None:
        found.append(StatusFinding(level, text, hint))

    for name, why in () if router.plugins is None else sorted(router.plugins.left_out.items()):
        hint = "requests are routed without it; change its settings, or restart, once it is mended"
        add("warning", f"the router's plug-in {name} is left out: {why}", hint)
    for pool in router.pools.values():
        workers = [worker for worker in router.roster if worker.card.model == pool.model]
        usable = [worker for worker in workers if worker.why_not(now, doubts=False) is None]
        if not usable:
            add("error", f"no worker of {pool.model} can take requests", "penstock status shows each one's state")
        elif all(worker.why_not(now) is not None for worker in usable):
            add(
                "error",
                f"every worker of {pool.model} is in doubt, and gets requests all the same, since no other is left: "
                + "; ".join(f"the {worker.why_not(now)} ({worker.card.id})" for worker in usable[:4]),
                "penstock explain shows a failed request's attempts, the engines' logs why they failed",
            )
        for worker in workers:
            for doubt in worker.doubts:
                add("warning", f"{worker.card.id}: its {doubt}", "it gets requests again once it answers; see its log")
            for cordon in worker.cordons:
                add(
                    "warning",
                    f"{worker.card.id} is cordoned: {cordon}",
                    "its log may say why",
                )
        found += _stage_findings(pool, workers, now)
        found += _refusal_findings(pool, now)
        found += _failure_findings(pool, workers, now)
        if router.settings.mode != "kv" or pool.index.exact is None:
            continue
        silent = [w.card for w in workers if not w.card.events]
        blind = [card.id for card in silent if not (card.role == "decode" and needs_pair(card))]  # which keep no prefix
        if blind:
            add(
                "warning",
                f"mode kv without an event source: {', '.join(sorted(blind))} of {pool.model} announce no KV events, "
                "so their caches are guessed from routing history",
                "start the engine with KV events on, or set router.index.kind=approximate to say that this is meant",
            )
        begun = [(str(target), stream.since) for target, stream in pool.index.streams.items() if stream.state == "late"]
        late = ", ".join(f"{target} from event {first:,} on" for target, first in sorted(begun))
        if late:
            add(
                "warning",
                f"engines cached before we listened what we do not know; all is known of {late}",
                "it heals by itself; a replay_endpoint in the engine's --kv-events-config tells it at once",
            )
        lost = sorted(str(t) for t, stream in pool.index.streams.items() if stream.state == "approximate")
        if lost:
            add(
                "warning",
                f"KV events of {', '.join(lost)} were lost beyond replay; what was known of their caches is dropped",
                "it heals as new blocks are announced; a longer replay buffer in the engine avoids it",
            )
        for target, stream in pool.index.streams.items():
            if stream.wrong_sets:
                add(
                    "warning",
                    f"{target} has less cached than its KV events say, {stream.had:,} tokens of a prompt "
                    f"where {stream.believed:,} were expected; its cache is "
                    f"{'learnt anew' if stream.wrong_sets == 1 else 'guessed'}",
                    _likely_cause(pool, stream.had),
                )
        misfits = pool.index.exact.counters.refused_block_size
        if misfits:
            add(
                "warning",
                f"{counted(misfits, 'KV event')} of {pool.model} had blocks of another size than "
                f"{pool.index.block_size} tokens, which its engines said when they joined; nothing is known of their "
                "caches",
                "an engine was started anew with another block size: restart the others likewise, or attach it again",
            )
        wrong = pool.index.exact.counters.audit_disagreements
        if wrong:
            add(
                "error",
                f"the index of {pool.model} disagreed with its exact audit {counted(wrong, 'time')}",
                "please report it",
            )
    return found


def _likely_cause(pool: ModelPool, had: int) -> str:
    """Return the likely cause where engines have less in their caches than their events say."""
    if pool.index.exact is not None and pool.index.exact.counters.refused_block_size:
        return "an engine's blocks have another size since it was started anew"
    if had:
        return "its cache may have groups of layers that forget sooner; penstock doctor compares tokens and blocks"
    return "prefix caching may be off, or another process answers at its address; penstock doctor compares both"


def _stage_findings(pool: ModelPool, workers: list[RosterWorker], now: Nanos) -> list[StatusFinding]:
    """Return where half of a hand-off is missing, or the link between both."""
    links = [
        StatusFinding(
            "error",
            f"the last {fault.count} hand-offs from {one} to {other} failed, although both answer: {fault.reason}",
            f"restart {other}, else {one}: the link is not made anew; UCX keeps it with UCX_KEEPALIVE_INTERVAL=inf",
        )
        for (one, other), fault in pool.roles.links.items()
        if fault.broken
    ]
    ready = {worker.card.role for worker in workers if worker.why_not(now) is None}
    roles = set(pool.roles.workers)
    if "prefill" in roles and ready and not ready & FINAL:
        does = "requests wait, or are refused" if pool.roles.paired else "prefill workers do all of it"
        text = f"no worker of {pool.model} whose role is to answer is ready: {does}"
        hint = "start decode workers: penstock scale decode=N, or penstock join --role decode"
    elif "prefill" in roles and ready & FINAL and not any(pool.roles.speaks(worker.card) for worker in workers):
        text = f"prefill workers of {pool.model} get nothing to do: no other worker can take KV over"
        hint = "flip one of the others to decode, or set handoff in the pool's config"
    elif "decode" in roles and "prefill" not in ready and "decode" in ready:
        does = "requests wait, or are refused" if pool.roles.paired else "decode workers prefill by themselves"
        text = f"no prefill worker of {pool.model} is ready: {does}"
        hint = "start prefill workers: penstock scale prefill=N, or penstock join --role prefill"
    else:
        return links
    return [*links, StatusFinding("warning", text, hint)]


def _failure_findings(pool: ModelPool, workers: list[RosterWorker], now: Nanos) -> list[StatusFinding]:
    """Return on which workers requests failed, for some minutes after the last failure."""
    failed = [(*worker.failed, worker) for worker in workers if worker.failed is not None]
    failed = [each for each in failed if seconds(now - each[0]) <= REFUSAL_SHOWN]
    if not failed:
        return []
    at, why, _ = max(failed, key=lambda each: each[0])
    counts = ", ".join(f"{worker.card.id} {worker.failures:,}" for _, _, worker in failed[:8])
    more = f" and {len(failed) - 8} more workers" if len(failed) > 8 else ""
    text = f"requests of {pool.model} failed on workers, the last one {seconds(now - at):.0f} s ago: {counts}{more}"
    return [StatusFinding("warning", f"{text}; it was: {why}", "penstock explain shows the attempts of a request")]


def _refusal_findings(pool: ModelPool, now: Nanos) -> list[StatusFinding]:
    """Return which limits refuse requests, for some minutes after the last refusal."""
    if pool.counts.refused_last is None or seconds(now - pool.counts.refused_last) > REFUSAL_SHOWN:
        return []
    ago = seconds(now - pool.counts.refused_last)
    counts = ", ".join(f"router.overload.{limit} {count:,}" for limit, count in sorted(pool.counts.refused.items()))
    text = f"requests of {pool.model} were refused for load, the last one {ago:.0f} s ago: {counts}"
    hint = "add workers, or raise that limit: penstock set router.overload.LIMIT=VALUE, null takes it away"
    return [StatusFinding("warning", text, hint)]


def _model_status(router: RouterState, pool: ModelPool, now: Nanos) -> ModelStatus:
    workers = [worker for worker in router.roster if worker.card.model == pool.model]
    states: set[str] = {stream.state for stream in pool.index.streams.values()}
    if len(pool.index.streams) < sum([worker.card.ranks for worker in workers]):
        states.add("none")
    index: IndexKind = "exact" if states == {"exact"} else "mixed"
    if not pool.index.indexed:
        index = "off"
    elif pool.index.exact is None or states <= {"none"}:
        index = "approximate"
    lengths = [worker.card.max_model_len for worker in workers if worker.card.max_model_len is not None]
    counts = pool.counts.outcomes
    return ModelStatus(
        name=pool.model,
        block_size=pool.index.block_size if pool.index.block_size_known else None,
        max_model_len=max(lengths) if lengths else None,
        ready=any(worker.why_not(now, doubts=False) is None for worker in workers),
        workers=len(workers),
        index=index,
        index_pairs=None if pool.index.exact is None else len(pool.index.exact),
        hit_rate=pool.counts.hit_rate,
        inflight=pool.counts.inflight,
        roles=dict(pool.roles.workers),
        handoff=None if pool.roles.wire is None else pool.roles.wire[0],
        handoffs=dict(pool.counts.handoffs) if pool.roles.splits else None,
        media=dict(pool.counts.media) if pool.roles.has("encode") or any(pool.counts.media.values()) else None,
        embedding_bytes=pool.embeddings.bytes,
        awaited=dict(pool.habits.awaited) if any(pool.habits.awaited.values()) else {},
        refused=dict(pool.counts.refused),
        adapters=dict(pool.adapters.counts) if pool.adapters.workers else {},
        ok=counts["ok"],
        rejected=counts["rejected"],
        failed=counts["failed"],
        cancelled=counts["cancelled"],
        expired=counts["expired"],
    )


def _worker_status(pool: ModelPool, worker: RosterWorker, now: Nanos) -> WorkerStatus:
    card = worker.card
    targets, applied, gaps, lost = worker.targets, 0, 0, 0
    requests, prefill_tokens, blocks = 0, 0, 0
    index = pool.index.exact
    resident = [] if index is None else [index.resident(each) for each in targets if pool.index.kv_state(each) in HEARD]
    streams = [stream for target in targets if (stream := pool.index.streams.get(target)) is not None]
    for stream in streams:
        applied, gaps, lost = applied + stream.applied, gaps + stream.gaps, lost + stream.unrecovered
    for target in targets:
        load = pool.active.load(target)
        requests, prefill_tokens = requests + load.requests, prefill_tokens + load.prefill_tokens
        blocks += load.blocks
    state = worker.state if not worker.cordons else "cordoned"
    return WorkerStatus(
        id=card.id,
        model=card.model,
        role=card.role,
        url=card.url,
        engine=card.engine,
        state=state,
        why_not=worker.why_not(now),
        epoch=card.epoch,
        pid=card.pid,
        since=seconds(now - worker.since),
        index=pool.index.kv_state(targets[0]),
        active_requests=requests,
        active_prefill_tokens=prefill_tokens,
        active_blocks=blocks,
        resident_blocks=sum(resident) if resident else None,
        kv_blocks=None if card.kv_blocks is None else card.kv_blocks * card.ranks,
        paired=needs_pair(card),
        block_size=card.block_size,
        requests=worker.requests,
        failures=worker.failures,
        breaker=worker.breaker.state(now),
        kv_events=KvEventsStatus(applied=applied, gaps=gaps, lost=lost) if streams else None,
        stats=card.stats,
        labels=dict(card.labels),
    )


def _status_counts(router: RouterState) -> StatusCounts:
    pools = router.pools.values()
    return StatusCounts(
        inflight=sum(pool.counts.inflight for pool in pools),
        total=sum(pool.counts.inflight + sum(pool.counts.outcomes.values()) for pool in pools),
        **{outcome: sum(pool.counts.outcomes[outcome] for pool in pools) for outcome in OUTCOMES},
    )


def _hit_rate(router: RouterState) -> float | None:
    pools = router.pools.values()
    tokens = sum(pool.counts.prompt_tokens for pool in pools)
    return sum(pool.counts.cached_tokens for pool in pools) / tokens if tokens else None


def status_row(status: RouterStatus) -> StatusRow:
    """Return the figures of a status that are worth a row over time: loads, counts and rates."""
    queued = sum(queue.length for queue in status.queue.values())
    loads = [(w.active_requests, w.active_prefill_tokens, w.active_blocks) for w in status.workers]
    return _row_of(status.requests, status.hit_rate, queued, len(status.workers), loads)


def router_row(router: RouterState) -> StatusRow:
    """Return the `status_row` of a router's status, without a row for each worker: a simulation asks often."""
    targets = [(router.pools[worker.card.model], target) for worker in router.roster for target in worker.targets]
    active = [pool.active.load(target) for pool, target in targets]
    loads = [(load.requests, load.prefill_tokens, load.blocks) for load in active]
    queued = sum(len(pool.queue) for pool in router.pools.values())
    return _row_of(_status_counts(router), _hit_rate(router), queued, len(list(router.roster)), loads)


def _row_of(
    counts: StatusCounts, hit_rate: float | None, queued: int, workers: int, loads: Sequence[tuple[int, int, int]]
) -> StatusRow:
    """Return the figures. ``loads``: requests, prefill tokens and blocks, of each target or worker."""
    requests, prefill_tokens, blocks = map(sum, zip(*loads)) if loads else (0, 0, 0)
    return {
        "inflight": counts.inflight,
        "queued": queued,
        **{outcome: getattr(counts, outcome) for outcome in OUTCOMES},
        "hit_rate": hit_rate,
        "workers": workers,
        "active_requests": requests,
        "active_prefill_tokens": prefill_tokens,
        "active_blocks": blocks,
    }
