"""What will a bench send? Turns its options into planned requests with their bodies."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from penstock.report.loadgen import Shot
from penstock.report.options import BenchOptions
from penstock.report.source import cut, of_trace, of_workload
from penstock.traffic.bound import InfiniteCache
from penstock.traffic.numbering import numbered
from penstock.traffic.prompts import PromptMaker
from penstock.traffic.request import TrafficRequest
from penstock.traffic.rows import Trace

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(slots=True)
class Plan:
    """Requests in order of arrival, made as they are asked for; what was asked for is kept by its number."""

    options: BenchOptions
    source: Iterator[TrafficRequest]
    total: int | None
    """How many there will be, where that is known beforehand."""
    trace: Trace | None = None
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


def plan_of(options: BenchOptions) -> Plan:
    """Read the trace or begin the workload.

    Raises:
        ConfigError: the trace can't be read, or the workload can't be had.
    """
    source: Iterator[TrafficRequest]
    trace: Trace | None
    if options.trace is None:
        total, trace = options.requests, None
        source = of_workload(options)
    else:
        kept, trace = of_trace(options)
        total = len(kept) if options.requests is None else min(len(kept), options.requests)
        source = numbered(kept)  # every prompt must be made, those of which only lengths are known included
    if options.duration is not None:
        total = None
    return Plan(options=options, source=cut(options, source), total=total, trace=trace)


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
