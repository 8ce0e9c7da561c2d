"""Options of ``penstock bench``."""

from dataclasses import dataclass
from pathlib import Path

from penstock.kernel.errors import ConfigError
from penstock.report.run.judged_slo import USUAL
from penstock.report.traffic_options import TrafficOptions
from penstock.traffic.prompt_maker import TOKENS


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
