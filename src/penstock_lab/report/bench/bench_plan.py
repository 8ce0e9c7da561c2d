"""Plan of a bench: its options, and the requests that it sends."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.kernel.errors import ConfigError
from penstock_lab.report.bench.load_generator import PlannedShot
from penstock_lab.report.run.run_summary import USUAL
from penstock_lab.report.traffic_options import TrafficOptions, cut, of_trace, of_workload
from penstock_lab.traffic.formats.trace_rows import TraceRequests, numbered
from penstock_lab.traffic.hit_rate_bound import InfiniteCache
from penstock_lab.traffic.prompt_maker import TOKENS, PromptMaker
from penstock_lab.traffic.traffic_request import TrafficRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(TrafficOptions):
    """One run of the load generator, as ``penstock bench`` takes it. Times in seconds, lengths in tokens.

    Args:
        url: of the server, with or without /v1.
        model: the server's name for it; unset where it serves only one.
        max_inflight: an arrival that finds so many in flight is not sent, and makes the run invalid.
        out: folder in which the run folder is made.
        slo_ttft, slo_itl: service level for goodput: TTFT and the request's mean ITL.
        timeout: a request that has not ended after so long is given up.
        token_range: ids [low, high) for token prompts.
        block_size: of the engine, for the bound of an infinite cache; unset asks the server.
        strict: whether a measurement in doubt, since generator or machine were at their limit, ends with status 1.
    """

    url: str
    model: str | None = None
    max_inflight: int = 2048
    json: bool = False
    out: Path = Path("runs")
    slo_ttft: float | None = USUAL.ttft
    slo_itl: float | None = USUAL.itl
    api_key: str | None = None
    timeout: float = 600.0
    token_range: tuple[int, int] = TOKENS
    block_size: int | None = None
    html: bool = True
    strict: bool = False

    def check(self) -> None:
        """Raise `ConfigError` naming every invalid option."""
        wrong: list[str] = []
        if (self.trace is None) == (self.workload is None):
            wrong.append("give either a trace or a workload")
        if not self.url.startswith(("http://", "https://")):
            wrong.append(f"the URL must begin with http:// or https://, not {self.url!r}")
        for name in ("rate", "speed_up", "timeout", "max_inflight"):
            if not getattr(self, name) > 0:
                wrong.append(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("requests", "duration", "slo_ttft", "slo_itl", "block_size", "trace_block_size"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                wrong.append(f"{name} must be above 0, not {value}")
        if self.trace_end is not None and self.trace_end <= self.trace_start:
            wrong.append(f"the slice of the trace ends at {self.trace_end} s, before it begins")
        low, high = self.token_range
        if not 0 <= low < high - 1:
            wrong.append(f"the token range needs at least 2 ids, not [{low}, {high})")
        if wrong:
            raise ConfigError("; ".join(wrong), hint="see penstock bench --help")

    @property
    def text(self) -> bool:
        """Whether prompts are text, whose tokens only the server knows."""
        return self.trace is None and self.form == "text"

    @property
    def base(self) -> str:
        """The URL without /v1 and without a slash at its end."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(slots=True)
class BenchPlan:
    """Requests in order of arrival, made on demand; each one sent is kept by its number."""

    options: BenchOptions
    source: Iterator[TrafficRequest]
    total: int | None
    """Number of requests, where it is known beforehand."""
    trace: TraceRequests | None = None
    requests: dict[int, TrafficRequest] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)
    """Tokens of each open request's prompt that an infinite cache had at that time."""
    tag: str = field(default_factory=lambda: secrets.token_hex(4))
    """Distinguishes the requests of this run from those of other runs on the same server."""

    def shots(self, model: str, cache: InfiniteCache | None) -> Iterator[PlannedShot]:
        """Yield each request with its body; ``cache`` gets every prompt, for the bound."""
        options = self.options
        maker = PromptMaker(options.seed, tokens=options.token_range)
        head = b'{"model":' + msgspec.json.encode(model)
        for number, request in enumerate(self.source):
            if cache is not None:
                self.hits[number] = cache.hit(request)
            chat = request.messages is not None
            prompt = msgspec.json.encode(request.messages) if chat else maker.json(request)
            field_name = b',"messages":' if chat else b',"prompt":'
            tail = b',"max_tokens":%d%s}' % (request.osl, _FIXED)
            # These entries must stay small: the prompt itself is not read again.
            self.requests[number] = msgspec.structs.replace(request, hash_ids=[], messages=None, token_ids=None)
            yield PlannedShot(
                key=number,
                due=request.at,
                path=CHAT if chat else COMPLETIONS,
                body=b"".join((head, field_name, prompt, tail)),
                headers=_request_headers(options, self.id_of(number), request),
            )

    def id_of(self, number: int) -> str:
        """Return the id that request ``number`` is sent under, unless the server gives it another."""
        return f"bench-{self.tag}-{number}"


_FIXED = (
    b',"ignore_eos":true,"temperature":0,"stream":true,'
    b'"stream_options":{"include_usage":true,"continuous_usage_stats":true}'
)
"""Outputs as long as planned, whatever the model would emit; running usage gives the tokens per chunk."""


def plan_of(options: BenchOptions) -> BenchPlan:
    """Read the trace or begin the workload.

    Raises:
        ConfigError: the trace can't be read, or the workload can't be made.
    """
    source: Iterator[TrafficRequest]
    trace: TraceRequests | None
    if options.workload == "images":
        raise ConfigError("bench sends no images", hint="penstock simulate takes this workload")
    if options.trace is None:
        total, trace = options.requests, None
        source = of_workload(options)
    else:
        requests, trace = of_trace(options)
        total = len(requests) if options.requests is None else min(len(requests), options.requests)
        source = numbered(requests)  # every prompt must be made, even those with known lengths only
    if options.duration is not None:
        total = None
    return BenchPlan(options=options, source=cut(options, source), total=total, trace=trace)


def _request_headers(options: BenchOptions, id: str, request: TrafficRequest) -> dict[str, str]:
    headers = {"content-type": "application/json", "x-request-id": id}
    if options.api_key:
        headers["authorization"] = f"Bearer {options.api_key}"
    if request.session is not None:
        headers["x-penstock-session-id"] = request.session
    if request.program is not None:
        headers["x-penstock-program-id"] = request.program
    if request.kind is not None:
        headers["x-penstock-context-type"] = request.kind
    return headers
