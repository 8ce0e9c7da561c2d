"""What is asked of a Prometheus? Each number of a model's traffic as one query, under the field's metric names."""

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
"""Part of a histogram's name -> the histogram, of which sum and count are asked."""
FRONTEND_HAS = ("input", "output", "ttft", "itl", "duration", "cached")
ROUTER_HAS = ("input", "output", "ttft", "itl", "hits")


class Query(NamedTuple):
    """One query. ``selector``: the series that it reads, by which it tests itself."""

    name: str
    text: str
    selector: str


class Queries(NamedTuple):
    """All queries of one source. ``alive``: answers where the source is scraped, and says how old the newest one is.

    ``by_model``: whether series tell of which model they are.
    """

    numbers: tuple[Query, ...]
    alive: Query
    by_model: bool


def queries(source: MetricsSource, window: float, namespace: str | None) -> Queries:
    """Return what is asked.

    Args:
        window: seconds that a query looks back.
        namespace: value of the label ``dynamo_namespace`` that counts; None asks for none. The router writes it with
            underscores.
    """
    span = f"{max(1, round(window * 1000))}ms"
    if source == "frontend":
        prefix, by, label = FRONTEND, " by (model)", namespace
    else:
        prefix, by = ROUTER, ""
        label = None if namespace is None else namespace.replace("-", "_")
    own = "" if label is None else f'dynamo_namespace="{_escaped(label)}"'

    def counted(name: str, metric: str, more: str = "") -> Query:
        inside = ",".join(part for part in (own, more) if part)
        selector = f"{metric}{{{inside}}}" if inside else metric
        return Query(name, f"sum{by} (increase({selector}[{span}]))", selector)

    found = [
        counted("started", f"{prefix}requests_started_total"),
        counted("ended", f"{prefix}requests_total"),
    ]
    if source == "frontend":
        # Whom its client cancelled, or got wrong, is nobody's loss.
        found.append(
            counted("lost", f"{prefix}requests_total", 'status="error",error_type!~"cancelled|validation|not_found"')
        )
    for part in FRONTEND_HAS if source == "frontend" else ROUTER_HAS:
        for end in ("sum", "count"):
            found.append(counted(f"{part}_{end}", f"{prefix}{SUMMED[part]}_{end}"))
    marker = f"{prefix}model_ready" if source == "frontend" else f"{prefix}worker_registered"
    selector = f"{marker}{{{own}}}" if own else marker
    grouped = f"time() - max{by} (timestamp({selector}))"
    return Queries(tuple(found), Query("alive", grouped, selector), source == "frontend")


def waiting(queried: Queries) -> Sequence[Query]:
    """Return what is asked of how many wait now."""
    if not queried.by_model:
        return ()
    metric = f"{FRONTEND}router_queue_pending_requests"
    return (Query("queued", f"sum by (model) ({metric})", metric),)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
