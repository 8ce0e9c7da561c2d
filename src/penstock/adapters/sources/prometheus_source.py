"""Traffic source over a Prometheus: increases over a window, of which each reading takes its share.

A window is longer than the time between two readings, since it must span several scrapes. Each reading takes the share
of its own time in the window, so that every request counts once in all, spread over the window that follows it.
"""

import asyncio
import logging
import math
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from penstock.adapters.http_session import HttpSession
from penstock.adapters.sources.traffic_source import ModelReading, Readability, Reading
from penstock.config.settings.planning_settings import PROMETHEUS_TIMEOUT, PrometheusSettings
from penstock.kernel.errors import ConfigError, PenstockError
from penstock.kernel.values import Traffic

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
log = logging.getLogger("penstock.planner")
SCRAPED_WITHIN = 30.0
"""Seconds since the newest scrape beyond which its counts are too old."""


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


class UnreadableMetric(PenstockError):
    """A Prometheus does not answer, or its answer does not fit the query."""


class QueryCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What a query matched when it was tested. ``series``: how many; None where that could not be queried."""

    query: PrometheusQuery
    series: int | None


class _SourceState(msgspec.Struct):
    at: float | None = None
    carried: dict[str, dict[str, float]] = {}
    """Model -> fractions of requests and tokens left after rounding."""
    mean_prompts: dict[str, float] = {}
    """Model -> the mean prompt that was last known."""


class PrometheusSource:
    """A `penstock.adapters.sources.traffic_source.TrafficSource` over a Prometheus.

    Args:
        models: of the config, as spelt there; the label is compared without regard to case.
        window: seconds that a query looks back.
    Raises:
        ConfigError: a file can't be read, or the router's metrics are to serve several models.
    """

    def __init__(self, settings: PrometheusSettings, *, models: Sequence[str], window: float) -> None:
        if settings.throughput_metrics_source == "router" and len(models) != 1:
            raise ConfigError(
                f"the router's metrics are of one model, and the config has {len(models)}",
                hint="set planner.prometheus.throughput_metrics_source=frontend, which tells models apart",
            )
        self.tested: list[QueryCheck] = []
        """What each query matched at the first reading."""
        self.queries: PrometheusQueries = queries(settings.throughput_metrics_source, window, settings.namespace)
        self._settings = settings
        self._models = {model.lower(): model for model in models}
        self._window = window
        self._state = _SourceState()
        self._readability = Readability()
        self._tls = _tls_context(settings)
        self._http = HttpSession(
            lambda: aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=True if self._tls is None else self._tls),
                timeout=aiohttp.ClientTimeout(total=PROMETHEUS_TIMEOUT),
            )
        )
        if settings.token_file is not None:
            self._token()  # a missing file is an error at the start

    async def read(self, at: float) -> Reading:
        try:
            if not self.tested:
                await self._test()
            numbers = await self._numbers()
        except PenstockError as error:
            return Reading(models=dict.fromkeys(self._models.values(), self._readability.unread(at, str(error))))
        since = self._window if self._state.at is None else max(0.0, at - self._state.at)
        seconds = min(since, self._window)  # what was before the window is unknown, not zero
        models = {}
        whole = True
        for key, model in self._models.items():
            values = {name: of_models.get(key) for name, of_models in numbers.items()}
            read = self._model(model, values, seconds) if values["alive"] is not None else self._absent(model, numbers)
            if isinstance(read, str):
                whole = False
                models[model] = self._readability.unread(at, read)
            else:
                models[model] = read
        if whole:
            self._readability.read(at)
        self._state.at = at
        return Reading(models=models)

    def snapshot(self) -> bytes:
        return msgspec.json.encode(self._state)

    def restore(self, state: bytes) -> None:
        self._state = msgspec.json.decode(state, type=_SourceState)

    def describe(self) -> str:
        return f"Prometheus at {self._settings.url} ({self._settings.throughput_metrics_source} metrics)"

    async def close(self) -> None:
        await self._http.close()

    # --- counts -------------------------------------------------------------------------------------------------------

    def _model(self, model: str, values: Mapping[str, float | None], seconds: float) -> ModelReading | str:
        """Return one model's traffic, or why it can't be read."""
        age = values["alive"]
        assert age is not None
        if age > max(SCRAPED_WITHIN, self._window):
            return f"the newest scrape is {age:.0f} s old"
        started, ended = values["started"], values["ended"]
        at_end = started is None
        demand = ended if started is None else started
        if demand is None:
            # The source is scraped, and has no such series yet: no request has named the model.
            demand = 0.0
        if not math.isfinite(demand):
            return f"the number of requests is {demand}"
        isl = _histogram_mean(values, "input")
        if isl is not None:
            self._state.mean_prompts[model] = isl
        isl = self._state.mean_prompts.get(model)
        if isl is None and demand > 0:
            return "no request has ended yet, so how long their prompts are is not known"
        share = seconds / self._window
        answered, osl = _count_and_sum(values, "output")
        prompts = _count_and_sum(values, "input")
        reported, cached = self._cached(values, prompts)
        ttft, itl = _count_and_sum(values, "ttft"), _count_and_sum(values, "itl")
        counts = {
            "arrived": demand,
            "prompt_tokens": demand * (isl or 0.0),
            "answered": answered,
            "answered_prompt_tokens": prompts[1],
            "output_tokens": osl,
            "lost": _finite(values.get("lost")),
            "cached_tokens": cached,
            "cache_reported_tokens": reported,
            "ttft_count": ttft[0],
            "itl_count": itl[0],
        }
        whole = self._whole(model, {name: count * share for name, count in counts.items()})
        traffic = Traffic(
            seconds=seconds,
            **whole,  # type: ignore[arg-type]
            ttft_sum=_share_of_sum(ttft, whole["ttft_count"]),
            itl_sum=_share_of_sum(itl, whole["itl_count"]),
            duration_sum=_share_of_sum(_count_and_sum(values, "duration"), whole["answered"]),
            at_end=at_end,
        )
        queued = values.get("queued")
        return ModelReading(traffic=traffic, queued=None if queued is None else round(queued))

    def _absent(self, model: str, numbers: Mapping[str, Mapping[str, float]]) -> str:
        """Return why nothing is known of a model: another model's series are there, or none are."""
        others = sorted(name for name in numbers["alive"] if name)
        if others:
            return f"no series names the model {model}: those that are scraped name {', '.join(others)}"
        return self._nothing_scraped()

    def _nothing_scraped(self) -> str:
        text = f"nothing is scraped: {self.queries.alive.selector} has no series at {self._settings.url}"
        if self._settings.namespace is None:
            return text
        return f"{text}; planner.prometheus.namespace is to be unset where no series has the label dynamo_namespace"

    def _whole(self, model: str, counts: Mapping[str, float]) -> dict[str, int]:
        """Return whole numbers; what is left over is added to the next ones, so that nothing is lost."""
        carried = self._state.carried.setdefault(model, {})
        whole = {}
        for name, count in counts.items():
            total = count + carried.get(name, 0.0)
            whole[name] = math.floor(total + 1e-6)
            carried[name] = total - whole[name]
        return whole

    @staticmethod
    def _cached(values: Mapping[str, float | None], prompts: tuple[float, float]) -> tuple[float, float]:
        """Return the prompt tokens whose cached part is reported, and that cached part."""
        if "hits_count" in values:
            number, share = _count_and_sum(values, "hits")
            return (prompts[1], prompts[1] * share / number) if number else (0.0, 0.0)
        number, tokens = _count_and_sum(values, "cached")
        return (prompts[1], tokens) if number else (0.0, 0.0)

    # --- queries ------------------------------------------------------------------------------------------------------

    async def _answers(self, text: Callable[[PrometheusQuery], str]) -> list[tuple[PrometheusQuery, dict[str, float]]]:
        """Run each query in the form that ``text`` gives it, first the one that shows whether the source is scraped.

        A first scrape may land between two queries. In this order no query finds "no series" of a frontend for which
        the first query found a scrape.
        """
        alive, others = self.queries.alive, self.queries.numbers
        first = await self._ask(text(alive))
        answers = await asyncio.gather(*(self._ask(text(query)) for query in others))
        return [(alive, first), *zip(others, answers, strict=True)]

    async def _numbers(self) -> dict[str, dict[str, float]]:
        return {query.name: answer for query, answer in await self._answers(lambda query: query.text)}

    async def _test(self) -> None:
        """Query how many series each query reads, and report those that read none."""
        tested = [
            QueryCheck(query=query, series=round(sum(map(_finite, count.values()))))
            for query, count in await self._answers(lambda query: f"count({query.selector})")
        ]
        silent = [one.query for one in tested if not one.series]
        # Until the source is scraped it is tested again: a frontend may start later.
        if len(silent) == len(tested):
            names = ", ".join(sorted({query.selector for query in silent}))
            raise UnreadableMetric(f"none of the queries matches anything at {self._settings.url}: {names}")
        if self.queries.alive in silent:
            raise UnreadableMetric(self._nothing_scraped())
        self.tested = tested
        for query in silent:
            log.warning(
                "query %s matches nothing at %s: %s has no series yet", query.name, self._settings.url, query.selector
            )

    async def _ask(self, query: str) -> dict[str, float]:
        """Return model (lower case) -> value; where series have no model, the same for every model.

        Raises:
            UnreadableMetric: there is no answer, or it is not from a Prometheus.
        """
        url = f"{self._settings.url.rstrip('/')}/api/v1/query"
        token = self._token()
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        try:
            post = self._http.session.post(url, data={**self._settings.params, "query": query}, headers=headers)
            async with post as answer:
                raw = await answer.read()
                if answer.status != 200:
                    answer_text = raw[:200].decode(errors="replace")
                    raise UnreadableMetric(f"{self._settings.url} answers {answer.status} to {query}: {answer_text}")
            body: Any = msgspec.json.decode(raw)
            result = body["data"]["result"]
            values = {str(one["metric"].get("model", "")).lower(): float(one["value"][1]) for one in result}
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise UnreadableMetric(f"the Prometheus at {self._settings.url} does not answer: {why}") from error
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise UnreadableMetric(
                f"{self._settings.url} gives no answer of a Prometheus to {query}: {error}"
            ) from error
        if self.queries.by_model or not values:
            return values
        return dict.fromkeys(self._models, next(iter(values.values())))

    def _token(self) -> str | None:
        if self._settings.token_file is None:
            return None
        try:
            return Path(self._settings.token_file).read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"planner.prometheus.token_file {self._settings.token_file} can't be read: {error.strerror}",
                hint="name a file that this user may read",
            ) from error


def _tls_context(settings: PrometheusSettings) -> ssl.SSLContext | None:
    if not settings.url.startswith("https"):
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"planner.prometheus.ca {settings.ca} can't be read: {error}", hint="name a file of PEM certificates"
        ) from error
    if not settings.verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _count_and_sum(values: Mapping[str, float | None], name: str) -> tuple[float, float]:
    """Return count and sum of a histogram; a sum that is no number makes its count unknown, too."""
    total, number = values.get(f"{name}_sum"), values.get(f"{name}_count")
    if total is None or number is None or not math.isfinite(total) or not math.isfinite(number):
        return 0.0, 0.0
    return number, total


def _histogram_mean(values: Mapping[str, float | None], name: str) -> float | None:
    number, total = _count_and_sum(values, name)
    return total / number if number > 0 else None


def _share_of_sum(pair: tuple[float, float], count: int) -> float:
    """Return the sum that belongs to so many of the counted ones."""
    number, total = pair
    return total * count / number if number > 0 else 0.0
