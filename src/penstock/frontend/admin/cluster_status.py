"""Cluster status: the answers of GET /admin/status, for all frontend processes and for one, and of /admin/index."""

from collections.abc import Sequence

import msgspec

from penstock.frontend.program_ledger import ProgramStatus
from penstock.frontend.shadows.shadow_status import ShadowStatus
from penstock.kernel.latency_bins import Bins
from penstock.router.status_rows import ModelStatus, QueueStatus, StatusCounts, StatusFinding, WorkerStatus
from penstock.runtime.cluster_state.crash_log import CrashStatus
from penstock.runtime.cluster_state.fleet_api import DesiredPool
from penstock.runtime.planning.planner_report import PlannerReport


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
