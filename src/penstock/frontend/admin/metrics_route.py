"""/metrics route: this process's Prometheus metrics, or the sums over all frontend processes; rows of metrics.csv."""

import asyncio
import logging
import time
from pathlib import Path

import msgspec
from aiohttp import web

from penstock import extension
from penstock.adapters.engines.dialects.kv_transfer_protocol import TIER_SOCKET
from penstock.adapters.telemetry.frontend_metrics import SAME_IN_EVERY_PROCESS
from penstock.adapters.telemetry.prometheus_text import CONTENT_TYPE, merge
from penstock.frontend.admin.frontend_peers import TIMEOUT, texts_from_peers
from penstock.frontend.service import Service, service_of
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import WorkerCard
from penstock.router.status import status_row
from penstock.runtime.node.node_status import NodeStatus

log = logging.getLogger("penstock.frontend")


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics. Processes share the port, so the one that answers adds up all; ``?scope=process`` selects one."""
    service = service_of(request)
    text = scrape(service)
    if request.query.get("scope") != "process":
        others = await texts_from_peers(service, "/metrics?scope=process")
        if others:
            text = merge([text, *others], SAME_IN_EVERY_PROCESS)
        text += await _of_tiers(service)
    return web.Response(body=text.encode(), headers={"content-type": CONTENT_TYPE})


async def _of_tiers(service: Service) -> str:
    """Return the metrics of the tier processes on this machine, with their engines' names; silent ones are left out."""
    sockets = [(card, card.labels[TIER_SOCKET]) for card in service.cluster.cards() if TIER_SOCKET in card.labels]
    if not sockets or not extension.offers("telemetry", "tiers"):
        return ""
    text_of = extension.entry("telemetry", "tiers")

    async def page(card: WorkerCard, socket: str) -> str:
        try:
            async with asyncio.timeout(TIMEOUT):
                text: str = await text_of(Path(socket), card.id)
                return text
        except (PenstockError, msgspec.MsgspecError, ValueError, KeyError, OSError) as error:  # or it is far away
            log.debug("no metrics of the tiers of %s: %s", card.id, error)
            return ""

    texts = [text for text in await asyncio.gather(*(page(*each) for each in sockets)) if text.strip()]
    return merge(texts) if texts else ""


def scrape(service: Service) -> str:
    """Copy values that are kept elsewhere into the metrics and return their text."""
    metrics, cluster = service.metrics, service.cluster
    status = cluster.status()
    metrics.read_status(status, cluster.cards(), time.monotonic() - service.started)
    for crash in status.crashes:
        metrics.restarts.set(crash.kind, crash.name, to=crash.count)
    metrics.read_kv_events(cluster.kv_events())
    for model, tokenizer in service.tokenizers.items():
        if tokenizer is not None:
            metrics.read_tokenizer(
                model,
                tokenizer.hits,
                tokenizer.misses,
                tokenizer.tokens_cached,
                tokenizer.tokens_encoded,
                tokenizer.cache_bytes,
            )
    counters = cluster.counters()
    metrics.loop_longest.set(to=counters.get("loop_longest", 0.0))
    metrics.loop_recent.set(to=counters.get("loop_recent", 0.0))
    metrics.loop_stalls.set(to=counters.get("loop_stalls", 0.0))
    metrics.router_faults.set(to=counters.get("router_faults", 0.0))
    metrics.kv_lag.set(to=counters.get("kv_lag", 0.0))
    metrics.kv_lag_recent.set(to=counters.get("kv_lag_longest", 0.0))
    metrics.kv_skipped.set(to=counters.get("kv_skipped", 0.0))
    metrics.kv_from_peers.set(to=counters.get("kv_from_peers", 0.0))
    metrics.kv_sources.set("waiting", to=counters.get("kv_waiting", 0.0))
    metrics.kv_sources.set("joining", to=counters.get("kv_joining", 0.0))
    metrics.tasks.set(to=len(asyncio.all_tasks()))
    metrics.tokenize_pending.set(to=service.prompts.pending)
    metrics.template_failures.set(to=service.prompts.template_failures)
    sinks = {"requests.jsonl": service.records, "copies.jsonl": service.copies, "decisions.jsonl": service.decisions}
    for name, sink in sinks.items():
        metrics.records_lost.set(name, to=getattr(sink, "lost", 0))
    if service.audit is not None:
        metrics.audit_lost.set(to=service.audit.lost)
        metrics.audit_failing.set(to=float(bool(service.audit.failure)))
    for kind, count in cluster.notes().items():
        metrics.noted.set(kind, to=count)
    media = service.media
    for result, count in (("fetched", media.fetched), ("cached", media.hits), ("refused", media.refused)):
        metrics.media_fetches.set(result, to=count)
    metrics.media_bytes.set(to=media.bytes)
    metrics.media_cache.set(to=media.cache_size)
    metrics.releases.set("fetched", to=service.exchanges.stages.released)
    metrics.releases.set("failed", to=service.exchanges.stages.release_failures)
    for why, count in service.gate.peer_guard.refused.items():
        metrics.noted.set(f"peer_request_{why.replace(' ', '_')}", to=count)
    return metrics.render()


def csv_row(service: Service, status: NodeStatus) -> dict[str, float | None]:
    """Return one row of metrics.csv: seconds since the start of the run; loads, counts and rates of this process."""
    return {
        "seconds": service.timeline_store.now,
        **status_row(status),
        "loop_block_recent": service.cluster.counters().get("loop_recent"),
    }
