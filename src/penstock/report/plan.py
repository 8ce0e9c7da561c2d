"""What will a bench send? Turns its options into planned requests with their bodies."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.report.loadgen import Shot
from penstock.report.options import BenchOptions
from penstock.traffic import slices
from penstock.traffic.arrivals import arrivals
from penstock.traffic.bound import InfiniteCache
from penstock.traffic.mooncake import MooncakeTrace
from penstock.traffic.prompts import PromptMaker
from penstock.traffic.request import TrafficRequest
from penstock.traffic.workloads import workload

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(slots=True)
class Plan:
    """Requests in order of arrival, made as they are asked for; what was asked for is kept by its number."""

    options: BenchOptions
    source: Iterator[TrafficRequest]
    total: int | None
    """How many there will be, where that is known beforehand."""
    trace: MooncakeTrace | None = None
    asked: dict[int, TrafficRequest] = field(default_factory=dict)

    def shots(self, model: str, cache: InfiniteCache | None) -> Iterator[Shot]:
        """Yield each request with its body; ``cache`` is shown every prompt, for the bound."""
        options = self.options
        maker = PromptMaker(options.seed, tokens=options.token_range)
        head = b'{"model":' + msgspec.json.encode(model)
        for number, request in enumerate(self.source):
            if cache is not None:
                cache.hit(request)
            chat = request.messages is not None
            prompt = msgspec.json.encode(request.messages) if chat else maker.json(request)
            field_name = b',"messages":' if chat else b',"prompt":'
            tail = b',"max_tokens":%d%s}' % (request.osl, _FIXED)
            # What is kept must stay small: the prompt itself is not looked at again.
            self.asked[number] = msgspec.structs.replace(request, hash_ids=[], messages=None, token_ids=None)
            yield Shot(
                key=number,
                due=request.at,
                path=CHAT if chat else COMPLETIONS,
                body=b"".join((head, field_name, prompt, tail)),
                headers=_headers(options, number, request),
            )


_FIXED = (
    b',"ignore_eos":true,"temperature":0,"stream":true,'
    b'"stream_options":{"include_usage":true,"continuous_usage_stats":true}'
)
"""Outputs as long as planned, whatever the model would say; running usage, so that tokens per chunk are known."""


@contextmanager
def open_plan(options: BenchOptions) -> Iterator[Plan]:
    """Open the trace or the workload.

    Raises:
        ConfigError: the trace can't be read.
    """
    if options.trace is None:
        yield _cut(options, _workload(options), None, None)
        return
    try:
        file = options.trace.open("rb")
    except OSError as error:
        raise ConfigError(f"the trace {options.trace} can't be read: {error.strerror}") from error
    with file:
        trace = MooncakeTrace(file, block_size=options.trace_block_size, skip_bad=options.skip_bad)
        # Kept whole: a trace's hash ids are a few MB, and its rows need not be in order of time.
        requests = sorted(trace, key=lambda request: request.at)
        found = slices.rebase(slices.by_time(requests, options.trace_start, options.trace_end), options.trace_start)
        if options.spread_ties:
            found = slices.spread_ties(found)
        kept = list(slices.scale_rate(found, options.speed_up))
        if not kept:
            raise ConfigError(
                f"the trace {options.trace} has no request in the slice that was asked for",
                hint="check the trace's own clock: its times are milliseconds, the slice's are seconds",
            )
        yield _cut(options, iter(kept), len(kept), trace)


def _workload(options: BenchOptions) -> Iterator[TrafficRequest]:
    rng, own = random.Random(options.seed), random.Random(options.seed + 1)
    name = options.workload or "chat"
    found = workload(
        name, options.rate, rng, form=options.form, starts=lambda rate: arrivals(options.arrivals, rate, own)
    )
    return slices.scale_rate(found, options.speed_up)


def _cut(
    options: BenchOptions, source: Iterator[TrafficRequest], known: int | None, trace: MooncakeTrace | None
) -> Plan:
    total = known
    if options.requests is not None:
        source = itertools.islice(source, options.requests)
        total = options.requests if known is None else min(known, options.requests)
    duration = options.duration
    if duration is None and options.trace is None and options.requests is None:
        duration = DURATION
    if duration is not None:
        until = duration
        source = itertools.takewhile(lambda request: request.at < until, source)
        total = None
    return Plan(options=options, source=source, total=total, trace=trace)


DURATION = 60.0
"""Seconds of a workload run where neither a number of requests nor a duration was given."""


def _headers(options: BenchOptions, number: int, request: TrafficRequest) -> dict[str, str]:
    headers = {"content-type": "application/json", "x-request-id": request_id(options, number)}
    if options.api_key:
        headers["authorization"] = f"Bearer {options.api_key}"
    if request.session is not None:
        headers["x-penstock-session-id"] = request.session
    if request.kind is not None:
        headers["x-penstock-context-type"] = request.kind
    return headers


def request_id(options: BenchOptions, number: int) -> str:
    """Return the id that request ``number`` is sent under, unless the server gives it another."""
    return f"bench-{options.seed}-{number}"
