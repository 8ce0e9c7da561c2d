"""Prometheus queries of a planner: each number of a model's traffic, under Dynamo's metric names."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

MetricsSource = Literal["frontend", "router"]

FRONTEND, ROUTER = "dynamo_frontend_", "dynamo_component_router_"
COUNTED = ("started", "ended", "lost")
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
        namespace: required value of the label ``dynamo_namespace``; None: no filter. The router writes it with
            underscores.
    """
    span = f"{max(1, round(window * 1000))}ms"
    if source == "frontend":
        prefix, by, label = FRONTEND, " by (model)", namespace
    else:
        prefix, by = ROUTER, ""
        label = None if namespace is None else namespace.replace("-", "_")
    own = "" if label is None else f'dynamo_namespace="{_escaped(label)}"'

    def counted(name: str, metric: str, more: str = "") -> PrometheusQuery:
        inside = ",".join(part for part in (own, more) if part)
        selector = f"{metric}{{{inside}}}" if inside else metric
        return PrometheusQuery(name, f"sum{by} (increase({selector}[{span}]))", selector)

    counters = [
        counted("started", f"{prefix}requests_started_total"),
        counted("ended", f"{prefix}requests_total"),
    ]
    if source == "frontend":
        # A request that its client cancelled, or sent wrong, is not lost demand, nor is a shadow's copy.
        theirs = 'status="error",error_type!~"cancelled|validation|not_found",endpoint!="shadow"'
        counters.append(counted("lost", f"{prefix}requests_total", theirs))
    for part in FRONTEND_HAS if source == "frontend" else ROUTER_HAS:
        for end in ("sum", "count"):
            counters.append(counted(f"{part}_{end}", f"{prefix}{SUMMED[part]}_{end}"))
    marker = f"{prefix}model_ready" if source == "frontend" else f"{prefix}worker_registered"
    selector = f"{marker}{{{own}}}" if own else marker
    grouped = f"time() - max{by} (timestamp({selector}))"
    return PrometheusQueries(tuple(counters), PrometheusQuery("alive", grouped, selector), source == "frontend")


def waiting(queried: PrometheusQueries) -> Sequence[PrometheusQuery]:
    """Return the queries for how many requests wait now."""
    if not queried.by_model:
        return ()
    metric = f"{FRONTEND}router_queue_pending_requests"
    return (PrometheusQuery("queued", f"sum by (model) ({metric})", metric),)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
