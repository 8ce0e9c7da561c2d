"""What does a scrape of /metrics show? This process's counts, or those of all frontend processes added up."""

import time

from aiohttp import web

from penstock.adapters.telemetry.exposition import CONTENT_TYPE, merge
from penstock.adapters.telemetry.prometheus import SEEN_BY_ALL
from penstock.frontend.admin import from_peers
from penstock.frontend.context import service_of
from penstock.frontend.service import Service


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics. Processes share the port, so whichever is asked adds up all; ``?scope=process`` asks for one."""
    service = service_of(request)
    text = scrape(service)
    if request.query.get("scope") != "process":
        others = await from_peers(service, "/metrics?scope=process", request, text=True)
        if others:
            text = merge([text, *others], SEEN_BY_ALL)
    return web.Response(body=text.encode(), headers={"content-type": CONTENT_TYPE})


def scrape(service: Service) -> str:
    """Read what is kept elsewhere into the metrics and return their text."""
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
    found.tokenize_pending.set(to=service.prompts.pending)
    found.template_failures.set(to=service.prompts.template_failures)
    for name, sink in (("requests.jsonl", service.records), ("decisions.jsonl", service.decisions)):
        found.records_lost.set(name, to=getattr(sink, "lost", 0))
    for kind, count in cluster.notes().items():
        found.noted.set(kind, to=count)
    return found.render()


def csv_row(service: Service) -> dict[str, float | None]:
    """Return one row of metrics.csv: seconds since the start, loads, counts and rates of this process."""
    status = service.cluster.status()
    counters = service.cluster.counters()
    workers = status["workers"]
    requests = status["requests"]
    return {
        "seconds": time.monotonic() - service.started,
        "inflight": requests["inflight"],
        "queued": sum(queue["length"] for queue in status["queue"].values()),
        "ok": requests["ok"],
        "failed": requests["failed"],
        "rejected": requests["rejected"],
        "cancelled": requests["cancelled"],
        "expired": requests.get("expired"),
        "hit_rate": status["hit_rate"],
        "workers": len(workers),
        "active_requests": sum(worker["active_requests"] for worker in workers),
        "active_prefill_tokens": sum(worker["active_prefill_tokens"] for worker in workers),
        "active_blocks": sum(worker["active_blocks"] for worker in workers),
        "loop_block_recent": counters.get("loop_recent"),
    }
