"""Admin answers: what the admin routes that a command reads return: status, requests, decisions, index and settings."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from penstock.frontend.program_ledger import ProgramStatus
from penstock.kernel.latency_bins import Bins
from penstock.kernel.machine import Nanos
from penstock.kernel.request_record import RequestEnd
from penstock.router.status_rows import ModelStatus, QueueStatus, StatusCounts, StatusFinding, WorkerStatus
from penstock.runtime.cluster_state.crash_log import CrashStatus
from penstock.runtime.cluster_state.fleet_api import DesiredPool
from penstock.runtime.planning.planner_report import PlannerReport


class ShadowStatus(msgspec.Struct, kw_only=True):
    """Copies of one name's requests to one model. ``seconds``, ``answered_seconds``: means of the compared answers."""

    model: str
    share: float
    same: int = 0
    different: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float | None = None
    answered_seconds: float | None = None

    def join(self, other: "ShadowStatus") -> None:
        """Add another process's counts."""
        for field in ("seconds", "answered_seconds"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine is None or theirs is None:
                setattr(self, field, theirs if mine is None else mine)
            else:
                here, there = self.compared, other.compared
                setattr(self, field, (mine * here + theirs * there) / max(1, here + there))
        for field in ("same", "different", "failed", "skipped"):
            setattr(self, field, getattr(self, field) + getattr(other, field))

    @property
    def compared(self) -> int:
        return self.same + self.different


class TokenizerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Cache of one model's tokenizer."""

    caches: bool
    hits: int
    misses: int
    cache_bytes: int
    tokens_cached: int
    tokens_encoded: int


class LoopStatus(msgspec.Struct, frozen=True):
    """Seconds for which the event loop was blocked at most: ever, and since metrics.csv was written last."""

    longest: float | None
    recent: float | None


class LastMinute(msgspec.Struct, frozen=True, kw_only=True):
    """How fast requests were answered in the last minute: seconds, None where nothing was measured.

    ``ended``: requests that were over; TTFT counts at a request's first token, its mean ITL at its end.
    """

    ended: int
    ttft_p50: float | None
    ttft_p95: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_p99: float | None


class LastMinuteBins(msgspec.Struct, frozen=True, kw_only=True):
    """The same for another process: quantiles can't be added, bins can. ``ended``: by outcome."""

    ended: dict[str, int]
    ttft: Bins
    itl: Bins


class NameStatus(msgspec.Struct, kw_only=True):
    """A name that stands for models. ``weights``: of the models behind it; ``requests``: by model, since the start."""

    name: str
    weights: dict[str, float]
    requests: dict[str, int]
    shadows: list[ShadowStatus] = []


class WantedAdapter(msgspec.Struct, kw_only=True):
    """A LoRA adapter that is to be on so many workers at any time, those that hold it and those that load it now.

    ``why``: why there are fewer.
    """

    name: str
    model: str
    wanted: int
    workers: list[str]
    loading: list[str]
    why: str = ""


class StatusFields(msgspec.Struct, kw_only=True):
    """What operators read of a cluster. ``uptime``: seconds; ``endpoint``: URL of the OpenAI routes."""

    cluster: str
    version: str
    run: str
    endpoint: str
    uptime: float
    draining: bool
    mode: str
    models: list[ModelStatus]
    workers: list[WorkerStatus]
    queue: dict[str, QueueStatus]
    requests: StatusCounts
    hit_rate: float | None
    crashes: list[CrashStatus]
    findings: list[StatusFinding]
    frontends: list[str]
    planner: PlannerReport | None
    tokenizers: dict[str, TokenizerStatus]
    loop: LoopStatus
    router_faults: int
    pools: list[DesiredPool] = []
    """As their supervisors last reported them."""
    names: list[NameStatus] = []
    adapters: list[WantedAdapter] = []
    programs: list[ProgramStatus] = []
    """The newest, with what their requests came to since the frontends were started."""


class ClusterStatus(StatusFields, kw_only=True):
    """Status of the whole cluster: counts of requests are those of all its frontend processes."""

    last_minute: LastMinute


class ProcessStatus(StatusFields, kw_only=True):
    """Status as one frontend process knows it, its own counts alone."""

    last_minute: LastMinuteBins


class RouterBelief(msgspec.Struct, frozen=True, kw_only=True):
    """What one router believes of a worker.

    Args:
        state: how well it knows the worker's cache: exact, joining, recovering, late, approximate, or none.
        host, disk: the worker's own hashes of the blocks there, 64 bits of each as its KV events have them.
    """

    router: str
    state: str
    host: Sequence[int]
    disk: Sequence[int]


class WorkerIndex(msgspec.Struct, frozen=True):
    """The same of every frontend process that answers."""

    routers: list[RouterBelief]


D = TypeVar("D")


class RequestList(msgspec.Struct, frozen=True):
    """Ended requests, the newest first."""

    requests: list[RequestEnd]


class DecisionList(msgspec.Struct, Generic[D], frozen=True):
    """Decisions, the newest first: as JSON where they are passed on, as ``Decision`` where they are read."""

    decisions: list[D]


class DecisionKey(msgspec.Struct, frozen=True):
    """What tells one recorded decision from all others."""

    at: Nanos
    request: str
    attempt: int
    stage: str = "aggregated"


KnobText = str | int | float | bool | None
"""A value as operators give it."""
KnobValue = KnobText | dict[str, float]


class KnobSinceStart(msgspec.Struct, frozen=True):
    """A knob that was changed: its value at the start and now."""

    start: KnobValue
    now: KnobValue


class ProcessSettings(msgspec.Struct, frozen=True):
    """The knobs of one frontend process."""

    name: str
    settings: dict[str, KnobValue]


class LiveSettings(msgspec.Struct, frozen=True):
    """Every live knob, those that were changed, and the knobs of each frontend process."""

    settings: dict[str, KnobValue]
    changed: dict[str, KnobSinceStart]
    frontends: list[ProcessSettings]


class KnobChange(msgspec.Struct, frozen=True):
    """A knob that was changed now."""

    old: KnobValue
    new: KnobValue


class SettingsSet(msgspec.Struct, frozen=True):
    """What POST /admin/set changed, and the value of every knob that it named."""

    changed: dict[str, KnobChange]
    values: dict[str, KnobValue]
