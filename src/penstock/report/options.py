"""What can a bench be asked to do?"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.kernel.errors import ConfigError
from penstock.traffic.arrivals import Kind
from penstock.traffic.prompts import TOKENS
from penstock.traffic.request import TRACE_BLOCK
from penstock.traffic.workloads import Form


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """One run of the load generator, as ``penstock bench`` takes it. Times in seconds, lengths in tokens.

    Args:
        url: of the server, with or without /v1.
        trace: Mooncake JSON lines; or else ``workload`` at ``rate`` requests per second.
        requests, duration: end after so many requests or seconds, whichever comes first; unset, a trace runs to its
            end and a workload for 60 s.
        speed_up: everything arrives so many times faster than the trace or workload says.
        model: as the server knows it; unset where it serves only one.
        max_inflight: an arrival that finds so many in flight is not sent, and makes the run invalid.
        out: folder in which the run folder is made.
        slo_ttft, slo_itl: service level that goodput is counted by: TTFT and the request's mean ITL.
        timeout: a request without an end after so long is given up.
        trace_block_size: tokens per hash id of the trace. trace_start, trace_end: slice of its clock.
        spread_ties: spread requests of one timestamp evenly up to the next one.
        skip_bad: leave bad rows of the trace out and count them.
        form: workload prompts as token ids or as text messages.
        token_range: ids [low, high) of which token prompts are made.
        block_size: of the engine, for the bound of an infinite cache; unset asks the server.
    """

    url: str
    trace: Path | None = None
    workload: Literal["chat", "rag", "agent"] | None = None
    rate: float = 4.0
    arrivals: Kind = "poisson"
    requests: int | None = None
    duration: float | None = None
    seed: int = 0
    speed_up: float = 1.0
    model: str | None = None
    max_inflight: int = 2048
    json: bool = False
    out: Path = Path("runs")
    slo_ttft: float | None = 2.0
    slo_itl: float | None = 0.025
    api_key: str | None = None
    timeout: float = 600.0
    trace_block_size: int = TRACE_BLOCK
    trace_start: float = 0.0
    trace_end: float | None = None
    spread_ties: bool = False
    skip_bad: bool = False
    form: Form = "tokens"
    token_range: tuple[int, int] = TOKENS
    block_size: int | None = None
    html: bool = True

    def check(self) -> None:
        """Raise `ConfigError` naming every option that can't be."""
        wrong: list[str] = []
        if (self.trace is None) == (self.workload is None):
            wrong.append("give either a trace or a workload")
        if not self.url.startswith(("http://", "https://")):
            wrong.append(f"the URL must begin with http:// or https://, not {self.url!r}")
        for name in ("rate", "speed_up", "timeout", "max_inflight", "trace_block_size"):
            if not getattr(self, name) > 0:
                wrong.append(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("requests", "duration", "slo_ttft", "slo_itl", "block_size"):
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
        """Whether prompts are text, of which only the server knows the tokens."""
        return self.trace is None and self.form == "text"

    @property
    def base(self) -> str:
        """The URL without /v1 and without a slash at its end."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")
