"""/metrics route: this process's Prometheus metrics, or the sums over all frontend processes; rows of metrics.csv."""

import asyncio
import time

from aiohttp import web

from penstock.adapters.telemetry.frontend_metrics import SAME_IN_EVERY_PROCESS
from penstock.adapters.telemetry.prometheus_text import CONTENT_TYPE, merge
from penstock.frontend.admin.frontend_peers import from_peers
from penstock.frontend.http.request_context import service_of
from penstock.frontend.service import Service
from penstock.router.status import status_row


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics. Processes share the port, so the one that answers adds up all; ``?scope=process`` selects one."""
    service = service_of(request)
    text = scrape(service)
    if request.query.get("scope") != "process":
        others = await from_peers(service, "/metrics?scope=process", text=True)
        if others:
            text = merge([text, *others], SAME_IN_EVERY_PROCESS)
    return web.Response(body=text.encode(), headers={"content-type": CONTENT_TYPE})


def scrape(service: Service) -> str:
    """Copy values that are kept elsewhere into the metrics and return their text."""
    found, cluster = service.metrics, service.cluster
    found.read_status(cluster.status(), cluster.cards(), time.monotonic() - service.started)
    found.read_kv_events(cluster.kv_events())
    for model, tokenizer in service.tokenizers.items():
        if tokenizer is not None:
            found.read_tokenizer(
                model,
                tokenizer.hits,
                tokenizer.misses,
                tokenizer.tokens_cached,
                tokenizer.tokens_encoded,
                tokenizer.cache_bytes,
            )
    counters = cluster.counters()
    found.loop_longest.set(to=counters.get("loop_longest", 0.0))
    found.loop_recent.set(to=counters.get("loop_recent", 0.0))
    found.loop_stalls.set(to=counters.get("loop_stalls", 0.0))
    found.router_faults.set(to=counters.get("router_faults", 0.0))
    found.tasks.set(to=len(asyncio.all_tasks()))
    found.tokenize_pending.set(to=service.prompts.pending)
    found.template_failures.set(to=service.prompts.template_failures)
    for name, sink in (("requests.jsonl", service.records), ("decisions.jsonl", service.decisions)):
        found.records_lost.set(name, to=getattr(sink, "lost", 0))
    for kind, count in cluster.notes().items():
        found.noted.set(kind, to=count)
    found.releases.set("fetched", to=service.handoffs.released)
    found.releases.set("failed", to=service.handoffs.release_failures)
    for why, count in service.peer_guard.refused.items():
        found.noted.set(f"peer_request_{why.replace(' ', '_')}", to=count)
    return found.render()


def csv_row(service: Service) -> dict[str, float | None]:
    """Return one row of metrics.csv: seconds since the start of the run; loads, counts and rates of this process."""
    return {
        "seconds": service.seen.now,
        **status_row(service.cluster.status()),
        "loop_block_recent": service.cluster.counters().get("loop_recent"),
    }
