"""Prometheus queries of a planner: each number of a model's traffic, under Dynamo's metric names."""

from typing import Literal, NamedTuple

MetricsSource = Literal["frontend", "router"]

FRONTEND, ROUTER = "dynamo_frontend_", "dynamo_component_router_"
SUMMED = {
    "input": "input_sequence_tokens",
    "output": "output_sequence_tokens",
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "duration": "request_duration_seconds",
    "cached": "cached_tokens",
    "hits": "kv_hit_rate",
}
"""Part of a histogram's name -> the histogram whose sum and count are queried."""
MARKERS = {
    "frontend": ("model_ready", "model_context_length", "model_kv_cache_block_size", "requests_total"),
    "router": ("worker_registered", "requests_total"),
}
"""Series that stand in every scrape; one of them is enough. Frontends have ``model_ready`` from 1.5 on; all from 1.0 on
have the gauges of a model's card, once a worker has registered, and the counter, once a request has come."""
FRONTEND_HAS = ("input", "output", "ttft", "itl", "duration", "cached")
ROUTER_HAS = ("input", "output", "ttft", "itl", "hits")


class PrometheusQuery(NamedTuple):
    """One query. ``selector``: the series that it reads, for a test of the query."""

    name: str
    text: str
    selector: str


class PrometheusQueries(NamedTuple):
    """All queries of one source. ``alive``: answers where the source is scraped, with the age of the newest scrape.

    ``by_model``: whether series have a label for their model.
    """

    numbers: tuple[PrometheusQuery, ...]
    alive: PrometheusQuery
    by_model: bool


def queries(source: MetricsSource, window: float, namespace: str | None) -> PrometheusQueries:
    """Return the queries.

    Args:
        window: seconds that a query looks back.
        namespace: required value of the label ``dynamo_namespace``, in every query; None: no filter. The router writes
            it with underscores.
    """
    span = f"{max(1, round(window * 1000))}ms"
    if source == "frontend":
        prefix, by, label = FRONTEND, " by (model)", namespace
    else:
        prefix, by = ROUTER, ""
        label = None if namespace is None else namespace.replace("-", "_")
    own = "" if label is None else f'dynamo_namespace="{_escaped(label)}"'

    def series(metric: str, more: str = "") -> str:
        inside = ",".join(part for part in (own, more) if part)
        return f"{prefix}{metric}{{{inside}}}" if inside else f"{prefix}{metric}"

    def counted(name: str, metric: str, more: str = "") -> PrometheusQuery:
        selector = series(metric, more)
        return PrometheusQuery(name, f"sum{by} (increase({selector}[{span}]))", selector)

    numbers = [counted("started", "requests_started_total"), counted("ended", "requests_total")]
    if source == "frontend":
        # A request that its client cancelled, or sent wrong, is not lost demand, nor is a shadow's copy.
        theirs = 'status="error",error_type!~"cancelled|validation|not_found",endpoint!="shadow"'
        numbers.append(counted("lost", "requests_total", theirs))
        pending = series("router_queue_pending_requests")
        numbers.append(PrometheusQuery("queued", f"sum{by} ({pending})", pending))
    for part in FRONTEND_HAS if source == "frontend" else ROUTER_HAS:
        for end in ("sum", "count"):
            numbers.append(counted(f"{part}_{end}", f"{SUMMED[part]}_{end}"))
    markers = [series(metric) for metric in MARKERS[source]]
    newest = " or ".join(f"timestamp({marker})" for marker in markers)
    alive = PrometheusQuery("alive", f"time() - max{by} ({newest})", " or ".join(markers))
    return PrometheusQueries(tuple(numbers), alive, source == "frontend")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
